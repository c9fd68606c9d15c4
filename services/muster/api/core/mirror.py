"""Cluster to rows: every version of every status, once, in order; what happened between two of them becomes events.

The cursor moves in the commit that holds what was read, so a crash at any moment neither loses nor repeats an event.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Protocol

import structlog
from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.cluster.cluster import FoundJob, JobCluster
from muster.api.core.database.db import Database
from muster.api.core.database.tables import AttemptRow, JobRow, MirrorRow, ProjectRow
from muster.api.core.events import repository as events
from muster.api.core.events.types import EventType, NewEvent, events_between
from muster.api.core.hub import NotificationHub
from muster.api.core.jobs import repository as jobs
from muster.api.core.observability import ApiMetrics
from muster.local.cluster import RawChange
from muster.words.base import dump
from muster.words.names import DEFAULT_PROJECT, FIRST_PERSON, PERSON_NAME, Label
from muster.words.status import JobStatus, Phase
from muster.words.times import epoch_seconds, rfc3339

log = structlog.get_logger("muster.api.mirror")

BATCH = 500
# Changes that one transaction takes over. Its rows are locked meanwhile, on SQLite all there are: with ten times as
# many a cancel would wait for seconds, and with a tenth the commits would cost more than the changes.
TOGETHER = 50


class MirrorListener(Protocol):
    """Listener to the changes that the mirror takes over, in the transaction that does so."""

    async def attempt_changed(
        self, session: AsyncSession, row: JobRow, before: dict[str, Any] | None, after: dict[str, Any]
    ) -> None:
        """An attempt is new or otherwise than it was last seen: `before`."""

    async def job_ended(self, session: AsyncSession, job_id: str, at: float) -> None:
        """The job is over, or was taken out of the cluster."""


class ClusterMirror:
    """`caught_up` says whether all that the cluster had was read; when it comes about, those of `waiting` are woken."""

    def __init__(
        self,
        database: Database,
        cluster: JobCluster,
        hub: NotificationHub,
        metrics: ApiMetrics,
        listener: MirrorListener,
    ) -> None:
        self._database, self._cluster, self._hub, self._metrics = database, cluster, hub, metrics
        self._listener = listener
        self._cursor: int | None = None
        self._seen_version = -1
        self._taken = self._total = 0  # changes, until it has caught up
        # The cluster's version when this process began. To have read all up to it is to have caught up: a busy cluster
        # always has a newer one, so there may never be a look that finds nothing new.
        self._target: int | None = None
        self.caught_up = False
        self.waiting: list[asyncio.Event] = []

    def behind(self) -> str:
        """Return the work that remains before the rows match the cluster for the first time; empty from then on."""
        if self.caught_up:
            return ""
        return f"catching up, {self._taken} of {self._total}" if self._total else "catching up: reading the cluster"

    async def step(self) -> bool:
        """Take over one batch of changes; True when there may be more."""
        version = await self._cluster.version()
        if version == self._seen_version:
            return False
        if self._target is None:
            self._target = version
        if self._cursor is None:
            self._cursor = await self._stored_cursor()
        if not self.caught_up:
            self._total = self._taken + await self._cluster.behind(self._cursor)
        changes = await self._cluster.changes(self._cursor, BATCH)
        self._metrics.mirror_lag.set(max(0, version - self._cursor) if changes else 0)
        if not changes:
            self._seen_version = version
            self._note_caught_up()
            return False
        for first in range(0, len(changes), TOGETHER):
            # Those of one version may be in several transactions: the cursor moves past it with the last of them, and
            # whoever begins again in between finds by the rows' versions what is taken over already.
            part, rest = changes[first : first + TOGETHER], changes[first + TOGETHER :]
            whole = [change.version for change in part if not rest or change.version < rest[0].version]
            if not await self._take(part, whole[-1] if whole else self._cursor):
                self._cursor = None
                return True
        if self._cursor >= self._target:
            self._note_caught_up()
        return True

    async def _take(self, changes: list[RawChange], cursor: int) -> bool:
        """Take these changes over and move the cursor, in one transaction. False where another process was quicker."""
        unknown = await self._unknown_jobs(changes)
        try:
            async with self._database.write() as session:
                changed_jobs = await self._take_over(session, changes, unknown, cursor)
        except IntegrityError:  # another process mirrored, or a name was taken, in between: look again
            return False
        if changed_jobs is None:
            return False
        self._cursor = cursor
        self._taken += len(changes)
        self._metrics.mirrored.inc(len(changes))
        for job_id in changed_jobs:
            self._hub.tell(job_id)
        return True

    def _note_caught_up(self) -> None:
        if self.caught_up:
            return
        self.caught_up = True
        for event in self.waiting:
            event.set()

    async def _stored_cursor(self) -> int:
        async with self._database.read() as session:
            row = await session.get(MirrorRow, self._cluster.name)
        return row.version if row else 0

    async def _unknown_jobs(self, changes: list[RawChange]) -> dict[str, FoundJob]:
        """Jobs that were made in the cluster by other means; asked for before the write, which must be short."""
        uids = list(dict.fromkeys(change.uid for change in changes))
        async with self._database.read() as session:
            mirrored = set((await session.scalars(select(JobRow.id).where(JobRow.id.in_(uids)))).all())
        looked_up = [(uid, await self._cluster.find(uid)) for uid in uids if uid not in mirrored]
        there = [(uid, job) for uid, job in looked_up if job is not None]
        # Lists are in the order of the rows. A cluster's times are whole seconds: within one the changes' order counts.
        return dict(sorted(there, key=lambda each: each[1].created_at))

    async def _take_over(
        self, session: AsyncSession, changes: list[RawChange], unknown: dict[str, FoundJob], version: int
    ) -> set[str] | None:
        """The ids of jobs with news; None if another process has moved the cursor since it was read."""
        cursor = await self._locked_cursor(session)
        if cursor.version != self._cursor:
            return None
        cursor.version = version
        for job in unknown.values():
            await _import(session, job)
        uids = {change.uid for change in changes}
        rows = {row.id: row for row in (await session.scalars(select(JobRow).where(JobRow.id.in_(uids)))).all()}
        by_job: dict[str, list[NewEvent]] = {}
        for change in changes:
            row = rows.get(change.uid)
            if row is not None and change.version > row.status_version:
                by_job.setdefault(row.id, []).extend(await self._apply(session, row, change))
        await session.flush()
        for job_id, happened in by_job.items():
            await events.append(session, job_id, happened)
        return set(by_job)

    async def _apply(self, session: AsyncSession, row: JobRow, change: RawChange) -> tuple[NewEvent, ...]:
        raw = json.loads(change.status)
        before, happened = row.status, _happened(row.status, raw, change)
        row.status, row.status_version = raw, change.version
        row.phase = str(raw.get("phase", ""))[:64]
        row.live = row.live and row.phase not in _TERMINAL
        row.finished_at = _finished_at(raw)
        await self._keep_attempts(session, row, before, raw)
        if change.gone:
            happened += _remove(row, change)
        if change.gone or row.phase in _TERMINAL:
            await self._listener.job_ended(session, row.id, row.finished_at or change.at)
        return happened

    async def _keep_attempts(
        self, session: AsyncSession, row: JobRow, before: dict[str, Any], raw: dict[str, Any]
    ) -> None:
        old_attempts = {attempt.get("number"): attempt for attempt in before.get("attempts") or ()}
        for attempt in raw.get("attempts") or ():
            number = attempt.get("number")
            if isinstance(number, int) and old_attempts.get(number) != attempt:
                await session.merge(AttemptRow(job_id=row.id, number=number, body=attempt))
                await self._listener.attempt_changed(session, row, old_attempts.get(number), attempt)

    async def _locked_cursor(self, session: AsyncSession) -> MirrorRow:
        query = select(MirrorRow).where(MirrorRow.cluster == self._cluster.name).with_for_update()
        row = (await session.scalars(query)).one_or_none()
        if row is None:
            row = MirrorRow(cluster=self._cluster.name, version=0)
            session.add(row)
            await session.flush()
        return row


_TERMINAL = tuple(phase for phase in Phase if phase.terminal)


def _happened(before: dict[str, Any], raw: dict[str, Any], change: RawChange) -> tuple[NewEvent, ...]:
    old, new = status_of(before), status_of(raw)
    if old is not None and new is not None:
        return events_between(old, new, change.at)
    if before.get("phase") == raw.get("phase"):
        return ()
    # Written by a newer operator in words that we do not know: say so, keep it whole, go on.
    data = {"from": before.get("phase"), "to": raw.get("phase"), "code": raw.get("code")}
    return (NewEvent(EventType.JOB_CHANGED, change.at, str(raw.get("because", "")), None, data),)


def status_of(raw: dict[str, Any]) -> JobStatus | None:
    """The status as a model; None when a newer version wrote it in a way that this one can't read."""
    try:
        return JobStatus.model_validate(raw)
    except ValidationError:
        return None


