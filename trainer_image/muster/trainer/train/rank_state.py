"""A rank's signs of life: phase, heartbeat file, where the seconds went, the wish to stop.

One thread watches a pipe. Signals arrive there at once (`signal.set_wakeup_fd`), even while the main thread sits in a
collective, and a phase that can't be stopped at a step boundary is then ended on the spot.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from muster.contract.base import dump_json
from muster.contract.names import HEARTBEAT, RANK_FAILURE, ExitCode
from muster.contract.signals import Heartbeat, RankFailure, SlowRank, StepRecord, TrainerPhase, TrainerSeconds
from muster.trainer.files import write_whole
from muster.trainer.launch.stack_dumps import main_thread_stands
from muster.trainer.launch.verdict import unlearnt
from muster.trainer.train.deadlines import Deadlines
from muster.trainer.train.stopwatch import Stopwatch

# The file is rewritten at least this often, and at most so often however quick the steps are. A step does not wake the
# thread (it would take the interpreter from the training just then); the thread looks by itself.
SECONDS_BETWEEN_BEATS_MAX = 0.9
SECONDS_BETWEEN_BEATS_MIN = 0.1
DATA_WINDOW_SECONDS = 60.0
TELL_SHARE = 0.25  # of the time that a phase may take without progress: from then on a rank tells where it stands
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# Phases with step boundaries, at which all ranks agree to stop. In the others nothing is lost by ending at once.
_AGREES = frozenset(
    {TrainerPhase.STEP, TrainerPhase.EVALUATION, TrainerPhase.CHECKPOINT, TrainerPhase.DRAIN, TrainerPhase.DONE}
)

ACCOUNT = {
    TrainerPhase.INIT: "init",
    TrainerPhase.DATA: "data",
    TrainerPhase.LOAD: "load",
    TrainerPhase.STEP: "productive",
    TrainerPhase.EVALUATION: "evaluation",
    TrainerPhase.CHECKPOINT: "checkpoint",
    TrainerPhase.DRAIN: "drain",
    TrainerPhase.DONE: "drain",
}


class Life:
    """This rank's state as the outside sees it. Set by the main thread; written to the heartbeat file by a thread."""

    def __init__(self, directory: Path, attempt: int, rank: int, started_at: float) -> None:
        self.rank = rank
        self.step = 0
        self.stop_wanted = False
        self._directory = directory
        self._attempt = attempt
        self._started_at = started_at
        self._phase = TrainerPhase.INIT
        self._progressed_at = time.time()
        self._moved_at = time.monotonic()  # the same moment, by a clock that does not jump
        self._doing, self._moves = "", 0
        self.deadlines = Deadlines()
        self._stopwatch = Stopwatch(started_at)
        self._last_step: StepRecord | None = None
        self._first_step_at: float | None = None
        self._last_evaluation: StepRecord | None = None
        self._last_skipped: StepRecord | None = None
        self.skipped_steps = 0
        self.slow_ranks: tuple[SlowRank, ...] = ()
        self.commit_seconds: float | None = None
        self.memory = ""
        self._waits: deque[tuple[float, float, float]] = deque([(time.monotonic(), 0.0, 0.0)])
        self._metrics_port: int | None = None
        self._commit: tuple[int, float] | None = None
        self._productive_at_commit = 0.0
        self._best_step: int | None = None
        self._news = True
        self._before_beat: Callable[[], None] | None = None
        self._writing = threading.Lock()
        self._ending = threading.Lock()
        self._ends_with: int | None = None
        self._inbox, self._outbox = os.pipe()
        os.set_blocking(self._outbox, False)

    # --- what the main thread tells ---

    def watch(self) -> None:
        """Take over SIGTERM and SIGINT and start the thread. Main thread only, once."""
        signal.set_wakeup_fd(self._outbox, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, _keep_going)  # the thread hears of it through the pipe
        threading.Thread(target=self._watch, name="life", daemon=True).start()

    def enter(self, phase: TrainerPhase) -> None:
        """Change phase; time from now on goes to its account."""
        now = time.monotonic()
        if self._phase is not TrainerPhase.STEP:  # of steps, `stepped` knows better
            self.deadlines.took(self._phase, now - self._moved_at)
        self._phase, self._doing = phase, ""
        self._progressed_at, self._moved_at = time.time(), now
        self._stopwatch.switch(ACCOUNT[phase])
        self._nudge()

    @contextlib.contextmanager
    def during(self, phase: TrainerPhase) -> Iterator[None]:
        """Enter `phase`, and return to the one before at the end."""
        before = self._phase
        self.enter(phase)
        yield
        self.enter(before)

    def does(self, what: str) -> None:
        """What comes next within the step. Every rank says the same in the same order; news of it waits for a beat."""
        self._doing = what
        self._moves += 1

    def moved(self) -> None:
        """One more thing is done within what it `does`; again the same on every rank."""
        self._moves += 1

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        self.does("data")
        self._stopwatch.switch("data_wait")
        yield
        self._stopwatch.switch(ACCOUNT[self._phase])

    @contextlib.contextmanager
    def taking_a_snapshot(self) -> Iterator[None]:
        self.does("snapshot")
        self._stopwatch.switch("checkpoint")
        yield
        self._stopwatch.switch(ACCOUNT[self._phase])

    def resumed(self, step: int, committed_at: float | None, best_step: int | None) -> None:
        """Training continues after `step`, from a commit or (committed_at None) from nothing."""
        self.step, self._best_step = step, best_step
        if committed_at is not None:
            self._commit = (step, committed_at)

    def stepped(self, step: int, record: StepRecord) -> None:
        self.step, self._last_step = step, record
        self._doing, self._moves = "", 0
        self._progressed_at, self._moved_at = record.at, time.monotonic()
        if record.step_seconds > 0:  # step 0 is only an evaluation
            self.deadlines.took(TrainerPhase.STEP, record.step_seconds)
            self._first_step_at = self._first_step_at or record.at
        if record.evaluation_loss is not None:
            self._last_evaluation = record
        if record.skipped:
            self._last_skipped = record
        self._news = True

    def committed(self, step: int, at: float, best: bool, productive: float) -> None:
        """productive: the productive seconds when that step's state was taken."""
        self._commit = (step, at)
        self._productive_at_commit = productive
        if best:
            self._best_step = step
        self._news = True

    def before_each_beat(self, action: Callable[[], None] | None) -> None:
        """Have the thread do this too, before it writes a heartbeat."""
        self._before_beat = action

    def serves_metrics(self, port: int) -> None:
        self._metrics_port = port

    def seconds(self) -> TrainerSeconds:
        return TrainerSeconds(**self._stopwatch.seconds())

    # --- what the outside sees ---

    def heartbeat(self) -> Heartbeat:
        seconds = self._stopwatch.seconds()
        commit, phase = self._commit, self._phase
        limit = self.deadlines.limit(phase)
        worrying = time.monotonic() - self._moved_at > (limit or unlearnt(phase)) * TELL_SHARE
        return Heartbeat.model_construct(
            attempt=self._attempt,
            rank=self.rank,
            pid=os.getpid(),
            phase=phase,
            step=self.step,
            at=time.time(),
            progressed_at=self._progressed_at,
            started_at=self._started_at,
            metrics_port=self._metrics_port,
            seconds=TrainerSeconds(**seconds),
            productive_since_commit=max(0.0, seconds["productive"] - self._productive_at_commit),
            last_commit_step=commit[0] if commit else None,
            last_commit_at=commit[1] if commit else None,
            best_step=self._best_step,
            last_step=self._last_step,
            first_step_at=self._first_step_at,
            last_evaluation=self._last_evaluation,
            doing=self._doing,
            moves=self._moves,
            limit_seconds=limit,
            slow_ranks=self.slow_ranks,
            data_wait_share=self._data_wait_share(seconds),
            commit_seconds=self.commit_seconds,
            memory=self.memory,
            skipped_steps=self.skipped_steps,
            last_skipped=self._last_skipped,
            stands=main_thread_stands() if worrying else "",
        )

    def _data_wait_share(self, seconds: dict[str, float]) -> float | None:
        """Of the training in the last minute or so, without what was something else."""
        now, (then, waited, worked) = time.monotonic(), self._waits[0]
        if now - self._waits[-1][0] >= DATA_WINDOW_SECONDS / 6:
            self._waits.append((now, seconds["data_wait"], seconds["productive"]))
        if now - then < DATA_WINDOW_SECONDS:
            return None
        if len(self._waits) > 7:
            self._waits.popleft()
        waited, worked = seconds["data_wait"] - waited, seconds["productive"] - worked
        return waited / (waited + worked) if waited + worked > DATA_WINDOW_SECONDS / 2 else None

    def beat(self) -> None:
        """Rewrite the heartbeat file now."""
        with self._writing:
            write_whole(self._directory / HEARTBEAT.format(rank=self.rank), dump_json(self.heartbeat()))

    def fail(self, code: int, message: str, traceback: str = "") -> int:
        """Leave word of why this rank ends. Two threads may find a reason at the same moment: the first one counts.
        Returns the exit code that goes with it."""
        with self._ending:
            if self._ends_with is not None:
                return self._ends_with
            self._ends_with = int(code)
            failure = RankFailure(
                rank=self.rank, step=self.step, exit_code=code, message=message, traceback=traceback, at=time.time()
            )
            with contextlib.suppress(OSError):
                write_whole(self._directory / RANK_FAILURE.format(rank=self.rank), dump_json(failure))
            return self._ends_with

    # --- the thread ---

    def _watch(self) -> None:
        written = 0.0
        while True:
            ready, _, _ = select.select([self._inbox], [], [], SECONDS_BETWEEN_BEATS_MIN)
            received = os.read(self._inbox, 4096) if ready else b""
            if any(number in received for number in STOP_SIGNALS):
                self._asked_to_stop()
            if not (ready or self._news or time.monotonic() - written >= SECONDS_BETWEEN_BEATS_MAX):
                continue
            self._news = False
            written = time.monotonic()
            with contextlib.suppress(OSError):  # a full disk must not end training; the missing beat is seen outside
                if self._before_beat is not None:
                    self._before_beat()
                self.beat()

    def _asked_to_stop(self) -> None:
        self.stop_wanted = True
        if self._phase not in _AGREES:
            words = f"asked to stop in phase {self._phase.value}, before any new step"
            code = self.fail(ExitCode.PREEMPTED_NO_COMMIT, words)
            with contextlib.suppress(OSError):
                self.beat()
            os._exit(code)

    def _nudge(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._outbox, b"\0")


def _keep_going(number: int, frame: object) -> None:
    """The signal was written to the pipe by C code already; this only replaces the default action."""
