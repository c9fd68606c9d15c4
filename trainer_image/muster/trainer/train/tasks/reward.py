"""A reward model, learnt from pairs by the Bradley-Terry model: the chosen answer's score is to be the larger one
(Ouyang et al. 2022, arXiv 2203.02155), by the pair's margin where the data has one (arXiv 2307.09288).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from muster.recipe.objectives import Reward
from muster.recipe.training import TrainingConfig
from muster.trainer.data.batch import TokenBatch
from muster.trainer.data.packing import IGNORED
from muster.trainer.train.tasks.answers import PAIR_VALUES, by_document, by_pair, losses_of, reward_values
from muster.trainer.train.tasks.objective import BatchLosses


class RewardObjective:
    """Objective of a reward model: how far the chosen answer's score is above the rejected one's."""

    names = PAIR_VALUES[:4]
    stored_reference = False

    def __init__(self, config: Reward) -> None:
        self.config = config

    def loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        assert batch.targets is not None, "samples of preferences carry their margins"
        there = (by_pair(by_document(batch, (batch.labels != IGNORED).float())) > 0).all(-1)
        scores: torch.Tensor = model(batch.tokens, batch.positions, batch.documents)
        rewards = by_pair(scores[:, : batch.targets.shape[1], 0])
        margins = by_pair(batch.targets)[..., 0]
        losses = -F.logsigmoid(rewards[..., 0] - rewards[..., 1] - margins)
        if self.config.center_rewards_coefficient:
            losses = losses + self.config.center_rewards_coefficient * rewards.sum(-1) ** 2
        return losses_of(losses, there, *reward_values(rewards, there))

    def held_out_loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        return self.loss(model, batch)


def make_objective(training: TrainingConfig) -> RewardObjective:
    return RewardObjective(training.reward or Reward())
