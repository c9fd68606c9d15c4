"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290) and IPO (Azar et al. 2023, arXiv 2310.12036).

The term of supervised fine-tuning is the mean over the pairs of the chosen answer's cross-entropy per token (as in RPO,
arXiv 2404.19733), so that it does not depend on how a step is divided into micro-batches.
"""

from __future__ import annotations

from torch import nn

from muster.recipe.objectives import Dpo
from muster.recipe.training import TrainingConfig
from muster.trainer.data.batch import TokenBatch
from muster.trainer.train.tasks.answers import (
    PAIR_VALUES,
    answers,
    chosen_cross_entropy,
    losses_of,
    pair_values,
    preference_loss,
    reference_of,
)
from muster.trainer.train.tasks.objective import BatchLosses


class DpoObjective:
    """Objective of DPO: how much more the chosen answer gains on the reference than the rejected one."""

    names = PAIR_VALUES

    def __init__(self, config: Dpo, stored_reference: bool) -> None:
        self.config, self.stored_reference = config, stored_reference

    def loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        return self._losses(model, batch, self.config.label_smoothing)

    def held_out_loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        return self._losses(model, batch, 0.0)

    def _losses(self, model: nn.Module, batch: TokenBatch, smoothing: float) -> BatchLosses:
        config = self.config
        reference = reference_of(model, batch)
        policy = answers(model, batch)
        gains = policy.log_probs - reference
        by_token = config.loss == "ipo" or config.length_normalized
        chosen, rejected = (gains / policy.lengths if by_token else gains).unbind(-1)
        if config.loss == "ipo":
            losses = (chosen - rejected - 1.0 / (2.0 * config.beta)) ** 2
        else:
            losses = preference_loss(config.beta * (chosen - rejected), smoothing)
        if config.sft_weight:
            losses = losses + config.sft_weight * chosen_cross_entropy(policy)
        values = pair_values(config.beta * gains, policy.log_probs, policy.there)
        return losses_of(losses, policy.there, *values)


def make_objective(training: TrainingConfig) -> DpoObjective:
    return DpoObjective(training.dpo or Dpo(), stored_reference=training.adapter is None)
