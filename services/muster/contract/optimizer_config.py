"""How a training changes weights by gradients: the optimizer and the schedule of its learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from muster.contract.base import Spec
from muster.contract.fields import Count, Fraction


class Schedule(Spec):
    """Warm-up, then `cosine`, `linear`, `wsd` (constant, then linear over the last decayFraction) or `constant`."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """What the learning rate does after the warm-up."""
    warmup_steps: Count = 0
    """Steps in which the learning rate rises from zero."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The learning rate of the last step, as a share of the highest."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The share of all steps in which `wsd` falls."""


class OptimizerConfig(Spec):
    """How weights are changed by gradients."""

    name: Literal["adamw"] = "adamw"
    """The optimizer."""
    lr: Annotated[float, Field(gt=0, lt=10)] = 3e-4
    """The highest learning rate of the schedule."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), strict=False)
    """AdamW's decay of its means of gradients and of squared gradients."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """What AdamW adds to the root of the squared gradients' mean."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1  # more would turn weights over at any lr of use
    """The share of the learning rate by which weights shrink at each step; norms and biases are spared."""
    clip_norm: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    """The largest norm of the gradient; a longer one is scaled down to it. 0 does not clip."""
    schedule: Schedule = Schedule()
