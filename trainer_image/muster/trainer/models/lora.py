"""LoRA (Hu et al. 2021, arXiv 2106.09685): small trained matrices beside frozen ones. Named as in `peft`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from muster.contract.training import Adapter
from muster.trainer.models.adapter import is_part
from muster.trainer.models.decoder import Block, Decoder
from muster.trainer.models.layers import Linear


class LoraLinear(Linear):
    """y = x Wᵀ + alpha / rank × dropout(x) Aᵀ Bᵀ. lora_A: [rank, in_features]; lora_B: [out_features, rank]."""

    def __init__(self, in_features: int, out_features: int, adapter: Adapter) -> None:
        super().__init__(in_features, out_features)
        self.scale, self.dropout = adapter.scale, adapter.dropout
        self.lora_A = Linear(in_features, adapter.rank)
        self.lora_B = Linear(adapter.rank, out_features)

    def forward(self, x: Tensor) -> Tensor:
        beside: Tensor = self.lora_B(self.lora_A(F.dropout(x, self.dropout, self.training)))
        return super().forward(x) + self.scale * beside


def attach(decoder: Decoder, adapter: Adapter) -> None:
    """Put the adapter, without values, beside its targets and freeze the rest. Before the decoder is sharded."""
    shapes = decoder.architecture.projections
    for block in decoder.layers:
        assert isinstance(block, Block)
        block.draws = adapter.dropout > 0
        for part in (block.attention, block.feed_forward):
            for target in adapter.targets:
                if hasattr(part, target):
                    outputs, inputs = shapes[target]
                    with torch.device(block.attention_norm.weight.device):
                        part.register_module(target, LoraLinear(inputs, outputs, adapter))
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(is_part(name))
