"""The cross-entropy of each token, for objectives that weigh tokens and whole answers by themselves.

What a token's gradient is multiplied by is known only in the backward pass, so that the logits are made again there,
chunk by chunk; at most LOGIT_CHUNK_BYTES of them exist at any time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muster.trainer.models.logits import IGNORED, PLAIN, LogitTransform, rows_of_a_chunk


def token_cross_entropies(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    transform: LogitTransform = PLAIN,
) -> Tensor:
    """Cross-entropy of transform(hidden @ weightᵀ + bias) against each label; fp32 of the shape of `labels`, 0 where a
    label is IGNORED.

    The shapes are hidden [..., dim], weight [vocab, dim], labels [...] and bias [vocab].
    """
    flat, targets = hidden.flatten(0, -2), labels.flatten()
    if targets.device.type != "cpu":  # to count the scored ones there would wait for the device
        losses: Tensor = _TokenCrossEntropies.apply(flat, weight, bias, targets, transform)  # type: ignore[no-untyped-call]
        return losses.view(labels.shape)
    # Prompts and padding are often half of a batch, and the head is the largest product of a small model.
    scored = (targets != IGNORED).nonzero().squeeze(1)
    some: Tensor = _TokenCrossEntropies.apply(  # type: ignore[no-untyped-call]
        flat.index_select(0, scored), weight, bias, targets[scored], transform
    )
    return torch.zeros(len(targets), dtype=some.dtype).index_copy(0, scored, some).view(labels.shape)


class _TokenCrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, transform: LogitTransform
    ) -> Tensor:
        losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        normalizers = torch.empty_like(losses)
        for rows in _chunks(labels, weight):
            logits = transform.apply_(_logits(hidden[rows], weight, bias))
            normalizers[rows] = torch.logsumexp(logits, dim=-1)
            there = logits.gather(1, labels[rows].clamp_min(0)[:, None]).squeeze(1)
            losses[rows] = (normalizers[rows] - there).masked_fill_(labels[rows] == IGNORED, 0.0)
        ctx.save_for_backward(hidden, weight, bias, labels, normalizers)
        ctx.transform = transform
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normalizers = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        weight_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wants_weight else None
        bias_grad = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if wants_bias else None
        by_token = upstream[0].masked_fill(labels == IGNORED, 0.0)
        cast = weight.to(hidden.dtype)
        for rows in _chunks(labels, weight):
            logits = ctx.transform.apply_(_logits(hidden[rows], weight, bias))
            transformed = logits.clone() if ctx.transform.cap is not None else logits
            grad = logits.sub_(normalizers[rows, None]).exp_()
            safe = labels[rows].clamp_min(0)[:, None]
            grad.scatter_add_(1, safe, torch.full_like(safe, -1.0, dtype=grad.dtype))
            grad = ctx.transform.derivative_(grad.mul_(by_token[rows, None]), transformed)
            if hidden_grad is not None:
                hidden_grad[rows] = grad.to(hidden.dtype) @ cast
            if weight_grad is not None:
                weight_grad.add_(grad.to(hidden.dtype).t() @ hidden[rows])
            if bias_grad is not None:
                bias_grad.add_(grad.sum(dim=0))
        return (
            hidden_grad,
            None if weight_grad is None else weight_grad.to(weight.dtype),
            None if bias_grad is None else bias_grad.to(bias.dtype),
            None,
            None,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = (hidden @ weight.to(hidden.dtype).t()).float()
    return logits if bias is None else logits.add_(bias.float())


def _chunks(labels: Tensor, weight: Tensor) -> list[slice]:
    rows = rows_of_a_chunk(weight)
    return [slice(begin, begin + rows) for begin in range(0, len(labels), rows)]
