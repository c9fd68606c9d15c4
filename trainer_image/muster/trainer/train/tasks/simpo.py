"""Simple preference optimisation, which needs no reference (Meng et al. 2024, arXiv 2405.14734)."""

from __future__ import annotations

from torch import nn

from muster.recipe.objectives import Simpo
from muster.recipe.training import TrainingConfig
from muster.trainer.data.batch import TokenBatch
from muster.trainer.train.tasks.answers import (
    PAIR_VALUES,
    answers,
    chosen_cross_entropy,
    losses_of,
    pair_values,
    preference_loss,
)
from muster.trainer.train.tasks.objective import BatchLosses


class SimpoObjective:
    """Objective of SimPO: how much more probable per token the chosen answer is than the rejected one, less a
    margin."""

    names = PAIR_VALUES
    stored_reference = False

    def __init__(self, config: Simpo) -> None:
        self.config = config

    def loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        return self._losses(model, batch, self.config.label_smoothing)

    def held_out_loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        return self._losses(model, batch, 0.0)

    def _losses(self, model: nn.Module, batch: TokenBatch, smoothing: float) -> BatchLosses:
        config = self.config
        policy = answers(model, batch)
        rewards = config.beta * policy.means
        losses = preference_loss(rewards[..., 0] - rewards[..., 1] - config.gamma, smoothing)
        if config.sft_weight:
            losses = losses + config.sft_weight * chosen_cross_entropy(policy)
        return losses_of(losses, policy.there, *pair_values(rewards, policy.means, policy.there))


def make_objective(training: TrainingConfig) -> SimpoObjective:
    return SimpoObjective(training.simpo or Simpo())
