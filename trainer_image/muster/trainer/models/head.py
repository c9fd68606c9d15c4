"""The output head: logits, or the summed cross-entropy without ever holding the logits of a whole batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from muster.trainer.models.distillation import TeacherPredictions, distilled_chunk
from muster.trainer.models.logits import IGNORED, PLAIN, LogitTransform, rows_of_a_chunk
from muster.trainer.models.token_losses import token_cross_entropies

# Of the loss: over all scored tokens, of each token by itself, or over all with what a teacher predicts for them.
Reduction: TypeAlias = "Literal['sum'] | ByToken | TeacherPredictions"

# Derivatives by the logits are at most 1 and mostly tiny; in fp16 they would vanish before the loss scale reaches them.
HALF_BOOST = 1024.0


@dataclass(frozen=True)
class ByToken:
    """The loss of each token by itself, where the model predicts at a temperature."""

    temperature: float = 1.0  # what the logits are divided by


class OutputHead(nn.Module):
    """The output head, from hidden states to logits or to the summed loss. Its weight is [vocab, dim]."""

    def __init__(self, dim: int, vocab_size: int, tied: bool) -> None:
        super().__init__()
        # None where the head shares the embedding's weight, which the caller then passes in.
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, dim))

    def forward(
        self,
        hidden: Tensor,
        shared: Tensor | None = None,
        labels: Tensor | None = None,
        smoothing: float = 0.0,
        reduction: Reduction = "sum",
    ) -> Tensor:
        """hidden [B, T, dim] -> fp32 logits [B, T, vocab], or with labels [B, T] the loss, summed over scored tokens or
        of each token."""
        weight = self.weight if shared is None else shared
        assert weight is not None, "a tied head needs the embedding's weight"
        if labels is None:
            return nn.functional.linear(hidden, weight.to(hidden.dtype)).float()
        return cross_entropy(hidden, weight, labels, smoothing, reduction)


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    smoothing: float,
    reduction: Reduction,
    bias: Tensor | None = None,
    transform: LogitTransform = PLAIN,
) -> Tensor:
    """Return the cross-entropy of hidden [B, T, dim] against labels [B, T]: an fp32 scalar, or by token fp32 [B, T].
    With a teacher's predictions it is fp32 [3], as `summed_cross_entropy` says.
    """
    if not isinstance(reduction, ByToken):
        teacher = None if reduction == "sum" else reduction
        return summed_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten(), smoothing, bias, transform, teacher)
    assert smoothing == 0.0, "what is compared by tokens is not smoothed"
    tempered = replace(transform, temperature=reduction.temperature)
    return token_cross_entropies(hidden, weight, labels, bias, tempered)


def summed_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    bias: Tensor | None = None,
    transform: LogitTransform = PLAIN,
    teacher: TeacherPredictions | None = None,
) -> Tensor:
    """Cross-entropy of transform(hidden @ weightᵀ + bias) against labels, summed over labels that are not IGNORED; an
    fp32 scalar.

    The shapes are hidden [N, dim], weight [vocab, dim], labels [N] and bias [vocab]. Gradients are made chunk by chunk
    in the forward pass, so that at most LOGIT_CHUNK_BYTES of logits exist at any time and nothing is computed twice
    (see Liger, arXiv 2410.10989).

    With a teacher it returns fp32 [3]: the loss that mixes both, which alone has a gradient, the cross-entropy, and the
    divergence from the teacher.
    """
    assert teacher is None or smoothing == 0.0, "what a teacher predicts is not smoothed"
    loss: Tensor = _SummedCrossEntropy.apply(hidden, weight, bias, labels, smoothing, transform, teacher)  # type: ignore[no-untyped-call]
    return loss


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        transform: LogitTransform,
        teacher: TeacherPredictions | None,
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        cast = weight.to(hidden.dtype)
        tables = 1 if teacher is None else 2
        rows = rows_of_a_chunk(weight, tables)
        wants_grad = wants_hidden or wants_weight or wants_bias
        boost = HALF_BOOST if hidden.dtype == torch.float16 else 1.0
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grads: list[Tensor] = []
        weight_grad: Tensor | None = None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants_bias else None
        for number, (h, y) in enumerate(zip(torch.split(hidden, rows), torch.split(labels, rows), strict=True)):
            logits = (h @ cast.t()).float()
            if bias is not None:
                logits = logits.add_(bias.float())
            if teacher is None:
                loss, grad_logits = _chunk(logits, y, smoothing, wants_grad, transform)
            else:
                here = slice(number * rows, number * rows + len(y))
                loss, grad_logits = distilled_chunk(logits, y, teacher, here, wants_grad, transform)
            total = total + loss
            if grad_logits is None:
                continue
            boosted = grad_logits if boost == 1.0 else grad_logits * boost
            hidden_grads.append(boosted.to(hidden.dtype) @ cast)
            if wants_weight:
                part = grad_logits.to(hidden.dtype).t() @ h
                weight_grad = part.float() if weight_grad is None else weight_grad.add_(part)
            if bias_grad is not None:
                bias_grad.add_(grad_logits.sum(dim=0))
        ctx.grads = (torch.cat(hidden_grads) if hidden_grads else None, weight_grad, bias_grad)
        ctx.boost = boost
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad, bias_grad = ctx.grads
        ctx.grads = (None, None, None)
        scale = upstream[0].flatten()[0]  # of the loss; what a teacher's divergence is told beside it has none
        if hidden_grad is not None:
            hidden_grad = hidden_grad * (scale / ctx.boost)
        if weight_grad is not None:
            weight_grad = weight_grad.mul_(scale).to(ctx.weight_dtype)
        if bias_grad is not None:
            bias_grad = bias_grad.mul_(scale).to(ctx.weight_dtype)
        return hidden_grad, weight_grad, bias_grad, None, None, None, None


def _chunk(
    logits: Tensor, labels: Tensor, smoothing: float, wants_grad: bool, transform: LogitTransform
) -> tuple[Tensor, Tensor | None]:
    """The summed loss of some rows of logits (fp32, and used up), and its derivative by what was transformed to them.

    With smoothing s the target is (1 - s) on the label and s/V on every token (Szegedy et al. 2015, arXiv 1512.00567).
    """
    logits = transform.apply_(logits)
    ignored = (labels == IGNORED)[:, None]
    safe = labels.clamp_min(0)[:, None]
    chosen = (1.0 - smoothing) * logits.gather(1, safe)
    if smoothing:
        chosen = chosen + smoothing * logits.mean(dim=-1, keepdim=True)
    transformed = logits.clone() if wants_grad and transform.cap is not None else logits
    # All in place and with one exp: a second tensor of this size costs more than the arithmetic.
    largest = logits.amax(dim=-1, keepdim=True)
    grad_logits = logits.sub_(largest).exp_()
    sums = grad_logits.sum(dim=-1, keepdim=True)
    total = (sums.log() + largest - chosen).masked_fill_(ignored, 0.0).sum()
    if not wants_grad:
        return total, None
    grad_logits.div_(sums)
    if smoothing:
        grad_logits.sub_(smoothing / logits.shape[1])
    grad_logits.scatter_add_(1, safe, torch.full_like(safe, smoothing - 1.0, dtype=grad_logits.dtype))
    grad_logits.masked_fill_(ignored, 0.0)  # whatever stands there, a NaN too
    return total, transform.derivative_(grad_logits, transformed)
