"""The workers of one state folder as the core wants to see them: from records, exits, heartbeats and processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from muster.operator.core.observed import ObservedWorker, WorkerState
from muster.operator.local import processes
from muster.operator.local.processes import WorkerKey, WorkerProcess, WorkerRecord
from muster.operator.local.reading import HeartbeatReader, exit_without_record, read_exit, redacted_exit
from muster.words.names import EXIT_RECORD, FIRST_INCARNATION
from muster.words.state_folder import ATTEMPT_FOLDER, WORKER_FOLDER, StateFolder

LOST = "ProcessLost"  # Worker.reason: the processes are gone and nobody said why
OOM_KILLED = "OOMKilled"  # Worker.reason: as a kubelet calls it, so that a job is told the same in every world


class LocalWorkers:
    """Workers of this machine. Their folders are the truth; `removed` in memory only keeps a full disk from blocking
    recovery."""

    def __init__(self, state: StateFolder, heartbeats: HeartbeatReader, reads_only: bool = False) -> None:
        self._state = state
        self._reads_only = reads_only  # for a guest who looks while the operator works
        self._heartbeats = heartbeats
        self._removed: set[WorkerKey] = set()

    def of_job(
        self, uid: str, environment: Mapping[str, str], removing: frozenset[WorkerKey], fresh: bool
    ) -> tuple[ObservedWorker, ...]:
        """Every worker of the job that is not removed, of whatever attempt; `removing` names the removals under way.

        A fresh answer comes from a scan of all processes of the machine. The secrets of the job's own variables,
        `environment`, are kept out of what workers said when they ended.
        """
        running = processes.scan(self._state) if fresh else ()
        living = {member.key for member in running if member.key.job_uid == uid}
        keys = sorted(set(self.folders(uid)) | living)
        seen = (self._worker(key, running, environment, key in removing) for key in keys)
        return tuple(worker for worker in seen if worker)

    def folders(self, uid: str) -> Iterator[WorkerKey]:
        """Workers that have a folder and were not removed."""
        for attempt_folder in _children(self._state.root / "jobs" / uid, ATTEMPT_FOLDER):
            for folder in _children(attempt_folder, WORKER_FOLDER):
                key = _key(folder)
                if key not in self._removed and not (folder / processes.REMOVED).exists():
                    yield key

    def living(self) -> tuple[WorkerRecord, ...]:
        """The record of every worker of any job that runs now; a record that an operator died over is made up for."""
        running = processes.scan(self._state)
        records = (self._adopt(key, running) for key in sorted({member.key for member in running}))
        return tuple(record for record in records if record)

    def close(self, key: WorkerKey) -> None:
        """Close a worker of which no process is left: it is out of sight, and its files stay."""
        self._removed.add(key)
        self._heartbeats.forget(key)
        processes.mark_removed(self._state, key)

    def reopen(self, key: WorkerKey) -> None:
        self._removed.discard(key)

    def _worker(
        self, key: WorkerKey, running: tuple[WorkerProcess, ...], environment: Mapping[str, str], removing: bool
    ) -> ObservedWorker | None:
        record = processes.read_record(self._state, key) or self._adopt(key, running)
        ended = read_exit(self._state, key)
        if record is None and ended is None:
            # Claimed but not yet recognisable: between fork and exec. Else it never came to life.
            if not processes.is_claimed(self._state, key):
                return None
            return ObservedWorker(
                key.worker, key.attempt, "", WorkerState.STARTING, created_at=_claimed_at(self._state, key),
                incarnation=key.incarnation,
            )  # fmt: skip
        reason = ""
        if ended is None and record is not None and not processes.alive(self._state, record):
            # It may have ended, with a record, between the two looks.
            ended = read_exit(self._state, key)
            if ended is None:
                ended = exit_without_record(
                    self._state, key, processes.exit_code_of(record.pid), write=not self._reads_only
                )
                reason = LOST
        if ended is not None and ended.oom_killed:
            reason = OOM_KILLED
        started_at = record.started_at if record else (ended.at if ended else 0.0)
        return ObservedWorker(
            worker=key.worker,
            attempt=key.attempt,
            incarnation=key.incarnation,
            node=record.node if record else "",
            state=WorkerState.EXITED if ended else WorkerState.RUNNING,
            created_at=started_at,
            exit=redacted_exit(ended, environment) if ended else None,
            heartbeats=self._heartbeats.read(key),
            removing=removing,
            reason=reason,
            node_blameless=ended is not None and ended.unexplained,
            since=ended.at if ended else started_at,
        )

    def _adopt(self, key: WorkerKey, running: tuple[WorkerProcess, ...]) -> WorkerRecord | None:
        """The worker's record; written anew where an operator died between fork and record."""
        record = processes.read_record(self._state, key)
        top = processes.top_of(processes.members(running, key))
        if record or top is None or self._reads_only:
            return record
        return processes.record_found(self._state, key, top)


def ended(state: StateFolder, key: WorkerKey) -> bool:
    """Return whether its exit record exists, which the launcher writes last."""
    return (key.folder(state) / EXIT_RECORD).exists()


def _children(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if pattern.fullmatch(entry.name)]
    except OSError:
        return []


def _key(folder: Path) -> WorkerKey:
    attempt, worker = ATTEMPT_FOLDER.fullmatch(folder.parent.name), WORKER_FOLDER.fullmatch(folder.name)
    assert attempt, "it was found by this pattern"
    assert worker, "it was found by this pattern"
    incarnation = int(worker[2] or FIRST_INCARNATION)
    return WorkerKey(folder.parent.parent.name, int(attempt[1]), int(worker[1]), incarnation)


def _claimed_at(state: StateFolder, key: WorkerKey) -> float:
    try:
        return (key.folder(state) / processes.CLAIM).stat().st_mtime
    except OSError:
        return 0.0
