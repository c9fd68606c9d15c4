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
    """Workers of the current attempt, with those that exited or can't be reached among them."""
    older: tuple[ObservedWorker, ...]
    """Workers of attempts before the current one."""
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
        """Return whether no worker is left of the current attempt or any before it."""
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
                attempt = self.status.attempt
                return next((beat for beat in worker.heartbeats if beat.rank == 0 and beat.attempt == attempt), None)
        return None


def summarize_workers(seen: ObservedJob) -> WorkerSummary:
    attempt, running, exited_state = seen.status.attempt, WorkerState.RUNNING, WorkerState.EXITED
    mine, older, exited, unreachable, ready = [], [], [], [], 0
    rejected: list[ObservedWorker] = []
    for worker in seen.workers:
        if worker.attempt == attempt:
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
        elif worker.attempt < attempt:
            older.append(worker)
    size = seen.status.gang.wanted
    missing: tuple[int, ...] = ()
    if len(mine) < size:
        present = {worker.worker for worker in mine}
        missing = tuple(index for index in range(size) if index not in present)
    return WorkerSummary(
        seen, tuple(mine), tuple(older), tuple(exited), tuple(unreachable), tuple(rejected), ready, missing
    )
