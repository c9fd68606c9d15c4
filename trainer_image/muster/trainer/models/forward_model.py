"""A model that only computes forward: sharded as the one that learns, without gradients, optimizer or copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from muster.recipe.training import TrainingConfig
from muster.trainer.models import sharding
from muster.trainer.models.definition import ModelDefinition


class ForwardModel:
    """A second model on this rank. Its parameters have their memory, and a folder's values; a commit's are loaded by
    the caller.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        training: TrainingConfig,
        layout: sharding.ShardLayout,
        device: torch.device,
        values: bool,
    ) -> None:
        dtype = sharding.DTYPES[training.precision]
        self.definition, self.device = definition, device
        self.module: Any = _built(definition, dtype)
        if not layout.is_whole:
            sharding.shard(self.module, definition, layout, device, dtype)
        definition.fill(self.module, device, 0, values)
        self.module.requires_grad_(False)
        self.module.eval()


def _built(definition: ModelDefinition, dtype: torch.dtype) -> nn.Module:
    """Without values, in the dtype that it computes in: nothing of it is ever updated."""
    module = definition.build(dtype, "none")
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    return module
