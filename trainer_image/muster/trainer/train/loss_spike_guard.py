"""Which batches not to learn from: a loss or a gradient that is no number, or a loss far above what was usual.

Every rank sees the same sums over all ranks and the same past, so all decide alike without a word. What is skipped is
one optimizer step: the batch is used up, the weights stay. The past is part of each commit, so a resumed run skips
what an uninterrupted one would have.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from muster.trainer.errors import NumericError

REMEMBERED = 128  # losses
KNOWN_MIN = 64  # losses, before one is called a spike
# Robust standard deviations (1.4826 × median absolute deviation) above the median, and at least so large a share of it.
# PaLM (arXiv 2204.02311, 5.1) met about 20 spikes in a run; a loss that is merely noisy must not be one.
SPIKE_DEVIATIONS = 10.0
SPIKE_SHARE = 0.25
# A bad batch is followed by a good one. When so many in a row are bad, it is not the batch: the weights have diverged.
SKIPPED_IN_A_ROW_MAX = 3


class LossSpikeGuard:
    """Judges the numbers of each step by those of the steps before.

    `spikes` tells whether a loss can be too large: one that comes and goes around zero only says how rewards differ.
    """

    def __init__(self, spikes: bool = True) -> None:
        self._spikes = spikes
        self.in_a_row = 0  # batches that were skipped up to now without a good one in between
        self.skipped = 0  # batches that were skipped in this job
        self._losses: deque[float] = deque(maxlen=REMEMBERED)

    def judge(self, loss: float, norm: float, step: int) -> str:
        """Why not to learn from this batch; empty if nothing is wrong. Raises NumericError if skipping is no help."""
        why = self._fault(loss, norm)
        if not why:
            self.in_a_row = 0
            self._losses.append(loss)
            return ""
        self.in_a_row, self.skipped = self.in_a_row + 1, self.skipped + 1
        if self.in_a_row > SKIPPED_IN_A_ROW_MAX:
            raise NumericError(
                f"{why} at step {step}, and so it was in the {self.in_a_row - 1} steps before, which were skipped: "
                "it is not the batch that is bad"
            )
        return why

    def last_good_loss(self) -> float:
        """For the record of a step whose loss is no number."""
        return self._losses[-1] if self._losses else 0.0

    def _fault(self, loss: float, norm: float) -> str:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient norm is {norm} (loss {loss:.4f})"
        if not self._spikes or len(self._losses) < KNOWN_MIN or loss <= self._losses[-1]:
            return ""
        usual = statistics.median(self._losses)
        if loss - usual <= SPIKE_SHARE * abs(usual):
            return ""
        deviation = 1.4826 * statistics.median(abs(each - usual) for each in self._losses)
        if loss - usual <= SPIKE_DEVIATIONS * deviation:
            return ""
        return f"the loss jumped to {loss:.4f} from {usual:.4f} ± {deviation:.4f}"

    def state(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "inARow": self.in_a_row, "skipped": self.skipped}

    def restore(self, state: dict[str, Any]) -> None:
        self._losses = deque(state.get("losses", ()), maxlen=REMEMBERED)
        self.in_a_row, self.skipped = int(state.get("inARow", 0)), int(state.get("skipped", 0))
