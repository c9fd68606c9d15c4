"""Adapters: small matrices that are trained while the model's own weights stay unchanged."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from muster.recipe.architecture import Architecture
from muster.words.base import Many
from muster.words.fields import Fraction, Positive, Text
from muster.words.rules import DocumentRule, RuledSpec

ALL_LINEAR = "all-linear"
SCORE = "score"  # the head that scores a text, by the name that transformers and peft give it


def is_named(module: str, name: str) -> bool:
    """Return whether `name` is the module's name or a suffix of whole parts of it."""
    return module == name or module.endswith(f".{name}")


class Adapter(RuledSpec):
    """Small matrices A and B that are trained alongside the weights W of some layers, which stay as they are."""

    rules = (
        DocumentRule[Any](
            "targets names no layer, and targetParameters no weight",
            lambda it: (
                not it.targets
                and not it.target_parameters
                and "targets names no layer, and targetParameters no weight; name some, or leave targets out"
            ),
            "self.targets.size() > 0 || self.targetParameters.size() > 0",
        ),
        DocumentRule[Any](
            "targetParameters is for lora, rslora and qlora without dropout",
            lambda it: (
                it.target_parameters
                and (it.kind == "dora" or it.dropout)
                and f"targetParameters adds B A to weights, for which "
                f"{'kind dora' if it.kind == 'dora' else f'dropout {it.dropout:g}'} is not defined (nor in peft); use "
                "kind lora or rslora without dropout, or name linear layers in targets alone"
            ),
            "self.targetParameters.size() == 0 || (self.kind != 'dora' && self.dropout == 0.0)",
        ),
    )

    kind: Literal["lora", "rslora", "dora", "qlora"] = "lora"
    """`lora` computes W + alpha / rank × B A, and `rslora` W + alpha / sqrt(rank) × B A. `dora` is lora with the length
    of each row of the sum trained apart. `qlora` is lora alongside weights in four bits (NF4, all linear layers but the
    output head), and needs model.source.
    """
    rank: Positive = 16
    """The inner dimension of B A."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """The weight of B A, before it is divided by the rank or its root."""
    targets: Many[Text] = ("q_proj", "v_proj")
    """Names of linear layers or ends of names (`q_proj`, `self_attn.q_proj`), or `all-linear`, all but the head."""
    target_parameters: Many[Text] = ()
    """Names of weights that are no linear layer's, or ends of names: those of experts that are held together
    (`mlp.experts.gate_up_proj`, `mlp.experts.down_proj`), each of which gets matrices of its own. Only lora, rslora
    and qlora (which leaves these weights as they are), without dropout, as in `peft`.
    """
    dropout: Fraction = 0.0
    """The share of a layer's input that the adapter does not see, while training only."""
    modules_to_save: Many[Text] = ()
    """Names of modules or ends of names (`embed_tokens`, `lm_head`) that are trained whole, in fp32, alongside the
    adapter. Where embedding and head are one weight, either name trains it for both.
    """

    @field_validator("targets", "target_parameters", "modules_to_save")
    @classmethod
    def _once_each(cls, targets: tuple[Text, ...]) -> tuple[Text, ...]:
        if len(set(targets)) < len(targets):
            raise ValueError(f"names a layer twice: {', '.join(targets)}")
        if ALL_LINEAR in targets and len(targets) > 1:
            raise ValueError(f"{ALL_LINEAR} has all layers already; leave the others out: {', '.join(targets)}")
        return targets

    def saves(self, module: str) -> bool:
        """Return whether a module of this name is trained in full."""
        return any(is_named(module, name) for name in self.modules_to_save)

    def with_score_head(self) -> Adapter:
        """The same where the model scores texts: its head is new, so it is trained whole, as `peft` does it."""
        if self.saves(SCORE):
            return self
        return self.model_copy(update={"modules_to_save": (*self.modules_to_save, SCORE)})

    def adds_to(self, weight: str) -> bool:
        """Return whether a weight outside of linear layers has an adapter."""
        return any(is_named(weight, name) for name in self.target_parameters)

    @property
    def scale(self) -> float:
        """Factor that B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)

    def parameters(self, architecture: Architecture) -> int:
        """Return the number of its weights alongside a decoder of this shape."""
        ends = {target.rpartition(".")[2] for target in self.targets}
        shapes = [s for name, s in architecture.projections.items() if name in ends or ALL_LINEAR in ends]
        magnitudes = sum(outputs for outputs, _ in shapes) if self.kind == "dora" else 0
        return architecture.layers * (self.rank * sum(sum(shape) for shape in shapes) + magnitudes)
