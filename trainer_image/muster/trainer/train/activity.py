"""Activity of a rank: what it is doing now, since when it has made no progress, and where its seconds went."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from muster.trainer.launch.verdict import unlearnt
from muster.trainer.train.deadlines import PhaseDeadlines
from muster.trainer.train.stopwatch import PhaseStopwatch
from muster.words.signals import StepRecord, TrainerPhase, TrainerSeconds

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


class RankActivity:
    """The phase and the part of the step that this rank is in; the main thread sets them and the heartbeat's thread
    reads them.

    `started_at` is when the process began, in seconds since the epoch. `on_change` is called whenever the phase
    changes, by the thread that changes it.
    """

    def __init__(self, started_at: float, on_change: Callable[[], None]) -> None:
        self.phase = TrainerPhase.INIT  # the phase of the run
        # `doing` is the part of the step that is under way; `moves` counts the parts that this step has come through.
        self.doing, self.moves = "", 0
        self.progressed_at = time.time()  # when a phase or a step last ended, in seconds since the epoch
        self.deadlines = PhaseDeadlines()
        self._moved_at = time.monotonic()  # as progressed_at, by a clock that does not jump
        self._stopwatch = PhaseStopwatch(started_at)
        self._on_change = on_change

    def enter(self, phase: TrainerPhase) -> None:
        """Change the phase. The time from now on goes to its account."""
        now = time.monotonic()
        if self.phase is not TrainerPhase.STEP:  # a step reports its own time
            self.deadlines.took(self.phase, now - self._moved_at)
        self.phase, self.doing = phase, ""
        self.progressed_at, self._moved_at = time.time(), now
        self._stopwatch.switch(ACCOUNT[phase])
        self._on_change()

    @contextlib.contextmanager
    def during(self, phase: TrainerPhase) -> Iterator[None]:
        """Enter `phase`, and return to the one before when the block ends well."""
        before = self.phase
        self.enter(phase)
        yield
        self.enter(before)

    def does(self, what: str) -> None:
        """Name the part of the step that comes next. Every rank names the same parts in the same order. The next
        heartbeat carries it; none is written for it."""
        self.doing = what
        self.moves += 1

    def moved(self) -> None:
        """One more thing is done within the part that is under way; again the same on every rank."""
        self.moves += 1

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Book the time of the block as waiting for data."""
        with self._aside("data", "data_wait"):
            yield

    @contextlib.contextmanager
    def taking_a_snapshot(self) -> Iterator[None]:
        """Book the time of the block as saving."""
        with self._aside("snapshot", "checkpoint"):
            yield

    def stepped(self, record: StepRecord) -> None:
        """Note the end of a step. The limit for steps is learnt from its own time."""
        self.doing, self.moves = "", 0
        self.progressed_at, self._moved_at = record.at, time.monotonic()
        if record.step_seconds > 0:  # step 0 is only an evaluation
            self.deadlines.took(TrainerPhase.STEP, record.step_seconds)

    def seconds(self) -> TrainerSeconds:
        """Return the seconds by account. Their sum is the time since the process started."""
        return TrainerSeconds(**self._stopwatch.seconds())

    @property
    def limit_seconds(self) -> float | None:
        """Longest time in seconds that the phase may go without progress; None until this run has shown how long it
        takes."""
        return self.deadlines.limit(self.phase)

    def idle_share(self) -> float:
        """The time since the last progress, as a share of the phase's limit."""
        return (time.monotonic() - self._moved_at) / (self.limit_seconds or unlearnt(self.phase))

    @contextlib.contextmanager
    def _aside(self, what: str, account: str) -> Iterator[None]:
        self.does(what)
        self._stopwatch.switch(account)
        yield
        self._stopwatch.switch(ACCOUNT[self.phase])
