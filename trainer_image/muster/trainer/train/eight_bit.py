"""Moments in eight bits, by the kernels of `bitsandbytes`, which compute on a CPU too.

Of its optimizers only the kernels are used: they keep their state flat, so that blocks cross the edges of shards, and
outside of what a commit can name.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
KERNEL_BLOCK = 256  # of the kernel that updates in one pass


def decode(codes: Tensor, scales: Tensor, moment: str) -> Tensor:
    """fp32 of the shape of `codes` [rows, width], from a byte per value and an fp32 scale per block [rows, blocks]."""
    block = codes.numel() // scales.numel()
    decoded: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
        codes, scales.reshape(-1), _code_values(moment, codes.device), block, torch.float32
    )
    return decoded


def encode_into(codes: Tensor, scales: Tensor, values: Tensor, moment: str) -> None:
    """Write what `decode` reads."""
    block = codes.numel() // scales.numel()
    made, largest = torch.ops.bitsandbytes.quantize_blockwise(values, _code_values(moment, codes.device), block)
    codes.copy_(made.view(codes.shape))
    scales.copy_(largest.view(scales.shape))


def has_kernel(state: dict[str, Tensor]) -> bool:
    """Return whether the kernel that updates in one pass supports the blocks of this state."""
    codes, scales = state[MOMENTS[0]], state.get(f"{MOMENTS[0]}_absmax")
    return scales is not None and codes.numel() == scales.numel() * KERNEL_BLOCK


def update_in_one_pass(
    weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int, group: dict[str, Any]
) -> None:
    """AdamW of some rows of an fp32 weight, in place."""
    m, v = MOMENTS
    maps = _code_values(m, weight.device), _code_values(v, weight.device)
    scales = state[f"{m}_absmax"].view(-1), state[f"{v}_absmax"].view(-1)
    numbers = (*group["betas"], 0.0, 0.0, group["eps"], step, group["lr"])
    torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
        "adam", gradient, weight, state[m], state[v], *numbers, *maps, *scales, group["weight_decay"], 1.0
    )


@cache
def _code_values(moment: str, device: torch.device) -> Tensor:
    """Return the values that the 256 codes of a moment stand for, between -1 (for squares: 0) and 1."""
    from bitsandbytes.functional import create_dynamic_map

    values: Tensor = create_dynamic_map(signed=moment == "exp_avg")  # type: ignore[no-untyped-call]
    return values.to(device)
