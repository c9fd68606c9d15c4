"""A model that only computes forward: sharded as the one that learns, without gradients, optimizer or copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from muster.contract.distillation import Distillation
from muster.contract.training import TrainingConfig
from muster.trainer.models import sharding
from muster.trainer.models.decoder import Decoder
from muster.trainer.models.definition import ModelDefinition
from muster.trainer.models.distillation import TeacherPredictions
from muster.trainer.models.head import PLAIN, LogitTransform


class TeacherModel:
    """A teacher on this rank. Its parameters have their memory, and a folder's values; a commit's are loaded by the
    caller.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        training: TrainingConfig,
        layout: sharding.Layout,
        device: torch.device,
        values: bool,
    ) -> None:
        assert training.distillation is not None, "only distillation has a teacher"
        self._config: Distillation = training.distillation
        self.definition, self.module = definition, _built(definition, sharding.DTYPES[training.precision])
        if layout.shard != "ddp":
            sharding.shard(self.module, definition, layout, device, sharding.DTYPES[training.precision])
        definition.fill(self.module, device, 0, values)
        self.module.requires_grad_(False)
        self.module.eval()
        self._head = _head_of(self.module)
        # The head keeps its hidden states: logits are made later, beside the student's.
        self._head.forward = lambda hidden, *_: hidden

    @contextmanager
    @torch.no_grad()
    def predictions(self, tokens: Tensor, positions: Tensor, documents: Tensor) -> Iterator[TeacherPredictions]:
        """What it makes of a batch [B, T], within the block. Collective."""
        hidden: Tensor = self.module(tokens, positions, documents)
        with _gathered(self._head, self.module):
            weight, bias, transform = _output(self.module, self._head)
            yield TeacherPredictions(hidden, weight, bias, transform, self._config.temperature, self._config.weight)


def _built(definition: ModelDefinition, dtype: torch.dtype) -> nn.Module:
    """Without values, in the dtype that it computes in: nothing of it is ever updated."""
    module = definition.build(dtype, "none")
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    return module


def _head_of(module: Any) -> Any:
    return module.head if isinstance(module, Decoder) else module.get_output_embeddings()


def _output(module: Any, head: Any) -> tuple[Tensor, Tensor | None, LogitTransform]:
    """Weight and bias of the head, and what follows it."""
    if isinstance(module, Decoder):
        return (module.embed.weight if head.weight is None else head.weight), None, PLAIN
    from muster.trainer.models.pretrained import logit_transform

    return head.weight, head.bias, logit_transform(module.config)


@contextmanager
def _gathered(head: Any, module: Any) -> Iterator[None]:
    """Whole weights of the head within the block: of its own group, or of the root's where it is tied."""
    group = head if hasattr(head, "unshard") else module
    if not hasattr(group, "unshard"):
        yield
        return
    group.unshard()
    try:
        yield
    finally:
        group.reshard()
