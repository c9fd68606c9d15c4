"""What the loop asks of a model, whoever wrote it: its arithmetic, its modules without values, and its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class ModelSize:
    """The numbers that memory and FLOPs follow from, an adapter's weights included.

    parameters: all weights; learning: of them, those that are trained. active, active_learning: those that a token is
    multiplied with: an embedding table is only looked up, and of the experts only the chosen ones count.
    largest_group, largest_learning_group: weights that are gathered at once. dim: of the residual stream; ffn_dim: of
    the feed-forward part, over the experts that a token goes through. frozen_bytes: of one weight that is not
    trained, on average.
    """

    parameters: int
    learning: int
    active: int
    active_learning: int
    largest_group: int
    largest_learning_group: int
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    frozen_bytes: float = 4


class ModelDefinition(Protocol):
    """A model before it exists. position_limit: tokens of the longest sequence that it can take; None: no limit.

    casts_weights: its modules cast their weights to the activations' dtype where they use them, so that fp32 masters
    need no wrapper on a rank that holds them whole. packs: whether several documents may share a row.
    """

    @property
    def casts_weights(self) -> bool: ...
    @property
    def packs(self) -> bool: ...
    @property
    def why_not_packed(self) -> str: ...
    @property
    def position_limit(self) -> int | None: ...
    @property
    def vocab_size(self) -> int: ...

    def size(self) -> ModelSize: ...

    def build(self, dtype: torch.dtype, recompute: Recompute) -> nn.Module:
        """The modules, parameters on the meta device, what is frozen marked. dtype: of the activations.

        Called with tokens, positions, documents [B, T] it gives fp32 logits [B, T, vocab]; with labels and a label
        smoothing after them, the loss summed over the scored tokens.
        """

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """What is sharded, compiled and timed one by one, in order."""

    def lone_groups(self, model: nn.Module) -> Sequence[nn.Module]:
        """Further modules that are sharded as groups of their own."""

    def fill(self, model: nn.Module, device: torch.device, seed: int, values: bool) -> None:
        """Give every parameter (sharded by now, or whole) its memory on the device, and its first values. Collective.

        values: false where a commit's will follow. Raises UserError for values that can't be trained from.
        """

    def describe(self) -> dict[str, Any]:
        """All that a commit must say, besides its weights, for this model to be built again; JSON."""
