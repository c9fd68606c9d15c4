"""Next-token prediction with a teacher: the tokens of the data, and what a second model holds possible for each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from muster.trainer.data.batch import TokenBatch
from muster.trainer.data.packing import IGNORED
from muster.trainer.models.teacher import TeacherModel
from muster.trainer.train.tasks.objective import BatchLosses


class DistillationObjective:
    """The cross-entropy of each next token, and the divergence from a teacher's prediction of it."""

    names = ("cross_entropy", "teacher_kl")
    stored_reference = False

    def __init__(self, teacher: TeacherModel) -> None:
        self.teacher = teacher

    def loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        return self._losses(model, batch, 0)

    def held_out_loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        """The cross-entropy: a teacher only helps to learn, and perplexities are to compare."""
        return self._losses(model, batch, 1)

    def _losses(self, model: nn.Module, batch: TokenBatch, which: int) -> BatchLosses:
        with self.teacher.predictions(batch.tokens, batch.positions, batch.documents) as predictions:
            losses: Tensor = model(batch.tokens, batch.positions, batch.documents, batch.labels, 0.0, predictions)
        count = (batch.labels != IGNORED).sum()
        return BatchLosses(losses[which], count, torch.stack((losses[1:], count.float().expand(2)), dim=1).detach())