def _finished_at(raw: dict[str, Any]) -> float | None:
    try:
        return epoch_seconds(raw.get("finishedAt"))
    except ValueError:  # there is none yet, or it is in words of a newer version
        return None


def _remove(row: JobRow, change: RawChange) -> tuple[NewEvent, ...]:
    row.deleted, row.live = True, False
    message = "the TrainingJob was removed from the cluster; its history stays here"
    if row.phase not in _TERMINAL:
        row.phase, row.finished_at = Phase.CANCELLED, change.at
        row.status = {
            **row.status,
            "phase": Phase.CANCELLED,
            "code": "Deleted",
            "because": message,
            "finishedAt": rfc3339(change.at),
        }
    return (NewEvent(EventType.JOB_DELETED, change.at, message),)


async def _project_of(session: AsyncSession, namespace: str) -> str:
    """Return the project by the namespace, which the cluster guards, and not by a label, which anybody may write."""
    project = (await session.scalars(select(ProjectRow.name).where(ProjectRow.namespace == namespace))).one_or_none()
    return project or DEFAULT_PROJECT


def _owner(labels: dict[str, str]) -> str:
    name = labels.get(Label.OWNER, "")
    return name if re.fullmatch(PERSON_NAME, name) else FIRST_PERSON


async def _import(session: AsyncSession, job: FoundJob) -> None:
    message = "the job was made in the cluster, not through this API"
    made = jobs.NewJob(
        id=job.uid,
        namespace=job.namespace,
        name=job.name,
        project=await _project_of(session, job.namespace),
        owner=_owner(job.labels),
        labels={key: value for key, value in job.labels.items() if key not in (Label.PROJECT, Label.OWNER)},
        spec=job.spec,
        priority=job.spec.get("priority", 0),
        created_at=job.created_at,
        status=dump(JobStatus()),
        live=not await jobs.live_with_name(session, job.namespace, job.name),
        relayed_version=1,
    )
    await jobs.insert(session, [(made, NewEvent(EventType.JOB_IMPORTED, job.created_at, message))])
    log.info("job imported", job=made.id, name=made.name, namespace=made.namespace)
