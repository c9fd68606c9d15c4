"""Parts that the objectives of preferences share: the log-probabilities of whole answers, and the named values.

A batch holds the two sides of each pair as the documents 2n and 2n + 1 of a row (data/pairs.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.trainer.data.batch import TokenBatch
from muster.trainer.data.packing import IGNORED
from muster.trainer.models.head import ByToken
from muster.trainer.models.lora import adapter_off
from muster.trainer.train.tasks.objective import BatchLosses

# The values that every objective of pairs reports, by the names that TRL's trainers use.
PAIR_VALUES: Final = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)


@dataclass(frozen=True)
class AnswerBatch:
    """The answers of a batch: log-probabilities and lengths [B, P, 2], both sides of each pair."""

    log_probs: Tensor  # fp32, summed over the answer's tokens
    lengths: Tensor  # fp32: the answer's tokens, at least 1
    there: Tensor  # bool [B, P]: whether there is such a pair, and not only room for it

    @property
    def means(self) -> Tensor:
        """Log-probabilities per token."""
        return self.log_probs / self.lengths


def answers(model: nn.Module, batch: TokenBatch) -> AnswerBatch:
    """Return the batch's answers with the model's log-probabilities, differentiable."""
    return gathered(batch, cross_entropies(model, batch, batch.labels))


def cross_entropies(model: nn.Module, batch: TokenBatch, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """fp32 [B, T]: the cross-entropy of each label where the model predicts at a temperature, 0 where it is not
    scored."""
    losses: Tensor = model(batch.tokens, batch.positions, batch.documents, labels, 0.0, ByToken(temperature))
    return losses


def gathered(batch: TokenBatch, losses: Tensor) -> AnswerBatch:
    """The answers of which `losses` [B, T] are the cross-entropies of the tokens."""
    scored = batch.labels != IGNORED
    lengths = by_pair(by_document(batch, scored.float()))
    log_probs = -by_pair(by_document(batch, losses * scored))
    return AnswerBatch(log_probs, lengths.clamp_min(1.0), (lengths > 0).all(-1))


def by_document(batch: TokenBatch, values: Tensor) -> Tensor:
    """The sums of `values` [B, T] over each document, [B, D]."""
    assert batch.targets is not None, "samples of preferences carry their values"
    sums = torch.zeros(batch.targets.shape, dtype=values.dtype, device=values.device)
    inside = batch.documents >= 0
    return sums.scatter_add(1, batch.documents.clamp_min(0), values * inside)


def by_pair(values: Tensor) -> Tensor:
    """Values of documents [B, D] as those of pairs [B, P, 2]."""
    return values.view(len(values), -1, 2)


def reference_of(model: nn.Module, batch: TokenBatch) -> Tensor:
    """fp32 [B, P, 2]: the log-probabilities that the reference model gives the answers. It is the model without its
    adapter, unless the batch carries what was computed before training.
    """
    if batch.reference is not None:
        return by_pair(batch.reference)
    return without_adapter(model, batch).log_probs


@torch.no_grad()
def without_adapter(model: nn.Module, batch: TokenBatch) -> AnswerBatch:
    """Return the batch's answers with the log-probabilities of the model whose adapter is off, without dropout."""
    training = model.training
    model.eval()
    try:
        with adapter_off(model):
            return answers(model, batch)
    finally:
        model.train(training)


def preference_loss(margins: Tensor, smoothing: float) -> Tensor:
    """-log sigmoid(margin), where the share `smoothing` of the pairs is taken to be the wrong way round (cDPO)."""
    return -(1.0 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)


def chosen_cross_entropy(given: AnswerBatch) -> Tensor:
    """[B, P]: the cross-entropy of the chosen answer, per token."""
    return -given.means[..., 0]


def losses_of(by_pair: Tensor, there: Tensor, *values: tuple[Tensor, Tensor]) -> BatchLosses:
    """The sum of losses [B, P] over the pairs that are there. `values` holds what is reported: of each value [B, P] and
    for which pairs it counts.
    """
    reported = [torch.stack((torch.where(of, value, 0.0).sum(), of.sum().float())) for value, of in values]
    return BatchLosses(torch.where(there, by_pair, 0.0).sum(), there.sum(), torch.stack(reported).detach())


def pair_values(rewards: Tensor, log_probs: Tensor, there: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """PAIR_VALUES of rewards and log-probabilities [B, P, 2]."""
    return (*reward_values(rewards, there), *((value, there) for value in log_probs.detach().unbind(-1)))


def reward_values(rewards: Tensor, there: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return those of PAIR_VALUES that depend on rewards [B, P, 2] alone."""
    chosen, rejected = rewards.detach().unbind(-1)
    return tuple((value, there) for value in (chosen, rejected, (chosen > rejected).float(), chosen - rejected))
