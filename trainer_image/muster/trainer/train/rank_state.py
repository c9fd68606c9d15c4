"""A rank's state as the outside sees it: what its heartbeats say, the wish that it stop, and why it failed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from muster.storage.small_files import write_whole
from muster.trainer.config import SPEAKER
from muster.trainer.launch.stack_dumps import main_thread_stands
from muster.trainer.tracking.processes import FAULTS
from muster.trainer.train.activity import RankActivity
from muster.trainer.train.heartbeats import HeartbeatThread
from muster.words.base import dump_json
from muster.words.names import FIRST_INCARNATION, HEARTBEAT, RANK_FAILURE, ExitCode
from muster.words.signals import Heartbeat, RankFailure, SlowRank, StepRecord, TrainerPhase

DATA_WINDOW_SECONDS = 60.0
STACK_REPORT_SHARE = (
    0.25  # of the time that a phase may take without progress: from then on a rank tells where it stands
)

# Phases with step boundaries, at which all ranks agree to stop. In the others nothing is lost by ending at once.
_AGREES = frozenset(
    {TrainerPhase.STEP, TrainerPhase.EVALUATION, TrainerPhase.CHECKPOINT, TrainerPhase.DRAIN, TrainerPhase.DONE}
)


@dataclass
class StepHistory:
    """History of this attempt's steps."""

    last: StepRecord | None = None  # the last step that is over
    first_at: float | None = None  # when the first step was over, in seconds since the epoch
    last_evaluation: StepRecord | None = None  # the last step after which the held-out loss was measured
    last_skipped: StepRecord | None = None  # the last step whose batch was not learnt from
    skipped: int = 0  # steps of the whole job whose batch was not learnt from
    skipped_samples: int = 0  # the samples of those steps

    def add(self, record: StepRecord) -> None:
        self.last = record
        if record.step_seconds > 0:  # step 0 is only an evaluation
            self.first_at = self.first_at or record.at
        if record.evaluation_loss is not None:
            self.last_evaluation = record
        if record.skipped:
            self.last_skipped = record


@dataclass
class CommitHistory:
    """History of the job's commits, as this rank knows it."""

    step: int | None = None  # the step of the last commit; None before the first
    at: float | None = None  # when it was made, in seconds since the epoch
    productive: float = 0.0  # productive seconds of this process when the last commit's state was taken
    best_step: int | None = None  # the step of the best commit so far, by the held-out loss
    waits: str = ""  # why a save that is due waits
    interval_seconds: float | None = None  # the time between two saves that the policy asks for now


class DataWaitWindow:
    """The share of the training time of the last minute or so that went into waiting for data."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, float]] = deque([(time.monotonic(), 0.0, 0.0)])

    def share(self, waited: float, productive: float) -> float | None:
        """The share of the time that went into waiting for data. It is None until a minute has passed, and where little
        of the minute was training.

        `waited` and `productive` are the seconds that this process has spent on either so far.
        """
        now, (then, waited_then, productive_then) = time.monotonic(), self._seen[0]
        if now - self._seen[-1][0] >= DATA_WINDOW_SECONDS / 6:
            self._seen.append((now, waited, productive))
        if now - then < DATA_WINDOW_SECONDS:
            return None
        if len(self._seen) > 7:
            self._seen.popleft()
        waited, productive = waited - waited_then, productive - productive_then
        return waited / (waited + productive) if waited + productive > DATA_WINDOW_SECONDS / 2 else None


class TrackerFaults:
    """Reports of the launcher about experiment trackers that it left out; only the rank that speaks passes them on."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = directory / FAULTS if rank == SPEAKER else None

    def read(self) -> str:
        try:
            return "" if self._path is None else self._path.read_text().strip()
        except OSError:
            return ""


