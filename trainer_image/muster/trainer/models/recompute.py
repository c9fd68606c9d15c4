"""Selective activation checkpointing: keep what is dear to compute and small, compute the rest again."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_ops = torch.ops.aten
# Matrix products and attention are nearly all of a layer's arithmetic; the rest is memory traffic.
_ATTENTION = {
    _ops._scaled_dot_product_flash_attention.default,
    _ops._scaled_dot_product_flash_attention_for_cpu.default,
    _ops._scaled_dot_product_efficient_attention.default,
    _ops._scaled_dot_product_cudnn_attention.default,
}


def keep_expensive() -> Any:
    """A fresh pair of contexts for one layer: attention is kept, and every second matrix product (as in torchtitan)."""
    products = {"forward": 0, "again": 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op is _ops.mm.default:
            turn = "again" if context.is_recompute else "forward"
            products[turn] += 1
            return CheckpointPolicy.MUST_SAVE if products[turn] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
