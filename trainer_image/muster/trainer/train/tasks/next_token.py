"""Next-token cross-entropy: pretraining and supervised fine-tuning, which differ in the labels that the data masks."""

from __future__ import annotations

from torch import nn

from muster.recipe.training import TrainingConfig
from muster.trainer.data.batch import TokenBatch
from muster.trainer.data.packing import IGNORED
from muster.trainer.train.tasks.objective import BatchLosses


class NextToken:
    """The cross-entropy of each next token.

    `smoothing` is the share of each target that is spread over the whole vocabulary, while training only.
    """

    names = ()
    stored_reference = False

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing

    def loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        return _summed(model, batch, self.smoothing)

    def held_out_loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        return _summed(model, batch, 0.0)


def make_objective(training: TrainingConfig) -> NextToken:
    return NextToken(training.label_smoothing)


def _summed(model: nn.Module, batch: TokenBatch, smoothing: float) -> BatchLosses:
    loss = model(batch.tokens, batch.positions, batch.documents, batch.labels, smoothing)
    return BatchLosses(loss, (batch.labels != IGNORED).sum())