class FailureRecord:
    """Record of the reason for which a rank ends. Two threads may find a reason at the same moment: the first one
    counts."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._left: RankFailure | None = None

    def leave(self, failure: RankFailure) -> int:
        """Write the failure if it is the first, and return the exit code of the first."""
        with self._lock:
            if self._left is None:
                self._left = failure
                with contextlib.suppress(OSError):
                    write_whole(self._path, dump_json(failure))
            return int(self._left.exit_code)


class RankState:
    """The state of one rank, set by the main thread; a thread of its own writes it to the heartbeat file."""

    def __init__(
        self,
        directory: Path,
        attempt: int,
        rank: int,
        started_at: float,
        incarnation: int = FIRST_INCARNATION,
    ) -> None:
        self.rank, self.step = rank, 0  # `step` is the last one that is done.
        self.stop_wanted = False  # whether this rank was asked to stop
        self.steps, self.commits = StepHistory(), CommitHistory()
        self.slow_ranks: tuple[SlowRank, ...] = ()
        self.memory = ""  # what a rank needs, in words
        self._life = attempt, incarnation
        self._started_at = started_at
        self._data_wait = DataWaitWindow()
        self._trackers = TrackerFaults(directory, rank)
        self._metrics_port: int | None = None
        self._failure = FailureRecord(directory / RANK_FAILURE.format(rank=rank))
        self.heartbeats = HeartbeatThread(directory / HEARTBEAT.format(rank=rank), self.heartbeat, self._stop)
        self.activity = RankActivity(started_at, self.heartbeats.wake)

    # --- what the main thread tells ---

    def resumed(self, step: int, committed_at: float | None, best_step: int | None) -> None:
        """Training continues after `step`, from a commit or (committed_at None) from nothing."""
        self.step, self.commits.best_step = step, best_step
        if committed_at is not None:
            self.commits.step, self.commits.at = step, committed_at

    def stepped(self, record: StepRecord) -> None:
        """A step is over, and what was due after it."""
        self.step = record.step
        self.activity.stepped(record)
        self.steps.add(record)
        self.heartbeats.news = True

    def committed(self, step: int, at: float, best: bool, productive: float) -> None:
        """Note that a commit of `step` exists. `productive` is the number of productive seconds when that step's state
        was taken.
        """
        commits = self.commits
        commits.step, commits.at, commits.productive = step, at, productive
        if best:
            commits.best_step = step
        self.heartbeats.news = True

    def serves_metrics(self, port: int) -> None:
        self._metrics_port = port

    # --- what the outside sees ---

    def heartbeat(self) -> Heartbeat:
        activity, steps, commits = self.activity, self.steps, self.commits
        seconds = activity.seconds()
        attempt, incarnation = self._life
        return Heartbeat.model_construct(
            attempt=attempt,
            incarnation=incarnation,
            rank=self.rank,
            pid=os.getpid(),
            phase=activity.phase,
            step=self.step,
            at=time.time(),
            progressed_at=activity.progressed_at,
            started_at=self._started_at,
            metrics_port=self._metrics_port,
            seconds=seconds,
            productive_since_commit=max(0.0, seconds.productive - commits.productive),
            last_commit_step=commits.step,
            last_commit_at=commits.at,
            best_step=commits.best_step,
            last_step=steps.last,
            first_step_at=steps.first_at,
            last_evaluation=steps.last_evaluation,
            doing=activity.doing,
            moves=activity.moves,
            limit_seconds=activity.limit_seconds,
            slow_ranks=self.slow_ranks,
            data_wait_share=self._data_wait.share(seconds.data_wait, seconds.productive),
            commit_seconds=commits.interval_seconds,
            save_waits=commits.waits,
            memory=self.memory,
            skipped_steps=steps.skipped,
            skipped_samples=steps.skipped_samples,
            last_skipped=steps.last_skipped,
            tracking_fault=self._trackers.read(),
            stands=main_thread_stands() if activity.idle_share() > STACK_REPORT_SHARE else "",
        )

    def fail(self, code: int, message: str, traceback: str = "") -> int:
        """Leave a record of why this rank ends, unless there is one. Returns the exit code to end with."""
        return self._failure.leave(
            RankFailure(
                rank=self.rank, step=self.step, exit_code=code, message=message, traceback=traceback, at=time.time()
            )
        )

    def _stop(self) -> None:
        """Asked to stop. A phase that has no step boundary to stop at is ended on the spot."""
        self.stop_wanted = True
        if self.activity.phase not in _AGREES:
            words = f"asked to stop in phase {self.activity.phase.value}, before any new step"
            code = self.fail(ExitCode.PREEMPTED_NO_COMMIT, words)
            with contextlib.suppress(OSError):
                self.heartbeats.beat()
            os._exit(code)
