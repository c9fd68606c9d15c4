"""The output head: logits, or the summed cross-entropy without ever holding the logits of a whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100  # labels that are not scored
# Logits of one chunk, fp32: large enough to keep the matrix products busy, small beside the activations of a layer.
CHUNK_BYTES = 64 * 2**20

# Derivatives by the logits are at most 1 and mostly tiny; in fp16 they would vanish before the loss scale reaches them.
HALF_BOOST = 1024.0


class Head(nn.Module):
    """weight: [vocab, dim]; None when the head shares the embedding's, which the caller then passes in."""

    def __init__(self, dim: int, vocab_size: int, tied: bool) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, dim))

    def forward(
        self, hidden: Tensor, shared: Tensor | None = None, labels: Tensor | None = None, smoothing: float = 0.0
    ) -> Tensor:
        """hidden [B, T, dim] -> fp32 logits [B, T, vocab], or with labels [B, T] the loss summed over scored tokens."""
        weight = self.weight if shared is None else shared
        assert weight is not None, "a tied head needs the embedding's weight"
        if labels is None:
            return nn.functional.linear(hidden, weight.to(hidden.dtype)).float()
        return summed_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten(), smoothing)


def summed_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of hidden @ weightᵀ against labels, summed over labels that are not IGNORED; an fp32 scalar.

    hidden: [N, dim]; weight: [vocab, dim]; labels: [N]. Gradients are made chunk by chunk in the forward pass, so that
    at most CHUNK_BYTES of logits exist at any time and nothing is computed twice (see Liger, arXiv 2410.10989).
    """
    loss: Tensor = _SummedCrossEntropy.apply(hidden, weight, labels, smoothing)  # type: ignore[no-untyped-call]
    return loss


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        cast = weight.to(hidden.dtype)
        rows = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
        boost = HALF_BOOST if hidden.dtype == torch.float16 else 1.0
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grads: list[Tensor] = []
        weight_grad: Tensor | None = None
        for h, y in zip(torch.split(hidden, rows), torch.split(labels, rows), strict=True):
            loss, slope = _chunk(h @ cast.t(), y, smoothing, wants_hidden or wants_weight)
            total = total + loss
            if slope is None:
                continue
            hidden_grads.append((slope * boost).to(hidden.dtype) @ cast)
            if wants_weight:
                part = slope.to(hidden.dtype).t() @ h
                weight_grad = part.float() if weight_grad is None else weight_grad.add_(part)
        ctx.grads = (torch.cat(hidden_grads) if hidden_grads else None, weight_grad)
        ctx.boost = boost
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_grad, weight_grad = ctx.grads
        ctx.grads = (None, None)
        scale = upstream[0]
        if hidden_grad is not None:
            hidden_grad = hidden_grad * (scale / ctx.boost)
        if weight_grad is not None:
            weight_grad = weight_grad.mul_(scale).to(ctx.weight_dtype)
        return hidden_grad, weight_grad, None, None


def _chunk(logits: Tensor, labels: Tensor, smoothing: float, wants_slope: bool) -> tuple[Tensor, Tensor | None]:
    """The summed loss of some rows of logits, and its derivative by the logits (fp32).

    With smoothing s the target is (1 - s) on the label and s/V on every token (Szegedy et al. 2015, arXiv 1512.00567).
    """
    logits = logits.float()
    scored = labels != IGNORED
    safe = labels.clamp_min(0)[:, None]
    normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
    loss = normalizer - (1.0 - smoothing) * logits.gather(1, safe)
    if smoothing:
        loss = loss - smoothing * logits.mean(dim=-1, keepdim=True)
    total = loss.squeeze(1).masked_fill(~scored, 0.0).sum()
    if not wants_slope:
        return total, None
    slope = logits.sub_(normalizer).exp_()
    if smoothing:
        slope.sub_(smoothing / logits.shape[1])
    slope.scatter_add_(1, safe, torch.full_like(safe, smoothing - 1.0, dtype=slope.dtype))
    return total, slope.masked_fill_(~scored[:, None], 0.0)
