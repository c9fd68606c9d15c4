"""The shape of a decoder, its presets, and the arithmetic on it that needs no tensor library."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from muster.words.base import Spec

Positive = Annotated[int, Field(gt=0)]

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

BYTE_VOCABULARY = 260  # the built-in tokenizer's: 256 bytes, and then these marks
END_OF_DOCUMENT, END_OF_TURN, USER_MARK, ASSISTANT_MARK = range(256, BYTE_VOCABULARY)


class RopeScaling(Spec):
    """Llama 3.1's scaling of rotary positions beyond those of its pretraining (arXiv 2407.21783, section 3.4.2):
    rotations that turn slowly are slowed by `factor`, quick ones stay, those between are blended."""

    factor: Annotated[float, Field(ge=1)]
    """Factor by which the slowest rotations turn more slowly."""
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    """Rotations that turn fewer times than this in the original positions are slowed in full."""
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    """Rotations that turn more times than this in the original positions stay."""
    original_max_positions: Positive = 8192
    """Positions of the model before it was stretched."""

    @model_validator(mode="after")
    def _between(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"highFreqFactor {self.high_freq_factor} must be greater than lowFreqFactor {self.low_freq_factor}"
            )
        return self


class Architecture(Spec):
    """A decoder of the Llama family: RMSNorm, RoPE, SwiGLU, grouped-query attention."""

    dim: Positive
    """The width of the stream between layers."""
    layers: Positive
    """Number of layers."""
    heads: Positive
    """Query heads of a layer's attention."""
    kv_heads: Positive
    """Key and value heads; each serves heads / kvHeads query heads."""
    ffn_dim: Positive
    """The inner width of a layer's feed-forward part."""
    vocab_size: Positive
    """Tokens of the vocabulary."""
    max_positions: Positive
    """The longest sequence."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """The base of the rotary positions' frequencies."""
    rope_scaling: RopeScaling | None = None
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Constant that RMSNorm adds to the mean square."""
    tied_head: bool = False
    """Whether the output head shares the embedding's weights."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not divisible by heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not divisible by kvHeads {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"dim / heads = {self.head_dim} must be even for rotary positions")
        return self

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def projections(self) -> dict[Projection, tuple[int, int]]:
        """Return (outputs, inputs) of each matrix of a layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (queries, self.dim),
            "k_proj": (keys, self.dim),
            "v_proj": (keys, self.dim),
            "o_proj": (self.dim, queries),
            "gate_proj": (self.ffn_dim, self.dim),
            "up_proj": (self.ffn_dim, self.dim),
            "down_proj": (self.dim, self.ffn_dim),
        }

    @property
    def parameters(self) -> int:
        """Trainable weights; a tied head is counted once."""
        attention = self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tied_head else 2)
        return self.layers * layer + embeddings + self.dim


def _bytes(dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int) -> Architecture:
    return Architecture(
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn_dim=ffn_dim,
        vocab_size=BYTE_VOCABULARY,
        max_positions=4096,
        tied_head=True,
    )


def _llama(
    dim: int, layers: int, heads: int, kv_heads: int, ffn_dim: int, tied_head: bool, stretched: float
) -> Architecture:
    return Architecture(
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ffn_dim=ffn_dim,
        vocab_size=128_256,
        max_positions=131_072,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=stretched),
        tied_head=tied_head,
    )


# The muster-* presets read bytes, so they need no tokenizer file; the llama-* ones have the published shapes
# (8B: Llama 3.1, arXiv 2407.21783, table 3; 1B and 3B: Llama 3.2), rope scaling and the 128k vocabulary.
PRESETS: dict[str, Architecture] = {
    "muster-1m": _bytes(dim=128, layers=5, heads=4, kv_heads=2, ffn_dim=384),
    "muster-4m": _bytes(dim=256, layers=6, heads=4, kv_heads=2, ffn_dim=704),
    "muster-15m": _bytes(dim=384, layers=8, heads=6, kv_heads=3, ffn_dim=1_024),
    "muster-60m": _bytes(dim=768, layers=10, heads=12, kv_heads=4, ffn_dim=2_048),
    "muster-350m": _bytes(dim=1_024, layers=28, heads=16, kv_heads=8, ffn_dim=2_816),
    "llama-1b": _llama(dim=2_048, layers=16, heads=32, kv_heads=8, ffn_dim=8_192, tied_head=True, stretched=32),
    "llama-3b": _llama(dim=3_072, layers=28, heads=24, kv_heads=8, ffn_dim=8_192, tied_head=True, stretched=32),
    "llama-8b": _llama(dim=4_096, layers=32, heads=32, kv_heads=8, ffn_dim=14_336, tied_head=False, stretched=8),
}
