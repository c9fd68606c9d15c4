"""TrainingJobs in one SQLite file: the local stand-in for the Kubernetes API, shared by API and operator.

The same habits as the real one: every write moves `resourceVersion`, a status write is a compare-and-swap, deletion
first marks the object and the operator removes it when the last worker is gone. Each version of a job is also kept in
`history`, so a reader that was away misses nothing.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from muster.local.private import make_private_database
from muster.words.base import dump_json
from muster.words.fleet import FleetReport
from muster.words.job import JobSpec, Metadata, TrainingJob
from muster.words.quotas import ProjectQuota
from muster.words.status import JobStatus

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    uid TEXT PRIMARY KEY, namespace TEXT NOT NULL, name TEXT NOT NULL,
    version INTEGER NOT NULL, generation INTEGER NOT NULL,
    created REAL NOT NULL, deleted REAL, labels TEXT NOT NULL, spec TEXT NOT NULL, status TEXT NOT NULL,
    UNIQUE (namespace, name));
CREATE INDEX IF NOT EXISTS jobs_by_version ON jobs (version);
CREATE TABLE IF NOT EXISTS history (
    version INTEGER PRIMARY KEY, uid TEXT NOT NULL, at REAL NOT NULL, gone INTEGER NOT NULL, status TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS counter (id INTEGER PRIMARY KEY CHECK (id = 0), version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS quotas (project TEXT PRIMARY KEY, quota TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS secrets (
    project TEXT NOT NULL, name TEXT NOT NULL, payload TEXT NOT NULL, PRIMARY KEY (project, name));
CREATE TABLE IF NOT EXISTS nodes (id INTEGER PRIMARY KEY CHECK (id = 0), report TEXT NOT NULL);
INSERT OR IGNORE INTO counter VALUES (0, 0);
"""


_SCHEMA_VERSION = 1  # SQLite's user_version; 0 in a file of before it was written there


class UnusableFile(OSError):
    """The file can't be used as it is; the message says why and what to do."""


class VersionConflict(Exception):
    """The object changed since it was read: read it again and decide anew."""


class AlreadyExists(Exception):
    """A job of that name, or with that uid, exists already; `uid` says which."""

    def __init__(self, message: str, uid: str) -> None:
        super().__init__(message)
        self.uid = uid


class NotFound(Exception):
    """No such job (any more)."""


@dataclass(frozen=True)
class StatusChange:
    """One version of one job's status."""

    version: int
    uid: str
    at: float
    gone: bool  # whether the object was removed
    status: JobStatus


@dataclass(frozen=True)
class RawJob:
    """A job whose spec and status are still the JSON texts that were written."""

    metadata: Metadata
    spec: str
    status: str


@dataclass(frozen=True)
class RawChange:
    """A Change whose status is still the JSON text that was written."""

    version: int
    uid: str
    at: float
    gone: bool
    status: str


