"""Logits as every loss of a head makes them: labels that don't count, a family's transform, and the size of a chunk.

The head stands on the losses, and the losses on this file.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from muster.plan.memory import LOGIT_CHUNK_BYTES

IGNORED = -100  # labels that are not scored


@dataclass(frozen=True)
class LogitTransform:
    """Transformation that some families apply to their logits: times `scale` (Cohere, Granite), then cap × tanh(x /
    cap) (Gemma 2). The result is divided by the temperature."""

    scale: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    def apply_(self, logits: Tensor) -> Tensor:
        """Transform the logits in place, and return the same tensor."""
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        if self.cap is not None:
            logits = logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def derivative_(self, grad_logits: Tensor, logits: Tensor) -> Tensor:
        """The derivative by what was transformed, from that by the transformed `logits`; in place."""
        if self.cap is not None:
            grad_logits = grad_logits.mul_(1.0 - (logits * (self.temperature / self.cap)).square_())
        steepness = self.scale / self.temperature
        return grad_logits if steepness == 1.0 else grad_logits.mul_(steepness)


PLAIN = LogitTransform()


def rows_of_a_chunk(weight: Tensor, tables: int = 1) -> int:
    """Return the number of rows of logits that are computed at a time, for so many tables of logits and a head's weight
    [vocab, dim]."""
    return max(1, LOGIT_CHUNK_BYTES["cuda" if weight.is_cuda else "cpu"] // (tables * 4 * weight.shape[0]))
