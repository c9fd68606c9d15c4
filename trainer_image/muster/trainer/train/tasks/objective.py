"""What an objective is: what the step and the evaluation ask of it, whatever is learnt."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from torch import Tensor, nn

from muster.contract.training import Task, TrainingConfig
from muster.trainer.data.batch import Batch


class Objective(Protocol):
    """What is minimised. One is made per run; what else it needs (a reference model, a sampler) it is made with.

    The step divides the sum of all losses by the sum of all counts, over every micro-batch and share.
    """

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The training loss, summed over what `count` counts; a differentiable fp32 scalar."""

    def held_out_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The same without what only helps to learn (label smoothing), to compare models by."""

    def count(self, batch: Batch) -> Tensor:
        """How many terms the loss of this batch sums up, as an integer scalar on the batch's device."""


# A module of this package for each task; it has `make_objective(training)`.
MODULES: dict[Task, str] = {"pretrain": "next_token", "sft": "next_token"}


def objective_of(training: TrainingConfig) -> Objective:
    """The objective of the configuration's task."""
    module = import_module(f"muster.trainer.train.tasks.{MODULES[training.task]}")
    made: Objective = module.make_objective(training)
    return made
