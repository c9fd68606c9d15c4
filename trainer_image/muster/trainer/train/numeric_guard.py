"""The guard over a run's numbers: whether a batch is learnt from, and whether the model has diverged.

A batch whose loss or gradient is no number is skipped: the batch is used up, the weights stay. Every finite batch is
learnt from, for rare and hard data look like a fault and are what the job is for; `optimizer.clipNorm` bounds what one
batch can do. Only where the job asks for it (`optimizer.skipSpikes`) is a batch skipped for the size of its gradient.
A model that has diverged shows in many steps, never in one.

Every rank sees the same sums over all ranks and the same past, so all decide alike without a word. The past is part of
each commit, so a resumed run decides as an uninterrupted one would have.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from muster.trainer.errors import NumericError

REMEMBERED = 128  # steps
KNOWN_MIN = 64  # steps, before anything is called unusual
# A bad batch is followed by a good one. When so many in a row are no numbers, it is not the batch: it is the weights.
SKIPPED_IN_A_ROW_MAX = 3
# Robust standard deviations (1.4826 × median absolute deviation) of the norm's logarithm above its median, and at least
# so large a factor. Norms spread over factors, not differences. PaLM (arXiv 2204.02311, 5.1) met about 20 spikes in a
# run; a norm that is merely noisy must not be one.
SPIKE_DEVIATIONS = 10.0
SPIKE_FACTOR = 3.0
# The loss of a diverged model stays high. A run of hard batches, or a bump that the model recovers from, ends sooner;
# at half of it, a step of one sample and a cluster of hard documents could look like a divergence.
DIVERGED_STEPS = 32
# Runs of DIVERGED_STEPS usual steps, of which the lowest loss is remembered: 2,048 steps in all. Data come in
# stretches. A file of tables that fills the last 128 small steps tells nothing of the prose that follows; the prose
# before it does. With a quarter of this, one long easy document is enough to call ordinary text a divergence.
RUNS_REMEMBERED = 64
RUN_RISE_MIN = 0.1  # of the lowest loss of the highest run: ordinary text has a lower loss among 32 steps
FIRST_STEPS = 8  # whose mean loss is the level that the job began at
RISE_MIN = 0.5  # of the usual loss: a smaller rise is no divergence, however little was learnt before


class NumericGuard:
    """Judges the numbers of each step by those of the steps before.

    `skip_spikes` skips batches whose gradient, as clipped by `clip_norm`, is far above what is usual. `losses_compare`
    says that a high loss is a bad one: one that comes and goes around zero only says how rewards differ.
    """

    def __init__(self, clip_norm: float = 0.0, skip_spikes: bool = False, losses_compare: bool = True) -> None:
        self._clip_norm, self._skip_spikes, self._losses_compare = clip_norm, skip_spikes, losses_compare
        self.in_a_row = 0  # batches up to now whose numbers are none, without a sound one in between
        self.skipped = 0  # batches that were skipped in this job
        self._pass: tuple[int, bool] | None = None  # the step that was judged last, and whether it counts as skipped
        self._spikes_in_a_row = 0
        self._norms: deque[float] = deque(maxlen=REMEMBERED)  # as clipped, those of skipped batches too
        self._first: list[float] = []  # the losses of the first steps
        self._losses: deque[float] = deque(maxlen=REMEMBERED)  # of the usual steps
        self._run: list[float] = []  # the usual losses since the last run of them was complete
        self._lowest: deque[float] = deque(maxlen=RUNS_REMEMBERED)  # of each run of DIVERGED_STEPS usual losses
        self._raised: list[float] = []  # the losses up to now that are far above the usual ones, in a row

    @property
    def doubtful(self) -> bool:
        """Return whether the weights may be at fault, so that they should not be committed yet."""
        return self.in_a_row > 0 or bool(self._raised)

    @property
    def doubt(self) -> str:
        """Reason why the weights may be at fault; empty where they are not."""
        if self.in_a_row:
            return "the numbers of the last step are none"
        if not self._raised:
            return ""
        steps = "a step" if len(self._raised) == 1 else f"{len(self._raised)} steps"
        return f"the loss has been above {self._bound():.4f} for {steps} and is {self._raised[-1]:.4f} now"

    def judge(self, loss: float, norm: float, step: int) -> str:
        """The reason to skip this batch; empty if it is learnt from. Raises NumericError if skipping is no help."""
        why = _not_a_number(loss, norm)
        if why:
            self.in_a_row += 1
            self._count(step, skipped=True)
            if self.in_a_row > SKIPPED_IN_A_ROW_MAX:
                raise NumericError(
                    f"{why} at step {step}, and so it was in the {self.in_a_row - 1} steps before, which were skipped: "
                    "it is not the batch that is bad"
                )
            return why
        self.in_a_row = 0
        self._watch(loss, step)
        why = self._spike(norm) if self._skip_spikes else ""
        self._count(step, skipped=bool(why))
        return why

    def _count(self, step: int, skipped: bool) -> None:
        """Count the batch of `step` once, however often it is gone over (task grpo), and as learnt from where any pass
        over it was."""
        before = self._pass[1] if self._pass is not None and self._pass[0] == step else None
        if before is None:
            self.skipped += skipped
        elif before and not skipped:
            self.skipped -= 1
        self._pass = step, skipped and before is not False

    def last_loss(self) -> float:
        """The last loss that is a number, for the record of a step whose loss is none."""
        return self._raised[-1] if self._raised else self._losses[-1] if self._losses else 0.0

    def _watch(self, loss: float, step: int) -> None:
        """Raise NumericError where the loss has been so high for so long that the model must have diverged."""
        if len(self._first) < FIRST_STEPS:
            self._first.append(loss)
        bound = self._bound()
        if loss <= bound:
            for each in (*self._raised, loss):
                self._remember(each)
            self._raised = []
            return
        self._raised.append(loss)
        if len(self._raised) >= DIVERGED_STEPS:
            usual = statistics.median(self._losses)
            raise NumericError(
                f"the model has diverged: at step {step} the loss is {loss:.4f}, and for {len(self._raised)} steps it "
                f"was never below {bound:.4f}, after {usual:.4f} before. If it comes again, lower optimizer.lr, or "
                "lengthen optimizer.schedule.warmupSteps"
            )

    def _remember(self, loss: float) -> None:
        self._losses.append(loss)
        self._run.append(loss)
        if len(self._run) == DIVERGED_STEPS:
            self._lowest.append(min(self._run))
            self._run = []

    def _bound(self) -> float:
        """Return the loss above which a step counts towards a divergence.

        It is above every loss of the last steps, above the lowest loss of each remembered run of steps by RUN_RISE_MIN
        of that, and above the usual loss by RISE_MIN of it and by half of what the job has learnt from the first steps.
        """
        if not self._losses_compare or len(self._losses) < KNOWN_MIN:
            return math.inf
        usual = statistics.median(self._losses)
        learnt = statistics.fmean(self._first) - usual
        highest_run = max(self._lowest, default=usual)
        above_runs = highest_run + RUN_RISE_MIN * abs(highest_run)
        return max(*self._losses, above_runs, usual + max(RISE_MIN * abs(usual), learnt / 2))

    def _spike(self, norm: float) -> str:
        """The reason to skip a batch for its gradient. What is skipped is remembered too, so a lasting rise becomes
        usual, and never more than a few in a row are skipped, so no kind of data is left out for good."""
        norm = min(norm, self._clip_norm) if self._clip_norm > 0 else norm
        usual = [math.log(each) for each in self._norms if each > 0]
        self._norms.append(norm)
        if len(usual) >= KNOWN_MIN and norm > 0:
            middle = statistics.median(usual)
            deviation = 1.4826 * statistics.median(abs(each - middle) for each in usual)
            rise = math.log(norm) - middle
            if rise > max(SPIKE_DEVIATIONS * deviation, math.log(SPIKE_FACTOR)):
                self._spikes_in_a_row += 1
                if self._spikes_in_a_row <= SKIPPED_IN_A_ROW_MAX:
                    return f"the gradient norm is {norm:.4g}, where {math.exp(middle):.4g} is usual (skipSpikes)"
        self._spikes_in_a_row = 0
        return ""

    def state(self) -> dict[str, Any]:
        return {
            "losses": list(self._losses),
            "run": self._run,
            "lowest": list(self._lowest),
            "raised": self._raised,
            "first": self._first,
            "norms": list(self._norms),
            "inARow": self.in_a_row,
            "spikesInARow": self._spikes_in_a_row,
            "skipped": self.skipped,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._losses = deque(state.get("losses", ()), maxlen=REMEMBERED)
        self._raised, self._first = list(state.get("raised", ())), list(state.get("first", ()))
        self._run, self._lowest = list(state.get("run", ())), deque(state.get("lowest", ()), maxlen=RUNS_REMEMBERED)
        self._norms = deque(state.get("norms", ()), maxlen=REMEMBERED)
        self.in_a_row, self.skipped = int(state.get("inARow", 0)), int(state.get("skipped", 0))
        self._spikes_in_a_row = int(state.get("spikesInARow", 0))


def _not_a_number(loss: float, norm: float) -> str:
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    return "" if math.isfinite(norm) else f"the gradient norm is {norm} (loss {loss:.4f})"
