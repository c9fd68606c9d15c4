"""Our own decoder as a model definition: a shape, and an adapter beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from muster.plan.model_size import ModelSize, decoder_size
from muster.recipe.adapter_config import Adapter
from muster.recipe.architecture import Architecture
from muster.trainer.models.decoder import Decoder, build
from muster.trainer.models.definition import Recompute
from muster.trainer.models.init import initialize, initialize_adapter
from muster.trainer.models.lora import attach
from muster.trainer.models.named import freeze
from muster.trainer.models.scoring import ScoreHead
from muster.trainer.parallel.groups import RankGroup
from muster.trainer.parallel.token_split import TokenSplit
from muster.words.base import dump


@dataclass(frozen=True)
class DecoderModel:
    architecture: Architecture
    adapter: Adapter | None = None
    scores: ScoreHead | None = None  # None where it predicts tokens
    freeze: tuple[str, ...] = ()  # patterns of weights that are not trained, where there is no adapter

    casts_weights = True
    packs = True
    why_not_packed = ""

    @property
    def position_limit(self) -> int | None:
        return self.architecture.max_positions

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocab_size

    def size(self) -> ModelSize:
        scores = None if self.scores is None else self.scores.count
        return decoder_size(self.architecture, self.adapter, scores, self.freeze)

    def build(self, dtype: torch.dtype, recompute: Recompute) -> nn.Module:
        decoder = build(self.architecture, dtype, recompute, scores=self.scores)
        if self.adapter is not None:
            attach(decoder, self.adapter)
        if self.freeze:
            freeze(decoder, self.freeze)
        return decoder

    def split_tokens(self, model: nn.Module, group: RankGroup) -> TokenSplit:
        assert isinstance(model, Decoder)
        model.split = TokenSplit(group, by_heads=self.architecture.heads % group.size == 0)
        return model.split

    def freezing(self, patterns: Sequence[str]) -> DecoderModel:
        return replace(self, freeze=tuple(patterns))

    def embedding(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, Decoder)
        return model.embed

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(model, Decoder)
        return list(model.layers)

    def lone_groups(self, model: nn.Module) -> Sequence[nn.Module]:
        """An untied embedding and head, so that their reductions are not one huge one; tied, they stay with the final
        norm in the root group, which lives through the whole pass."""
        assert isinstance(model, Decoder)
        if self.scores is not None:
            return (model.embed,)
        return () if self.architecture.tied_head else (model.embed, model.head)

    def fill(self, model: nn.Module, device: torch.device, seed: int, values: bool) -> None:
        model.to_empty(device=device)
        if values:
            initialize(model, self.architecture, seed)
            initialize_adapter(model, seed)

    def describe(self) -> dict[str, Any]:
        return dump(self.architecture) | (self.scores.describe() if self.scores else {})
