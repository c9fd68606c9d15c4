"""Grouped-query attention with rotary positions that never looks across documents packed into one row.

On the CPU (and on CUDA in fp32, or for short rows) it is torch's scaled_dot_product_attention: causal where every row
is one document, else with an additive mask made once per forward pass. On CUDA in half precision it is flex_attention,
whose block mask skips the blocks between documents altogether.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.recipe.architecture import Architecture, RopeScaling
from muster.trainer.models.compiler import has_compiler
from muster.trainer.models.key_value_cache import KeyValueCache
from muster.trainer.models.layers import Linear
from muster.trainer.parallel.token_split import TokenSplit

BLOCK: Final = 128  # tokens of a block of a block mask


@dataclass(frozen=True)
class AttentionContext:
    """Positions and visibility of the tokens in one forward pass; made once and shared by all layers."""

    cos: Tensor  # fp32 [B, 1, T, head_dim]
    sin: Tensor  # fp32 [B, 1, T, head_dim]
    mask: Any  # None (plain causal), additive [B, 1, T, S], or a flex BlockMask
    cache: KeyValueCache | None = None  # of the tokens before these
    # where other ranks have other tokens of the rows; angles are then those of own tokens, and the mask of whole rows
    split: TokenSplit | None = None


def attention_context(
    architecture: Architecture,
    positions: Tensor,
    documents: Tensor,
    dtype: torch.dtype,
    cache: KeyValueCache | None = None,
    split: TokenSplit | None = None,
) -> AttentionContext:
    """Make the context of one forward pass, in which tokens see the earlier tokens of their own document only.

    `positions` and `documents` are integers [B, T], of whole rows also with a split. A negative document is padding; it
    stands at the end of a row and is not scored, so what it sees does not matter. With a cache, they also see what it
    holds of their document, and padding may stand at the beginning of a row.
    """
    cos, sin = rotary(architecture, positions if split is None else split.own(positions))
    if cache is not None:
        return AttentionContext(cos, sin, _additive_mask(documents, dtype, cache.read(documents)), cache)
    if by_blocks(positions, dtype != torch.float32):
        return AttentionContext(cos, sin, _block_mask(documents), split=split)
    return AttentionContext(cos, sin, _additive_mask(documents, dtype), split=split)


def by_blocks(tokens: Tensor, half: bool) -> bool:
    """Return whether flex_attention computes the attention of rows [B, T]: on CUDA, in half precision. Rows shorter
    than a block would go to its kernel for decoding, which refuses many shapes; without a compiler there is no kernel
    at all."""
    return half and tokens.is_cuda and tokens.shape[1] >= BLOCK and has_compiler()


def rotary(architecture: Architecture, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotation angles, in the half-split layout of Llama (Su et al. 2021, arXiv 2104.09864)."""
    half = torch.arange(0, architecture.head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = architecture.rope_theta ** (-half / architecture.head_dim)
    if architecture.rope_scaling is not None:
        frequencies = stretched(frequencies, architecture.rope_scaling)
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Angles per position, those of slow rotations divided by the factor (Llama 3.1)."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [B, H, T, head_dim] by its position. It is computed in fp32 and returned in the dtype of `x`."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class GroupedAttention(nn.Module):
    """Grouped-query attention with rotary positions; maps x [B, T, dim] to [B, T, dim]."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.head_dim = architecture.head_dim
        self.q_proj = Linear(architecture.dim, architecture.heads * self.head_dim)
        self.k_proj = Linear(architecture.dim, architecture.kv_heads * self.head_dim)
        self.v_proj = Linear(architecture.dim, architecture.kv_heads * self.head_dim)
        self.o_proj = Linear(architecture.heads * self.head_dim, architecture.dim)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, context.cos, context.sin), rotate(key, context.cos, context.sin)
        if context.cache is not None:
            key, value = context.cache.extend(self, key, value)
        if context.split is None:
            mixed = attend(query, key, value, context.mask)
        else:
            mixed = context.split.attend(attend, query, key, value, context.mask)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """query [B, H, T, D], key and value [B, KV, T, D] -> [B, H, T, D]."""
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    mixed: Tensor = _flex()(query, key, value, block_mask=mask, enable_gqa=True)
    return mixed


def _additive_mask(documents: Tensor, dtype: torch.dtype, seen: Tensor | None = None) -> Tensor | None:
    """0 where a token may look, -inf elsewhere; None where every row is one document and causal attention will do.

    `seen` [B, S] are the documents of all tokens that can be looked at, which end with `documents` [B, T]. The question
    is only asked on the CPU: on CUDA the answer would wait for the device.
    """
    seen = documents if seen is None else seen
    length, whole = documents.shape[1], seen.shape[1]
    alike = (documents == documents[:, :1]) | (documents < 0)
    if documents.device.type == "cpu" and length == whole and bool(alike.all()):
        return None
    causal = torch.ones(length, whole, dtype=torch.bool, device=documents.device).tril(whole - length)
    allowed = (documents[:, None, :, None] == seen[:, None, None, :]) & causal
    return torch.zeros(allowed.shape, dtype=dtype, device=documents.device).masked_fill_(~allowed, float("-inf"))


def _block_mask(documents: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask  # compiles kernels: only where there is CUDA

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    batch, length = documents.shape
    return create_block_mask(visible, B=batch, H=None, Q_LEN=length, KV_LEN=length, device=documents.device)


@cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
