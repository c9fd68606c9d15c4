"""Protocol of a model, as the training loop needs it: its arithmetic, its modules without values, and its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, Self

import torch
from torch import nn

from muster.plan.model_size import ModelSize
from muster.trainer.models.scoring import ScoreHead
from muster.trainer.parallel.groups import RankGroup
from muster.trainer.parallel.token_split import TokenSplit

Recompute = Literal["none", "selective", "full"]


class ModelDefinition(Protocol):
    """A model before it exists, from which its modules are built and filled."""

    @property
    # Its modules cast their weights to the activations' dtype where they use them, so that fp32 masters need no wrapper
    # on a rank that holds them whole.
    def casts_weights(self) -> bool: ...
    @property
    def packs(self) -> bool: ...  # whether several documents may share a row
    @property
    def why_not_packed(self) -> str: ...  # what spoke against it, for messages
    @property
    def position_limit(self) -> int | None: ...  # tokens of the longest sequence that it can take; None for no limit
    @property
    def vocab_size(self) -> int: ...
    @property
    def scores(self) -> ScoreHead | None: ...  # the head that scores texts; None for one that predicts tokens

    def size(self) -> ModelSize: ...

    def build(self, dtype: torch.dtype, recompute: Recompute) -> nn.Module:
        """The modules, with parameters on the meta device and what is frozen marked. `dtype` is that of the
        activations.

        Called with tokens, positions and documents [B, T], the model gives fp32 logits [B, T, vocab]; with labels and a
        label smoothing after them, it gives the loss summed over the scored tokens; with the reduction `none` after
        these, the loss of each token [B, T]. One that scores texts is called without labels, and gives fp32
        [B, T, scores] by the number of the document.
        """

    def split_tokens(self, model: nn.Module, group: RankGroup) -> TokenSplit:
        """Have the modules, before they are sharded, compute this rank's tokens of the rows that they are called with,
        and return how. Raises UserError where their attention can't be divided so."""

    def freezing(self, patterns: Sequence[str]) -> Self:
        """The same with the weights frozen that the patterns mean (contract/parameter_names.py). `build` raises
        UserError for a pattern that means none."""

    def embedding(self, model: nn.Module) -> nn.Module:
        """The module that looks tokens up."""

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """The modules that are sharded, compiled and timed one by one, in order."""

    def lone_groups(self, model: nn.Module) -> Sequence[nn.Module]:
        """Further modules that are sharded as groups of their own."""

    def fill(self, model: nn.Module, device: torch.device, seed: int, values: bool) -> None:
        """Give every parameter (sharded by now, or whole) its memory on the device, and its first values. Collective.

        `values` is false where a commit's values will follow. Raises UserError for values that can't be trained from.
        """

    def describe(self) -> dict[str, Any]:
        """All that a commit must say, besides its weights, for this model to be built again; JSON."""
