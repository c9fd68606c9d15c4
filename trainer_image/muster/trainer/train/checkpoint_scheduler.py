"""The loop's view of saving: when a save is due, what came of it, and when a failed one ends the run."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace

from torch import nn

from muster.trainer.checkpoint import CheckpointSaver, SaveOutcome, SavePolicy, TrainState
from muster.trainer.checkpoint.policy import SaveHistory
from muster.trainer.config import RankPosition
from muster.trainer.errors import StorageError, UserError
from muster.trainer.train.metrics import CommitMetrics
from muster.trainer.train.numeric_guard import NumericGuard
from muster.trainer.train.rank_state import RankState
from muster.words.checkpoint import Commit
from muster.words.job import EarlierAttempts
from muster.words.signals import TrainerPhase

# The grace before a kill is the killer's to give; this only bounds a storage that never answers.
DRAIN_SECONDS = 900.0
# Failed saves in a row that are borne once a save has succeeded. Before the first success none is: a folder that
# can't be written is better known after a minute than after a day.
FAILURES_BORNE = 2
# Of the training time, for the copies in memory that a crash is committed from: every step, if a step is long enough.
SNAPSHOT_SHARE_MAX = 0.01
SKIPPED = "skipped:"
REMEMBERED = 10  # saves, for the policy


@dataclass
class SnapshotState:
    """State of the copies that are kept in memory, as the scheduler knows it."""

    possible: bool  # whether the saver can take copies in memory
    step: int = 0  # after which the last copy was taken; 0 where there is none
    seconds: tuple[float, ...] = (0.0,)  # what the last three copies took; the least of them stands for the cost of one

    def due(self, step: int, step_seconds: float) -> bool:
        """Return whether a copy after `step` would cost no more than its share of the training time since the last
        one."""
        share = min(self.seconds) / max((step - self.step) * step_seconds, 1e-9)
        return self.possible and share <= SNAPSHOT_SHARE_MAX

    def taken(self, step: int, seconds: float) -> None:
        self.step, self.seconds = step, (*self.seconds[-2:], seconds)


class CheckpointScheduler:
    """Decides when to save, and keeps account of what came of it.

    Rank 0 alone decides; the others hear it in the step's reduction. `every` is the interval between saves in the words
    of CheckpointSpec. `snapshots` tells whether `saver` can take copies in memory.
    """

    def __init__(
        self,
        saver: CheckpointSaver,
        every: int | str,
        past: EarlierAttempts,
        ranks: RankPosition,
        rank_state: RankState,
        metrics: CommitMetrics,
        snapshots: bool = False,
    ) -> None:
        self._saver, self._policy, self._metrics = saver, SavePolicy(every), metrics
        self._rank_state, self._decides = rank_state, ranks.speaks
        # Of the attempts before this one; `_history_now` adds this one's own time.
        self._history = SaveHistory(
            started_at=time.monotonic(), failures=past.failures, observed_seconds=past.seconds, nodes=ranks.nodes
        )
        self._snapshots = SnapshotState(snapshots)
        self._productive: dict[int, float] = {}  # seconds when the state of a step was taken
        self._committed_step = 0
        self._pending = 0  # saves whose outcome is not known yet
        self._failures, self._failures_borne = 0, 0
        self._owed = False  # a save that is due and waits, as `saves` says
        self.in_doubt: list[int] = []  # steps since the numbers were last usual whose weights were saved all the same

    def begin(self, commit: Commit, model: nn.Module) -> None:
        """This attempt continues after a commit, which the model was loaded from."""
        self._history = replace(self._history, started_at=time.monotonic(), started_step=commit.step)
        self._committed_step = commit.step
        self._saver.resumed(commit, model)

    def due(self, step: int) -> bool:
        return self._decides and self._policy.due(step, time.monotonic(), self._history_now())

    def saves(self, step: int, asked: bool, guard: NumericGuard) -> bool:
        """Return whether to save after `step`. `asked` says that a save is due, as rank 0 has found; all ranks answer
        alike.

        While the weights may be at fault a save waits, but only until the next one is due: a raised loss may last 31
        steps, which of a large model are an hour of work, and mostly it is hard data. What is saved so is given up
        should the model have diverged. Numbers that are none last for three steps and are never saved.
        """
        if not guard.doubtful:
            self.in_doubt = []
        if not (asked or self._owed):
            return False
        if guard.doubtful and (guard.in_a_row or not (asked and self._owed)):
            if not self._owed:
                self._history = replace(self._history, saved_at=time.monotonic())  # the next one is due an interval on
                self._say(step, f"waits, at most until the next one is due: {guard.doubt}")
            self._owed, self._rank_state.commits.waits = True, guard.doubt
            return False
        if guard.doubtful:
            self.in_doubt.append(step)
            self._say(step, f"waits no longer, although {guard.doubt}")
        return True

    def interval_seconds(self, step_seconds: float) -> float:
        """The time between two saves that the policy asks for now."""
        every = self._policy.every
        return every * step_seconds if isinstance(every, int) else self._policy.interval_seconds(self._history_now())

    def save(
        self, state: TrainState, emergency: bool = False, seconds_left: float | None = None, terminating: bool = False
    ) -> None:
        """Collective. Start to save; training goes on once the state is staged. The rest as for Saver.save."""
        self._history = replace(self._history, saved_at=time.monotonic())
        self._owed, self._rank_state.commits.waits = False, ""
        self._productive[state.step] = self._rank_state.activity.seconds().productive
        self._pending += 1
        with self._rank_state.activity.during(TrainerPhase.CHECKPOINT):
            blocked = self._saver.save(state, emergency=emergency, seconds_left=seconds_left, terminating=terminating)
        self._history = replace(self._history, blocked_seconds=_with_last(self._history.blocked_seconds, blocked))
        self._metrics.blocked.observe(blocked)

    def snapshot_due(self, step: int, step_seconds: float) -> bool:
        """Return whether to keep the state after `step` in memory; rank 0 decides, as for `due`."""
        return self._decides and self._snapshots.due(step, step_seconds)

    def snapshot(self, state: TrainState) -> None:
        """Keep the state in memory, on every rank alike."""
        with self._rank_state.activity.taking_a_snapshot():
            self._snapshots.taken(state.step, self._saver.snapshot(state))

    def look(self) -> None:
        """Take note of saves that ended. Raises UserError when the store refuses them for good, StorageError when they
        keep failing, StaleAttempt."""
        self._refuse(self._saver.refused())
        for outcome in self._saver.finished() if self._pending else ():
            self._note(outcome)
            if outcome.error and self._failures > self._failures_borne:
                raise StorageError(f"saving the checkpoint of step {outcome.step} failed: {outcome.error}")

    def save_last(self, state: TrainState, seconds_left: float | None = None, terminating: bool = False) -> bool:
        """Collective. Save now, wait for the commit, and say whether this step is committed.

        `seconds_left` is the time until this rank's node goes, None where that is not known. `terminating` tells that
        it is this rank's node that goes. Where the time is too short for two uploads, the one that ends sooner is
        committed, be it this one or one in flight.
        """
        if self._committed_step != state.step:
            ends = time.monotonic() + (DRAIN_SECONDS if seconds_left is None else seconds_left)
            self.save(state, emergency=True, seconds_left=seconds_left, terminating=terminating)
            self._wait(ends - time.monotonic())
        return self._committed_step == state.step

    def stands_at(self, step: int) -> bool:
        """Return whether the commit of `step` is the newest, with none on its way."""
        return self._committed_step == step and not self._pending

    def finish(self, step: int) -> None:
        """Wait for the last save. Raises as `look` where `step` is not committed."""
        failures = self._wait()
        if self._committed_step != step:
            raise StorageError(
                f"training is finished, but the checkpoint of its last step {step} could not be committed: "
                + (failures[-1] if failures else "it was not saved")
            )

    def close(self) -> None:
        self._saver.close()

    def _wait(self, seconds: float = DRAIN_SECONDS) -> list[str]:
        """The errors of the saves that ended without a commit."""
        outcomes = self._saver.drain(max(seconds, 0.0))
        for outcome in outcomes:
            self._note(outcome)
        return [outcome.error for outcome in outcomes if outcome.error]

    def _note(self, outcome: SaveOutcome) -> None:
        self._pending -= 1
        if outcome.committed:
            now = time.time()
            self._failures, self._failures_borne = 0, FAILURES_BORNE
            self._committed_step = max(self._committed_step, outcome.step)
            self._history = replace(
                self._history, upload_seconds=_with_last(self._history.upload_seconds, outcome.seconds)
            )
            self._rank_state.committed(outcome.step, now, outcome.best, self._productive.pop(outcome.step, 0.0))
            self._metrics.committed(outcome.step, now, outcome.seconds, outcome.bytes)
        elif outcome.error and not outcome.error.startswith(SKIPPED):
            self._failures += 1
            self._metrics.failures.inc()
            self._refuse(outcome.error if outcome.refused else None)
        if outcome.error:
            self._say(outcome.step, outcome.error)

    def _say(self, step: int, words: str) -> None:
        if self._decides:
            print(f"checkpoint of step {step}: {words}", file=sys.stderr, flush=True)

    def _refuse(self, reason: str | None) -> None:
        """A folder that has never taken a commit of this job, and will not take one, is the user's to correct. One that
        has taken some may do so again, once whoever closed it has opened it."""
        if reason is not None and not self._committed_step:
            raise UserError(f"checkpoint.uri: {reason}")

    def _history_now(self) -> SaveHistory:
        seconds = self._history.observed_seconds + time.monotonic() - self._history.started_at
        return replace(self._history, observed_seconds=seconds)


def _with_last(values: tuple[float, ...], last: float) -> tuple[float, ...]:
    return (*values[1 - REMEMBERED :], last)
