"""What is minimised. Both tasks are next-token cross-entropy; they differ in which labels the data leaves scored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from muster.contract.training import TrainingConfig
from muster.trainer.models.head import IGNORED


class Batch(Protocol):
    """What an objective reads of a micro-batch: all [B, T] integers; labels are shifted already, -100 is not scored."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def documents(self) -> Tensor: ...


Objective = Callable[[nn.Module, Batch], Tensor]


def objective(training: TrainingConfig) -> Objective:
    """The training loss of a micro-batch, summed over its scored tokens."""
    smoothing = training.label_smoothing

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return token_loss(model, batch, smoothing)

    return loss


def token_loss(model: nn.Module, batch: Batch, smoothing: float = 0.0) -> Tensor:
    out: Tensor = model(batch.tokens, batch.positions, batch.documents, batch.labels, smoothing)
    return out


def scored(batch: Batch) -> Tensor:
    """How many labels count, as an integer scalar on the device."""
    return (batch.labels != IGNORED).sum()
