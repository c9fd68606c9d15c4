"""A second model as a teacher: what it predicts for each token of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from muster.recipe.distillation import Distillation
from muster.trainer.models.decoder import Decoder
from muster.trainer.models.distillation import TeacherPredictions
from muster.trainer.models.forward_model import ForwardModel
from muster.trainer.models.logits import PLAIN, LogitTransform


class TeacherModel:
    """A teacher on this rank."""

    def __init__(self, beside: ForwardModel, config: Distillation) -> None:
        self._config, self.module = config, beside.module
        self._head = _head_of(self.module)
        # The head keeps its hidden states: logits are made later, beside the student's.
        self._head.forward = lambda hidden, *_: hidden

    @contextmanager
    @torch.no_grad()
    def predictions(self, tokens: Tensor, positions: Tensor, documents: Tensor) -> Iterator[TeacherPredictions]:
        """Yield the teacher's predictions for a batch [B, T], valid within the block. Collective."""
        hidden: Tensor = self.module(tokens, positions, documents)
        with _gathered(self._head, self.module):
            weight, bias, transform = _output(self.module, self._head)
            yield TeacherPredictions(hidden, weight, bias, transform, self._config.temperature, self._config.weight)


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