class LocalCluster:
    """The TrainingJobs in the SQLite file at `path`, which is made if it is not there.

    Specs are read as `spec_type`: the plain one takes any training as it was written.
    Any thread or process may use it: each thread has a connection of its own.
    Raises UnusableFile for a damaged file, one of a newer Muster, and a full disk.
    """

    def __init__(self, path: Path, spec_type: type[JobSpec] = JobSpec) -> None:
        self.path, self.spec_type = path, spec_type
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(OSError):  # SQLite says better what is wrong with it
            make_private_database(path)
        self._threads = threading.local()
        try:
            self._prepare(self._connection())
        except sqlite3.DatabaseError as error:
            raise UnusableFile(_unusable(path, str(error))) from error

    def _prepare(self, db: sqlite3.Connection) -> None:
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        if version > _SCHEMA_VERSION:
            raise UnusableFile(
                f"{self.path} is of a newer Muster (its version is {version}, this one knows {_SCHEMA_VERSION}): "
                "start that version, or name another folder with --state"
            )
        db.execute("PRAGMA journal_mode=WAL")
        db.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")  # one flush to the disk instead of one for each table
        if version < _SCHEMA_VERSION:
            db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")

    def create(
        self, name: str, namespace: str, spec: JobSpec, labels: dict[str, str], uid: str | None = None
    ) -> TrainingJob:
        """Make the job; `uid` makes a repeated create recognisable. Raises AlreadyExists."""
        uid = uid or str(uuid.uuid4())
        now = time.time()
        status = JobStatus(queued_at=now, since=now)
        with self._write() as db:
            taken = db.execute(
                "SELECT uid FROM jobs WHERE uid = ? OR (namespace = ? AND name = ?)", (uid, namespace, name)
            ).fetchone()
            if taken:
                raise AlreadyExists(f"job {namespace}/{name} exists already", taken["uid"])
            version = _next(db)
            row = (uid, namespace, name, version, 1, now, None, json.dumps(labels), dump_json(spec), dump_json(status))
            db.execute("INSERT INTO jobs VALUES (?,?,?,?,?,?,?,?,?,?)", row)
            _remember(db, version, uid, dump_json(status))
        metadata = Metadata(
            name=name,
            namespace=namespace,
            uid=uid,
            generation=1,
            resource_version=str(version),
            creation_timestamp=now,
            labels=labels,
        )
        return TrainingJob(metadata=metadata, spec=spec, status=status)

    def get(self, uid: str) -> TrainingJob:
        row = self._connection().execute("SELECT * FROM jobs WHERE uid = ?", (uid,)).fetchone()
        if row is None:
            raise NotFound(f"no job with uid {uid}")
        return self._job(row)

    def raw(self, uid: str) -> RawJob:
        """The job with its spec as it stands, readable or not. Raises NotFound."""
        row = self._connection().execute("SELECT * FROM jobs WHERE uid = ?", (uid,)).fetchone()
        if row is None:
            raise NotFound(f"no job with uid {uid}")
        return RawJob(_metadata(row), row["spec"], row["status"])

    def jobs(self, after_version: int = 0) -> list[TrainingJob]:
        """Jobs written after that version, oldest write first; all of them by default."""
        query = "SELECT * FROM jobs WHERE version > ? ORDER BY version"
        rows = self._connection().execute(query, (after_version,)).fetchall()
        return [self._job(row) for row in rows]

    def names_in(self, phases: Collection[str]) -> list[str]:
        """The names of the jobs in any of these phases, also of those that can't be read."""
        query = "SELECT name, status FROM jobs ORDER BY version"
        rows = self._connection().execute(query).fetchall()
        return [row["name"] for row in rows if json.loads(row["status"]).get("phase") in phases]

    def version(self) -> int:
        """The newest version written: a cheap way to see whether anything changed."""
        return int(self._connection().execute("SELECT version FROM counter").fetchone()["version"])

    def written_after(self, version: int) -> tuple[str, ...]:
        """The uids of the jobs that were written or removed after that version; of all that there are if it is 0."""
        db = self._connection()
        written = db.execute("SELECT uid FROM jobs WHERE version > ? ORDER BY version", (version,)).fetchall()
        removed = "SELECT uid FROM history WHERE gone = 1 AND version > ?"
        gone = db.execute(removed, (version,)).fetchall() if version else []
        return tuple(dict.fromkeys(row["uid"] for row in [*written, *gone]))

    def changes(self, after_version: int, limit: int = 1000) -> list[StatusChange]:
        """The history after that version, oldest first."""
        return [
            StatusChange(raw.version, raw.uid, raw.at, raw.gone, JobStatus.model_validate_json(raw.status))
            for raw in self.raw_changes(after_version, limit)
        ]

    def count_changes(self, after_version: int) -> int:
        """Return the length of the history after that version."""
        query = "SELECT count(*) AS many FROM history WHERE version > ?"
        return int(self._connection().execute(query, (after_version,)).fetchone()["many"])

    def raw_changes(self, after_version: int, limit: int = 1000) -> list[RawChange]:
        """Return `changes` with each status as the JSON that was written: a newer one must not stop the reader."""
        query = "SELECT * FROM history WHERE version > ? ORDER BY version LIMIT ?"
        rows = self._connection().execute(query, (after_version, limit)).fetchall()
        return [RawChange(row["version"], row["uid"], row["at"], bool(row["gone"]), row["status"]) for row in rows]

    def write_status(self, uid: str, status: JobStatus, resource_version: str) -> str:
        """Compare-and-swap; returns the new resourceVersion. Raises VersionConflict, NotFound."""
        with self._write() as db:
            _check(db, uid, resource_version)
            version, text = _next(db), dump_json(status)
            db.execute("UPDATE jobs SET status = ?, version = ? WHERE uid = ?", (text, version, uid))
            _remember(db, version, uid, text)
        return str(version)

    def write_spec(self, uid: str, spec: JobSpec, resource_version: str | None = None) -> str:
        """Replace the spec; a change moves `generation`. Raises VersionConflict, NotFound.

        `resource_version` is None to replace whatever version is there.
        """
        with self._write() as db:
            row = _check(db, uid, resource_version)
            text = dump_json(spec)
            if text == row["spec"]:
                return str(row["version"])
            version = _next(db)
            db.execute(
                "UPDATE jobs SET spec = ?, generation = generation + 1, version = ? WHERE uid = ?", (text, version, uid)
            )
        return str(version)

    def delete(self, uid: str) -> None:
        """Mark for deletion; the operator stops the gang and then removes it. Raises NotFound."""
        with self._write() as db:
            _check(db, uid, None)
            version = _next(db)
            db.execute(
                "UPDATE jobs SET deleted = COALESCE(deleted, ?), version = ? WHERE uid = ?", (time.time(), version, uid)
            )

    def remove(self, uid: str) -> None:
        """Take the object away for good (what dropping the last finalizer does). Idempotent."""
        with self._write() as db:
            row = db.execute("SELECT status FROM jobs WHERE uid = ?", (uid,)).fetchone()
            if row is None:
                return
            db.execute("DELETE FROM jobs WHERE uid = ?", (uid,))
            _remember(db, _next(db), uid, row["status"], gone=True)

    def quotas(self) -> dict[str, str]:
        """The quota of each project that has one, as the JSON text of a contract ProjectQuota."""
        rows = self._connection().execute("SELECT project, quota FROM quotas ORDER BY project").fetchall()
        return {row["project"]: row["quota"] for row in rows}

    def write_quota(self, project: str, quota: ProjectQuota | None) -> None:
        """Say what the jobs of the project may hold from now on; None for no limit."""
        with self._write() as db:
            db.execute("DELETE FROM quotas WHERE project = ?", (project,))
            if quota is not None:
                db.execute("INSERT INTO quotas VALUES (?,?)", (project, dump_json(quota)))

    def secrets(self) -> dict[tuple[str, str], str]:
        """The payload of each secret by project and name, as `secrets.box.SecretBox` encrypted it."""
        rows = self._connection().execute("SELECT project, name, payload FROM secrets ORDER BY project, name")
        return {(row["project"], row["name"]): row["payload"] for row in rows}

    def write_secret(self, project: str, name: str, payload: str | None) -> None:
        """Store the encrypted payload in place of the previous one; None for no secret of that name."""
        with self._write() as db:
            db.execute("DELETE FROM secrets WHERE project = ? AND name = ?", (project, name))
            if payload is not None:
                db.execute("INSERT INTO secrets VALUES (?,?,?)", (project, name, payload))

    def nodes(self) -> str | None:
        """Return the operator's last report on the nodes, as the JSON text of a FleetReport; None before the first."""
        row = self._connection().execute("SELECT report FROM nodes").fetchone()
        return row["report"] if row is not None else None

    def write_nodes(self, report: FleetReport) -> None:
        with self._write() as db:
            db.execute("INSERT OR REPLACE INTO nodes VALUES (0, ?)", (dump_json(report),))

    def _job(self, row: sqlite3.Row) -> TrainingJob:
        return TrainingJob(
            metadata=_metadata(row),
            spec=self.spec_type.model_validate_json(row["spec"]),
            status=JobStatus.model_validate_json(row["status"]),
        )

    def _connection(self) -> sqlite3.Connection:
        """This thread's, closed when the thread is gone. To open one takes longer than most of what is asked of it."""
        connection: sqlite3.Connection | None = getattr(self._threads, "connection", None)
        if connection is None:
            connection = self._threads.connection = sqlite3.connect(self.path, timeout=30, isolation_level=None)
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA synchronous=FULL")  # what was written survives a power cut, not only a crash
        return connection

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Flush this thread's writes to the disk once, at the end; if that fails, none of them is kept."""
        with self._write():
            yield

    @contextlib.contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        db = self._connection()
        within = db.in_transaction
        db.execute("SAVEPOINT one" if within else "BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("RELEASE one" if within else "COMMIT")
        except BaseException:
            if db.in_transaction:  # some failures of SQLite's have ended it already
                db.execute("ROLLBACK TO one" if within else "ROLLBACK")
            raise


def _unusable(path: Path, cause: str) -> str:
    if "disk is full" in cause:
        return f"the disk of {path.parent} is full: free some space and start again"
    if "not a database" in cause or "malformed" in cause:
        return (
            f"{path} is damaged ({cause}): restore it from a backup, or move it away to begin without its jobs; "
            "their checkpoints stay where they are"
        )
    return f"{path} can't be opened ({cause}): check its permissions, its disk and who else uses it"


def _next(db: sqlite3.Connection) -> int:
    row = db.execute("UPDATE counter SET version = version + 1 RETURNING version").fetchone()
    return int(row["version"])


def _remember(db: sqlite3.Connection, version: int, uid: str, status: str, gone: bool = False) -> None:
    db.execute("INSERT INTO history VALUES (?,?,?,?,?)", (version, uid, time.time(), int(gone), status))


def _check(db: sqlite3.Connection, uid: str, resource_version: str | None) -> sqlite3.Row:
    row: sqlite3.Row | None = db.execute("SELECT * FROM jobs WHERE uid = ?", (uid,)).fetchone()
    if row is None:
        raise NotFound(f"no job with uid {uid}")
    if resource_version is not None and str(row["version"]) != resource_version:
        raise VersionConflict(
            f"job {row['namespace']}/{row['name']} is at version {row['version']}, not {resource_version}"
        )
    return row


def _metadata(row: sqlite3.Row) -> Metadata:
    return Metadata(
        name=row["name"],
        namespace=row["namespace"],
        uid=row["uid"],
        generation=row["generation"],
        resource_version=str(row["version"]),
        creation_timestamp=row["created"],
        deletion_timestamp=row["deleted"],
        labels=json.loads(row["labels"]),
    )
