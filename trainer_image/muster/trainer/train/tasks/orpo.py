"""Odds ratio preference optimisation, which needs no reference (Hong et al. 2024, arXiv 2403.07691).

The cross-entropy is of the whole chosen side, prompt included, as in the authors' code and in TRL; it is the mean over
the pairs of each one's mean per token, so that it does not depend on how a step is divided into micro-batches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.recipe.objectives import Orpo
from muster.recipe.training import TrainingConfig
from muster.trainer.data.batch import TokenBatch
from muster.trainer.data.packing import IGNORED
from muster.trainer.train.tasks.answers import (
    PAIR_VALUES,
    by_document,
    by_pair,
    cross_entropies,
    gathered,
    losses_of,
    pair_values,
)
from muster.trainer.train.tasks.objective import BatchLosses


class OrpoObjective:
    """The chosen side's cross-entropy, and the ratio of the odds of both answers."""

    names = (*PAIR_VALUES, "log_odds_ratio", "nll_loss")
    stored_reference = False

    def __init__(self, config: Orpo) -> None:
        self.config = config

    def loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        every = _every_label(batch)
        by_token = cross_entropies(model, batch, every)
        policy = gathered(batch, by_token)
        sizes = by_document(batch, (every != IGNORED).float()).clamp_min(1.0)
        side = by_pair(by_document(batch, by_token) / sizes)[..., 0]
        # The odds of an answer that is not there would be infinite.
        chosen, rejected = torch.where(policy.there[..., None], policy.means, -1.0).unbind(-1)
        log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
        ratio = F.logsigmoid(log_odds)
        values = pair_values(self.config.beta * policy.means, policy.means, policy.there)
        reported = (*values, (ratio.detach(), policy.there), (side.detach(), policy.there))
        return losses_of(side - self.config.beta * ratio, policy.there, *reported)

    def held_out_loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        return self.loss(model, batch)


def make_objective(training: TrainingConfig) -> OrpoObjective:
    return OrpoObjective(training.orpo or Orpo())


def _every_label(batch: TokenBatch) -> Tensor:
    """The next token of every token of a document, whatever is scored."""
    following = torch.roll(batch.tokens, -1, 1)
    goes_on = (batch.documents[:, 1:] == batch.documents[:, :-1]) & (batch.documents[:, 1:] >= 0)
    return following.masked_fill(~F.pad(goes_on, (0, 1)), IGNORED)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, without loss of digits (Mächler 2012); a probability of 1 is taken for the largest
    one below it."""
    x = x.clamp_max(-torch.finfo(x.dtype).eps)
    return torch.where(x > -0.6931472, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))
