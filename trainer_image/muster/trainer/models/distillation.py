"""Distillation from a teacher's predictions, computed chunk by chunk together with the student's own logits, so that
neither table of logits is ever whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from muster.trainer.models.logits import IGNORED, LogitTransform


@dataclass(frozen=True)
class TeacherPredictions:
    """Predictions of a teacher for a batch, up to its logits: transform(hidden @ weightᵀ + bias)."""

    hidden: Tensor  # [B, T, dim]
    weight: Tensor  # [vocab, dim]
    bias: Tensor | None
    transform: LogitTransform
    temperature: float
    share: float  # of the loss

    def log_probs(self, rows: slice, vocab: int) -> Tensor:
        """fp32 [rows, vocab] at the temperature, of some rows of [B × T].

        Tables are padded to different sizes in one family: rows that only the teacher has are no tokens, and of those
        that it lacks it predicts none.
        """
        hidden = self.hidden.flatten(0, 1)[rows]
        logits = (hidden @ self.weight[:vocab].to(hidden.dtype).t()).float()
        if self.bias is not None:
            logits = logits.add_(self.bias[:vocab].float())
        predictions = torch.log_softmax(self.transform.apply_(logits) / self.temperature, dim=-1)
        return torch.nn.functional.pad(predictions, (0, vocab - predictions.shape[1]), value=-torch.inf)


def distilled_chunk(
    logits: Tensor,
    labels: Tensor,
    teacher: TeacherPredictions,
    rows: slice,
    wants_grad: bool,
    transform: LogitTransform,
) -> tuple[Tensor, Tensor | None]:
    """Return the distilled loss of some rows of logits (fp32 [rows, vocab], and used up): fp32 [3] with the loss, the
    cross-entropy and the divergence KL(teacher, student), each summed over the rows that count; and the loss's
    derivative by what was transformed to the logits.
    """
    temperature, share = teacher.temperature, teacher.share
    logits = transform.apply_(logits)
    counted = (labels != IGNORED)[:, None]
    safe = labels.clamp_min(0)[:, None]
    own = torch.log_softmax(logits, dim=-1)
    cross_entropy = -own.gather(1, safe).where(counted, 0.0).sum()
    warm = own if temperature == 1.0 else torch.log_softmax(logits / temperature, dim=-1)
    theirs = teacher.log_probs(rows, logits.shape[1])
    probabilities = theirs.exp()
    divergence = torch.where(probabilities > 0, probabilities * (theirs - warm), 0.0).where(counted, 0.0).sum()
    loss = (1.0 - share) * cross_entropy + share * temperature**2 * divergence
    losses = torch.stack((loss, cross_entropy, divergence))
    if not wants_grad:
        return losses, None
    grad = (warm.exp() - probabilities).mul_(share * temperature)
    if share < 1.0:
        grad.add_(own.exp(), alpha=1.0 - share)
        grad.scatter_add_(1, safe, torch.full_like(safe, share - 1.0, dtype=grad.dtype))
    return losses, transform.derivative_(grad.masked_fill_(~counted, 0.0), logits)
