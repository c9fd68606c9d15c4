"""The tokens of a share's rows, divided over the ranks that compute the share together (context parallelism).

Embedding, norms, feed-forward, head and loss work token by token, so that a rank computes them for its own tokens
alone: every `size`-th one, from its own number on. Only attention looks across tokens, and there the ranks meet:

- by heads (Ulysses, Jacobs et al. 2023, arXiv 2309.14509): each rank gives away its tokens of the others' heads, and
  attends with all tokens of its own heads. What that takes is the same on every rank, whatever documents a row has.
- by keys: each rank has the keys and values of all tokens, and attends with its own tokens' queries. For any number of
  heads; because neighbours are on different ranks, each has an equal part of every document's work.

A value that all tokens have a part in (a loss) is made whole on every rank, and each learns through its own tokens
alone: a weight's gradient is the sum over all ranks of what each has found, as if they had had different rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from muster.trainer.parallel.groups import RankGroup

# Of query [B, H, Q, D], key and value [B, KV, T, D] and a mask: [B, H, Q, D].
AttentionFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


class TokenSplit:
    """A rank's part of the tokens of each row. `by_heads`: the ranks divide the heads in attention, which must be a
    multiple of their number; keys and values of fewer heads are repeated."""

    def __init__(self, group: RankGroup, by_heads: bool = True) -> None:
        self.group, self.by_heads = group, by_heads
        self.size, self.index = group.size, group.index
        self.meeting: Callable[[], AbstractContextManager[None]] = nullcontext  # entered while others are waited for
        self._block_mask: tuple[Any, Any] | None = None  # the last one of whole rows, and that of own rows

    def own(self, rows: Tensor) -> Tensor:
        """This rank's tokens of rows [B, T, ...], as a tensor of their own."""
        assert rows.shape[1] % self.size == 0, f"rows of {rows.shape[1]} tokens on {self.size} ranks"
        return rows[:, self.index :: self.size].contiguous()

    def whole(self, own: Tensor) -> Tensor:
        """Make a value of all tokens: the sum of scalars or vectors, or [B, T, ...] of each rank's [B, T / size, ...].
        Of its gradient each rank keeps the part of its own tokens."""
        made: Tensor = _Whole.apply(own, self)  # type: ignore[no-untyped-call]
        return made

    def attend(self, attention: AttentionFunction, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        """Attention of this rank's tokens over those of all ranks; query [B, H, T / size, D] to [B, H, T / size, D].

        `mask` is that of whole rows: None for plain causal attention, a tensor [B or 1, 1, T, T], or a BlockMask.
        """
        if not self.by_heads:
            length = query.shape[2] * self.size
            return attention(query, self._all_tokens(key), self._all_tokens(value), self._own_rows(mask, length, query))
        repeats = self.size // math.gcd(self.size, key.shape[1])
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        query, key, value = (_ByHeads.apply(each, self) for each in (query, key, value))  # type: ignore[no-untyped-call]
        mixed: Tensor = _ByTokens.apply(attention(query, key, value, mask), self)  # type: ignore[no-untyped-call]
        return mixed

    def _all_tokens(self, own: Tensor) -> Tensor:
        made: Tensor = _AllTokens.apply(own, self)  # type: ignore[no-untyped-call]
        return made

    def _own_rows(self, mask: Any, length: int, query: Tensor) -> Any:
        """The rows of a mask that are this rank's tokens'."""
        if mask is None:
            places = torch.arange(length, device=query.device)
            return (places[self.index :: self.size, None] >= places)[None, None]
        if isinstance(mask, Tensor):
            return mask[:, :, self.index :: self.size] if mask.shape[2] > 1 else mask
        if self._block_mask is None or self._block_mask[0] is not mask:
            self._block_mask = mask, self._own_block_mask(mask, length)
        return self._block_mask[1]

    def _own_block_mask(self, mask: Any, length: int) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        visible = partial(_visible, mask.mask_mod, self.index, self.size)
        batch, heads = mask.shape[0], mask.shape[1]
        own, device = length // self.size, mask.kv_indices.device
        return create_block_mask(visible, B=batch, H=heads, Q_LEN=own, KV_LEN=length, device=device)

    # --- the exchanges, each the derivative of another or of itself ---

    def tokens_for_heads(self, x: Tensor) -> Tensor:
        """[B, H, T / size, D] of all heads to [B, H / size, T, D] of all tokens."""
        batch, heads, tokens, width = x.shape
        sent = x.view(batch, self.size, heads // self.size, tokens, width).transpose(0, 1).contiguous()
        with self.meeting():
            received = self.group.exchange(sent)
        return received.permute(1, 2, 3, 0, 4).reshape(batch, heads // self.size, tokens * self.size, width)

    def heads_for_tokens(self, x: Tensor) -> Tensor:
        """[B, H / size, T, D] of all tokens to [B, H, T / size, D] of all heads."""
        batch, heads, tokens, width = x.shape
        sent = x.reshape(batch, heads, tokens // self.size, self.size, width).permute(3, 0, 1, 2, 4).contiguous()
        with self.meeting():
            received = self.group.exchange(sent)
        return received.transpose(0, 1).reshape(batch, heads * self.size, tokens // self.size, width)

    def collect(self, own: Tensor, dim: int) -> Tensor:
        """The tokens of all ranks, which lie in this dimension, in their order."""
        with self.meeting():
            collected = self.group.collect(own.contiguous())
        return collected.movedim(0, dim + 1).flatten(dim, dim + 1)

    def scatter_sum(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's tokens of the sum over the ranks of what each has of all tokens."""
        shape = (*whole.shape[:dim], -1, self.size, *whole.shape[dim + 1 :])
        parts = whole.reshape(shape).movedim(dim + 1, 0).contiguous()
        with self.meeting():
            return self.group.scatter_sum(parts)


def _visible(visible: Any, index: int, size: int, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Any:
    return visible(batch, head, query * size + index, key)


class _ByHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: TokenSplit) -> Tensor:
        ctx.split = split
        return split.tokens_for_heads(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.split.heads_for_tokens(grads[0]), None


class _ByTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: TokenSplit) -> Tensor:
        ctx.split = split
        return split.heads_for_tokens(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.split.tokens_for_heads(grads[0].contiguous()), None


class _AllTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: TokenSplit) -> Tensor:
        ctx.split = split
        return split.collect(x, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.split.scatter_sum(grads[0], 2), None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, split: TokenSplit) -> Tensor:
        ctx.split, ctx.by_token = split, own.dim() > 1
        if ctx.by_token:
            return split.collect(own, 1)
        with split.meeting():
            return split.group.sum(own.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.split.own(grads[0]) if ctx.by_token else grads[0], None
