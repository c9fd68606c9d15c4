"""The held-out loss, weighted by tokens over all ranks; what follows from it: the best commit, and stopping early."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from muster.contract.training import EarlyStopping
from muster.trainer.config import DataParallel
from muster.trainer.data.batch import Batch
from muster.trainer.data.packing import Sample
from muster.trainer.train.tasks.objective import Objective, Totals, means


class HeldOut(Protocol):
    """What the evaluation needs of a data set."""

    @property
    def samples_per_epoch(self) -> int: ...
    def sample(self, epoch: int, index: int) -> Sample: ...


@dataclass(frozen=True)
class HeldOutResult:
    """What an evaluation found."""

    loss: float  # the mean over all that is scored
    values: dict[str, float]  # what the objective reports by name
    stop: bool  # whether any rank was asked to stop meanwhile


class Evaluator:
    """Scores the first `samples` held-out samples, dealt to the data-parallel shares in turn. Every rank runs equally
    many batches, filled up with unscored rows, however many shares it holds: a sharded model's forward pass needs all
    ranks."""

    def __init__(
        self,
        held_out: HeldOut,
        samples: int,
        micro_batch: int,
        division: DataParallel,
        objective: Objective,
        device: torch.device,
    ) -> None:
        self._held_out = held_out
        self._samples = min(samples, held_out.samples_per_epoch)
        self._micro_batch, self._division, self._objective = micro_batch, division, objective
        self._device = device
        self._batches: list[Batch] = []

    @torch.no_grad()
    def run(
        self, model: nn.Module, total: Callable[[Tensor], list[float]], stop_wanted: Callable[[], bool]
    ) -> HeldOutResult:
        """Score all of them. Collective.

        `total` adds a vector up over all ranks. The loss is NaN where no token is scored.
        """
        model.eval()
        names = self._objective.names
        totals = Totals(names, self._device)
        for batch in self._all():
            totals.add(self._objective.held_out_loss(model, batch))
        model.train()
        stops = torch.tensor([float(stop_wanted())], dtype=torch.float64).to(self._device)
        # Ranks of one share report the same, so their number cancels out.
        loss, count, *values, stopped = total(torch.cat((totals.vector(), stops)))
        return HeldOutResult(loss / count if count else float("nan"), means(names, values), stopped > 0)

    def _all(self) -> Iterator[Batch]:
        if not self._batches:
            division, rows = self._division, self._micro_batch
            passes = math.ceil(self._samples / (division.size * rows))
            dealt = [list(range(share, self._samples, division.size)) for share in division.shares]
            for own in [*dealt, *[[]] * division.blank_shares]:
                self._batches += [self._batch(own[n * rows : (n + 1) * rows]) for n in range(passes)]
        for batch in self._batches:
            yield batch.to(self._device)

    def _batch(self, indices: list[int]) -> Batch:
        blanks = self._micro_batch - len(indices)
        return Batch.of([self._held_out.sample(0, index) for index in [*indices, *[0] * blanks]], unscored=blanks)


@dataclass
class Best:
    """The best evaluation loss so far, and for how many evaluations in a row it has not been beaten.

    An evaluation that improves is committed at its step and marked as best. The one at step 0 only sets the mark: the
    weights before training are nobody's result.
    """

    rule: EarlyStopping | None
    loss: float | None = None
    step: int | None = None
    without_improvement: int = 0

    def judge(self, loss: float, step: int) -> bool:
        """Take note of the evaluation after `step`; whether it is the best so far."""
        improvement = self.rule.min_delta if self.rule else 0.0
        if self.loss is None or loss < self.loss - improvement:
            self.loss, self.step, self.without_improvement = loss, step, 0
            return True
        self.without_improvement += 1
        return False

    @property
    def stop(self) -> bool:
        return self.rule is not None and self.without_improvement >= self.rule.patience

    def state(self) -> dict[str, Any]:
        return {"loss": self.loss, "step": self.step, "withoutImprovement": self.without_improvement}

    def restore(self, state: dict[str, Any]) -> None:
        self.loss, self.step = state.get("loss"), state.get("step")
        self.without_improvement = int(state.get("withoutImprovement", 0))
