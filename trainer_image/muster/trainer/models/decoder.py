"""The decoder of the Llama family, blind to ranks, devices and sharding."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from muster.recipe.architecture import Architecture
from muster.trainer.models.attention import AttentionContext, GroupedAttention, attention_context
from muster.trainer.models.head import OutputHead, Reduction
from muster.trainer.models.key_value_cache import KeyValueCache
from muster.trainer.models.layers import Embedding, FeedForward, RMSNorm
from muster.trainer.models.pooling import document_scores
from muster.trainer.models.recompute import keep_expensive
from muster.trainer.models.scoring import ScoreHead
from muster.trainer.parallel.token_split import TokenSplit

Recompute = Literal["none", "selective", "full"]


class DecoderBlock(nn.Module):
    """One layer: x + attention(norm x), then x + feed_forward(norm x)."""

    def __init__(self, architecture: Architecture, recompute: Recompute) -> None:
        super().__init__()
        self.recompute = recompute
        self.draws = False  # random numbers (dropout), which a repeated pass must draw alike
        self.attention_norm = RMSNorm(architecture.dim, architecture.norm_eps)
        self.attention = GroupedAttention(architecture)
        self.feed_forward_norm = RMSNorm(architecture.dim, architecture.norm_eps)
        self.feed_forward = FeedForward(architecture.dim, architecture.ffn_dim)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._layer(x, context)
        # Two calls, because torch.compile must see which function makes the contexts.
        if self.recompute == "full":
            out: Tensor = checkpoint(self._layer, x, context, use_reentrant=False, preserve_rng_state=self.draws)
        else:
            out = checkpoint(
                self._layer, x, context, use_reentrant=False, preserve_rng_state=self.draws, context_fn=keep_expensive
            )
        return out

    def _layer(self, x: Tensor, context: AttentionContext) -> Tensor:
        x = x + self.attention(self.attention_norm(x), context)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Decoder(nn.Module):
    """A decoder-only transformer, which maps tokens to logits, or with labels to the summed loss; with `scores` it maps
    them to the scores of documents, and has a head of that name in the place of the other.

    `dtype` is that of the activations. Parameters are made in fp32, without values; see `init.initialize`.
    """

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype = torch.float32,
        recompute: Recompute = "none",
        scores: ScoreHead | None = None,
    ) -> None:
        super().__init__()
        self.architecture, self.scores = architecture, scores
        self.dtype = dtype
        self.split: TokenSplit | None = None  # where other ranks compute other tokens of the same rows
        self.embed = Embedding(architecture.vocab_size, architecture.dim, dtype)
        self.layers = nn.ModuleList(DecoderBlock(architecture, recompute) for _ in range(architecture.layers))
        self.norm = RMSNorm(architecture.dim, architecture.norm_eps)
        if scores is None:
            self.head = OutputHead(architecture.dim, architecture.vocab_size, architecture.tied_head)
        else:
            self.score = OutputHead(architecture.dim, scores.count, tied=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Tensor,
        labels: Tensor | None = None,
        smoothing: float = 0.0,
        reduction: Reduction = "sum",
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Compute logits, or a loss where labels are given. `tokens`, `positions`, `documents` and `labels` are
        integers [B, T].

        Without labels it returns logits [B, T, vocab] in fp32. With labels (already shifted, -100 not scored) it
        returns the cross-entropy summed over all scored tokens, an fp32 scalar, or with a reduction ByToken that of
        each, fp32 [B, T]. A decoder that scores takes no labels and returns fp32 [B, T, scores], by the number of the
        document. With a cache, tokens follow those that it holds, and the logits are those of the last one alone,
        [B, 1, vocab].

        With a split, rows are given and losses returned whole, on every rank of the share. Logits are no loss: every
        rank computes all of them.
        """
        split = None if labels is None and self.scores is None else self.split
        context = attention_context(self.architecture, positions, documents, self.dtype, cache, split)
        x = self.embed(tokens)
        if split is not None:
            x, labels = split.own(x), None if labels is None else split.own(labels)
        for layer in self.layers:
            x = layer(x, context)
        if self.scores is not None:
            scores = self.score(self.norm(x))
            return document_scores(scores if split is None else split.whole(scores), tokens, documents, self.scores.pad)
        x = x if cache is None else x[:, -1:]
        shared = self.embed.weight if self.architecture.tied_head else None
        out: Tensor = self.head(self.norm(x), shared, labels, smoothing, reduction)
        return out if split is None else split.whole(out)


def build(
    architecture: Architecture,
    dtype: torch.dtype = torch.float32,
    recompute: Recompute = "none",
    device: torch.device | str = "meta",
    scores: ScoreHead | None = None,
) -> Decoder:
    """The decoder without values. On the meta device: shapes only, no memory."""
    with torch.device(device):
        return Decoder(architecture, dtype, recompute, scores)
