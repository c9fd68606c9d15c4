"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306): answers that are good or bad by themselves.

How far the model has moved from the reference is measured by prompts with answers to other prompts, over the
micro-batches that all ranks compute at the same time. Nothing is learnt from those answers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from muster.recipe.objectives import Kto
from muster.recipe.training import TrainingConfig
from muster.trainer.data.batch import TokenBatch
from muster.trainer.parallel.groups import groups
from muster.trainer.train.tasks.answers import answers, by_pair, losses_of, reference_of
from muster.trainer.train.tasks.objective import BatchLosses


class KtoObjective:
    """Objective of KTO: how much a good answer gains on the reference, and a bad one loses, beyond what any answer
    does."""

    names = (
        "rewards/chosen",
        "rewards/rejected",
        "logps/chosen",
        "logps/rejected",
        "kl",
    )

    def __init__(self, config: Kto, stored_reference: bool) -> None:
        self.config, self.stored_reference = config, stored_reference

    def loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        config = self.config
        assert batch.targets is not None, "samples of preferences carry their labels"
        reference = reference_of(model, batch)
        policy = answers(model, batch)
        gains, others = (policy.log_probs - reference).unbind(-1)
        distance = _mean_over_ranks(others.detach(), policy.there)
        good = by_pair(batch.targets)[..., 0] > 0.5
        sign = torch.where(good, 1.0, -1.0)
        weight = torch.where(good, config.desirable_weight, config.undesirable_weight)
        losses = weight * (1.0 - torch.sigmoid(config.beta * sign * (gains - distance)))
        rewards, log_probs = config.beta * gains.detach(), policy.log_probs[..., 0].detach()
        of_good, of_bad = policy.there & good, policy.there & ~good
        values = ((rewards, of_good), (rewards, of_bad), (log_probs, of_good), (log_probs, of_bad))
        return losses_of(losses, policy.there, *values, (distance.expand_as(gains), policy.there))

    def held_out_loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        return self.loss(model, batch)


def make_objective(training: TrainingConfig) -> KtoObjective:
    return KtoObjective(training.kto or Kto(), stored_reference=training.adapter is None)


def _mean_over_ranks(values: Tensor, there: Tensor) -> Tensor:
    """The mean of values [B, P] that are there, over all ranks, and at least 0; a scalar. Collective."""
    sums = torch.stack((torch.where(there, values, 0.0).sum(), there.sum().float()))
    groups().all.sum(sums)
    return (sums[0] / sums[1].clamp_min(1.0)).clamp_min(0.0)
