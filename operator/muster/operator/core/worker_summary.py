"""Summary of the gang's workers, computed once per decision."""

from __future__ import annotations

from dataclasses import dataclass

from muster.operator.core.observed import ObservedJob, ObservedWorker, WorkerState
from muster.words.signals import Heartbeat
from muster.words.status import GangStatus, JobStatus


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """An observation with its workers sorted by what the rules ask of them."""

    seen: ObservedJob
    mine: tuple[ObservedWorker, ...]
    """Workers of the current attempt in their current incarnations, with those that exited or can't be reached among
    them."""
    older: tuple[ObservedWorker, ...]
    """Workers of attempts before the current one, and lives of the current attempt's that have been replaced."""
    exited: tuple[ObservedWorker, ...]
    unreachable: tuple[ObservedWorker, ...]
    rejected: tuple[ObservedWorker, ...]
    """Workers of mine that the world does not let exist."""
    ready: int
    """The number of mine that run."""
    missing: tuple[int, ...]
    """Indices of the gang for which there is no worker."""

    @property
    def status(self) -> JobStatus:
        return self.seen.status

    @property
    def gang(self) -> GangStatus:
        return self.seen.status.gang

    @property
    def describe_gang(self) -> str:
        """Such as `all 4 workers`."""
        return "the worker" if self.gang.wanted == 1 else f"all {self.gang.wanted} workers"

    @property
    def committed_step(self) -> int:
        """The step of the newest commit, 0 if there is none; as it was last known where commits can't be read."""
        if self.seen.committed is not None:
            return self.seen.committed.step
        checkpoint = self.seen.status.checkpoint
        return checkpoint.step if checkpoint is not None and self.seen.commits_unreadable else 0

    @property
    def empty(self) -> bool:
        """Return whether no worker is left of the current attempt or any before it. One that is newer than the status
        knows belongs to another operator."""
        return not self.mine and not self.older

    @property
    def all_done(self) -> bool:
        """Return whether every worker of the attempt ended well. A gang without workers has not."""
        size = self.gang.wanted
        return len(self.exited) == size > 0 and all(w.exit is not None and w.exit.exit_code == 0 for w in self.exited)

    @property
    def beat(self) -> Heartbeat | None:
        """The heartbeat of rank 0 of the current attempt."""
        for worker in self.mine:
            if worker.worker == 0:
                return next((beat for beat in worker.heartbeats if beat.rank == 0 and worker.wrote(beat)), None)
        return None


def summarize_workers(seen: ObservedJob) -> WorkerSummary:
    gang, attempt = seen.status.gang, seen.status.attempt
    running, exited_state = WorkerState.RUNNING, WorkerState.EXITED
    mine, older, exited, unreachable, ready = [], [], [], [], 0
    rejected: list[ObservedWorker] = []
    for worker in seen.workers:
        # Of the current attempt an older life is like a worker of an older attempt, a newer one like one of a newer.
        age = worker.attempt - attempt or worker.incarnation - gang.incarnation(worker.worker)
        if age == 0:
            mine.append(worker)
            state = worker.state
            if state is running:
                ready += 1
            elif state is exited_state:
                exited.append(worker)
            elif state is WorkerState.UNREACHABLE:
                unreachable.append(worker)
            elif worker.rejection is not None:
                rejected.append(worker)
        elif age < 0:
            older.append(worker)
    size = gang.wanted
    missing: tuple[int, ...] = ()
    if len(mine) < size:
        present = {worker.worker for worker in mine}
        missing = tuple(index for index in range(size) if index not in present)
    return WorkerSummary(
        seen, tuple(mine), tuple(older), tuple(exited), tuple(unreachable), tuple(rejected), ready, missing
    )
