"""The loop's view of saving: when a save is due, what came of it, and when a failed one ends the run."""

from __future__ import annotations

import sys
import time

from muster.contract.signals import TrainerPhase
from muster.contract.spec import Past
from muster.trainer.checkpoint import Policy, SaveOutcome, Saver, TrainState
from muster.trainer.checkpoint.policy import History
from muster.trainer.config import Ranks
from muster.trainer.errors import StorageError
from muster.trainer.train.metrics import Metrics
from muster.trainer.train.rank_state import RankState

# The grace before a kill is the killer's to give; this only bounds a storage that never answers.
DRAIN_SECONDS = 900.0
# Failed saves in a row that are borne once a save has succeeded. Before the first success none is: a folder that
# can't be written is better known after a minute than after a day.
FAILURES_BORNE = 2
# Of the training time, for the copies in memory that a crash is committed from: every step, if a step is long enough.
SNAPSHOT_SHARE_MAX = 0.01
SKIPPED = "skipped:"


class CheckpointScheduler:
    """every: of CheckpointSpec. snapshots: whether `saver` can take them. Rank 0 alone decides when a save is due; the
    others hear it in the step's reduction."""

    def __init__(
        self,
        saver: Saver,
        every: int | str,
        past: Past,
        ranks: Ranks,
        rank_state: RankState,
        metrics: Metrics,
        snapshots: bool = False,
    ) -> None:
        self._saver, self._policy, self._ranks, self._rank_state, self._metrics = (
            saver,
            Policy(every),
            ranks,
            rank_state,
            metrics,
        )
        self._past, self._snapshots = past, snapshots
        self._started = (time.monotonic(), 0)
        self._saved: tuple[float, int] | None = None
        self._blocked: list[float] = []
        self._uploads: list[float] = []
        self._productive: dict[int, float] = {}
        self._committed_step = 0
        self._failures = 0
        self._ever = False
        self._pending = 0  # saves whose outcome is not known yet
        self._snapshot_step = 0
        self._snapshot_seconds = [0.0]  # of the last ones; the least is what one takes

    def begin(self, step: int) -> None:
        """This attempt continues after the commit of `step`."""
        self._started = (time.monotonic(), step)
        self._committed_step = step

    def due(self, step: int) -> bool:
        return self._ranks.rank == 0 and self._policy.due(step, time.monotonic(), self._history())

    def interval_seconds(self, step_seconds: float) -> float:
        """The time between two saves that the policy asks for now."""
        every = self._policy.every
        return every * step_seconds if isinstance(every, int) else self._policy.interval_seconds(self._history())

    def save(
        self, state: TrainState, emergency: bool = False, seconds_left: float | None = None, terminating: bool = False
    ) -> None:
        """Collective. Start to save; training goes on once the state is staged. The rest as for Saver.save."""
        self._saved = (time.monotonic(), state.step)
        self._productive[state.step] = self._rank_state.activity.seconds().productive
        self._pending += 1
        with self._rank_state.activity.during(TrainerPhase.CHECKPOINT):
            blocked = self._saver.save(state, emergency=emergency, seconds_left=seconds_left, terminating=terminating)
        self._blocked = [*self._blocked[-9:], blocked]
        self._metrics.checkpoint_blocked.observe(blocked)

    def snapshot_due(self, step: int, step_seconds: float) -> bool:
        """Whether to keep the state after `step` in memory; rank 0 decides, as for `due`."""
        share = min(self._snapshot_seconds) / max((step - self._snapshot_step) * step_seconds, 1e-9)
        return self._ranks.rank == 0 and self._snapshots and share <= SNAPSHOT_SHARE_MAX

    def snapshot(self, state: TrainState) -> None:
        """Keep the state in memory, on every rank alike."""
        with self._rank_state.activity.taking_a_snapshot():
            seconds = self._saver.snapshot(state)
        self._snapshot_step, self._snapshot_seconds = state.step, [*self._snapshot_seconds[-2:], seconds]

    def look(self) -> None:
        """Take note of saves that ended. Raises StorageError when they keep failing, StaleAttempt."""
        for outcome in self._saver.finished() if self._pending else ():
            self._note(outcome)
            if outcome.error and self._failures > (FAILURES_BORNE if self._ever else 0):
                raise StorageError(f"saving the checkpoint of step {outcome.step} failed: {outcome.error}")

    def save_last(self, state: TrainState, seconds_left: float | None = None, terminating: bool = False) -> bool:
        """Collective. Save now, wait for the commit, and say whether this step is committed.

        seconds_left: until this rank's node goes, where that is known; terminating: it is this rank's node that goes.
        Where the time is too short for two uploads, the one that ends sooner is committed: this one, or one in flight.
        """
        if self._committed_step != state.step:
            ends = time.monotonic() + (DRAIN_SECONDS if seconds_left is None else seconds_left)
            self.save(state, emergency=True, seconds_left=seconds_left, terminating=terminating)
            self._wait(ends - time.monotonic())
        return self._committed_step == state.step

    def stands_at(self, step: int) -> bool:
        """Whether the commit of `step` is the newest, with none on its way."""
        return self._committed_step == step and not self._pending

    def finish(self, step: int) -> None:
        """Wait for the last save. Raises StorageError where `step` is not committed."""
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
            self._ever, self._failures = True, 0
            self._committed_step = max(self._committed_step, outcome.step)
            self._uploads = [*self._uploads[-9:], outcome.seconds]
            self._rank_state.committed(outcome.step, now, outcome.best, self._productive.pop(outcome.step, 0.0))
            self._metrics.saved(outcome.step, now, outcome.seconds, outcome.bytes)
        elif outcome.error and not outcome.error.startswith(SKIPPED):
            self._failures += 1
            self._metrics.checkpoint_failures.inc()
        if outcome.error and self._ranks.rank == 0:
            print(f"checkpoint of step {outcome.step}: {outcome.error}", file=sys.stderr, flush=True)

    def _history(self) -> History:
        saved_at, saved_step = self._saved if self._saved else (None, None)
        return History(
            started_at=self._started[0],
            started_step=self._started[1],
            saved_at=saved_at,
            saved_step=saved_step,
            blocked_seconds=tuple(self._blocked),
            upload_seconds=tuple(self._uploads),
            failures=self._past.failures,
            observed_seconds=self._past.seconds + time.monotonic() - self._started[0],
            nodes=self._ranks.nodes,
        )
