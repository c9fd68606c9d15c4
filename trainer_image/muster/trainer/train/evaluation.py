"""The held-out loss, weighted by tokens over all ranks; what follows from it: the best commit, and stopping early."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from muster.contract.training import EarlyStopping
from muster.trainer.models.head import IGNORED
from muster.trainer.train.tasks.next_token import scored, token_loss


class Sample(Protocol):
    @property
    def tokens(self) -> Any: ...
    @property
    def labels(self) -> Any: ...
    @property
    def positions(self) -> Any: ...
    @property
    def documents(self) -> Any: ...


class HeldOut(Protocol):
    @property
    def samples_per_epoch(self) -> int: ...
    def sample(self, epoch: int, index: int) -> Sample: ...


@dataclass(frozen=True)
class EvaluationBatch:
    """All [B, T] int64."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor


class Evaluator:
    """Scores the first `samples` held-out samples, dealt to the ranks in turn; every rank runs equally many batches,
    filled up with unscored ones, because a sharded model's forward pass needs all ranks."""

    def __init__(
        self, held_out: HeldOut, samples: int, micro_batch: int, rank: int, ranks: int, device: torch.device
    ) -> None:
        self._held_out = held_out
        self._samples = min(samples, held_out.samples_per_epoch)
        self._micro_batch, self._rank, self._ranks = micro_batch, rank, ranks
        self._device = device
        self._batches: list[EvaluationBatch] = []

    @torch.no_grad()
    def run(
        self, model: nn.Module, total: Callable[[Tensor], list[float]], asked: Callable[[], bool]
    ) -> tuple[float, bool]:
        """The mean loss per scored token, without label smoothing; and whether any rank was `asked` for something.

        total: adds a vector up over all ranks.
        """
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        for batch in self._all():
            sums[0] += token_loss(model, batch).double()
            sums[1] += scored(batch).double()
        model.train()
        sums[2] = float(asked())
        loss, tokens, wishes = total(sums)
        return (loss / tokens if tokens else float("nan")), wishes > 0

    def _all(self) -> Iterator[EvaluationBatch]:
        if not self._batches:
            own = list(range(self._rank, self._samples, self._ranks))
            per_pass = self._micro_batch
            passes = math.ceil(self._samples / (self._ranks * per_pass))
            self._batches = [self._batch(own[n * per_pass : (n + 1) * per_pass]) for n in range(passes)]
        for batch in self._batches:
            yield EvaluationBatch(
                *(
                    part.to(self._device, non_blocking=True)
                    for part in (batch.tokens, batch.labels, batch.positions, batch.documents)
                )
            )

    def _batch(self, indices: list[int]) -> EvaluationBatch:
        samples = [self._held_out.sample(0, index) for index in indices]
        blanks = self._micro_batch - len(samples)
        samples += [self._held_out.sample(0, 0)] * blanks
        parts = {
            name: torch.stack([torch.as_tensor(getattr(sample, name)).long() for sample in samples])
            for name in ("tokens", "labels", "positions", "documents")
        }
        if blanks:
            parts["labels"][-blanks:] = IGNORED
        return EvaluationBatch(**parts)


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
