"""Protocol of an objective, as the step and the evaluation call it, whatever the task is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from muster.trainer.data.batch import TokenBatch


@dataclass(frozen=True)
class BatchLosses:
    """Losses that an objective computes for one batch."""

    sum: Tensor  # the loss, summed over what `count` counts; an fp32 scalar
    count: Tensor  # how many terms that are, an integer scalar on the batch's device
    # fp32 [names, 2] without a gradient: of each named value of the objective its sum and what to divide the sum by
    values: Tensor | None = None


class TrainingObjective(Protocol):
    """Objective that training minimises. One is made per run, from the configuration.

    The step divides the sum of all losses by the sum of all counts, over every micro-batch and share. It does the
    same with the named values.
    """

    @property
    def names(self) -> tuple[str, ...]: ...  # of the values that it reports beside the loss
    @property
    def stored_reference(self) -> bool: ...  # whether its batches must carry a reference model's log-probabilities

    def loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        """The training loss, differentiable."""

    def held_out_loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        """The loss without parts that only help learning (label smoothing), for comparing models."""


class LossTotals:
    """The sums of the losses of several batches."""

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.names = names
        self.loss = torch.zeros((), device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.values = torch.zeros((len(names), 2), device=device)

    def add(self, losses: BatchLosses) -> None:
        self.loss += losses.sum.detach()
        self.count += losses.count
        if losses.values is not None:
            self.values += losses.values

    def vector(self) -> Tensor:
        """fp64: loss, count, and of each value its sum and its divisor."""
        return torch.cat((torch.stack((self.loss.double(), self.count.double())), self.values.flatten().double()))


def means(names: tuple[str, ...], values: list[float]) -> dict[str, float]:
    """The named values of `Totals.vector`'s tail, once it is added up over all ranks; without those of nothing."""
    pairs = zip(names, values[::2], values[1::2], strict=True)
    return {name: total / divisor for name, total, divisor in pairs if divisor and abs(total) < float("inf")}
