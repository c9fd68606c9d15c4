"""Optimizer and learning rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from muster.recipe.parameter_names import NamePatterns
from muster.words.base import Many, Spec
from muster.words.fields import Count, Fraction

Rate = Annotated[float, Field(gt=0, lt=10)]
WeightDecay = Annotated[float, Field(ge=0, le=10)]  # more would turn weights over at any lr of use


class Schedule(Spec):
    """Warm-up, then a decay."""

    name: Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt", "cosine_with_restarts"] = "cosine"
    """Course of the learning rate after the warm-up. `wsd` is constant, then linear over the last decayFraction.
    `inverse_sqrt` falls with the root of the step, counted from the warm-up's length (10,000 without one), and never
    below minRatio. `cosine_with_restarts` is as many cosines as there are cycles.
    """
    warmup_steps: Count = 0
    """Steps in which the learning rate rises from zero."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The learning rate of the last step, as a share of the highest."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The share of all steps in which `wsd` falls."""
    cycles: Annotated[int, Field(gt=0, le=1_000_000)] = 1
    """Number of times that `cosine_with_restarts` falls."""

    @model_validator(mode="after")
    def _cycles_are_of_restarts(self) -> Self:
        if self.cycles > 1 and self.name != "cosine_with_restarts":
            raise ValueError(f"cycles is for name: cosine_with_restarts, not {self.name}")
        return self


class Ema(Spec):
    """An exponential moving average of the trained weights, in fp32: each step mixes 1 - decay of the weights in."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """The share that stays at each step. The first steps keep less, (1 + step) / (10 + step), so that the weights from
    before training are soon forgotten.
    """


class ParameterGroup(Spec):
    """Parameters that learn in another way than the rest."""

    parameters: Annotated[NamePatterns, Field(min_length=1)]
    """Patterns of parts of the parameters' names: `embed_tokens`, `layers.[0-3]`, `lora_B`. Each must match one."""
    lr: Rate | None = None
    """Highest learning rate of the group, which follows the same schedule; left out, optimizer.lr."""
    weight_decay: WeightDecay | None = None
    """Weight decay of the group, except norms and biases; left out, optimizer.weightDecay."""

    @model_validator(mode="after")
    def _differs(self) -> Self:
        if self.lr is None and self.weight_decay is None:
            raise ValueError("gives its parameters neither lr nor weightDecay of their own; give one, or leave it out")
        return self


class RangeTest(Spec):
    """Rates that grow evenly by their logarithm, from the first step to the last of the job's length."""

    lowest: Rate = 1e-7
    """The rate of the first step."""
    highest: Rate = 1.0
    """The rate of the last step, which is not reached where the loss diverges before."""

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.lowest >= self.highest:
            raise ValueError(f"lowest {self.lowest:g} is not below highest {self.highest:g}")
        return self


class OptimizerConfig(Spec):
    """Optimizer of the weights."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw` keeps both moments in fp32. `adamw8bit` keeps them in eight bits wherever a weight has rows of whole
    blocks of 64 values, and at least 4,096 values: they take a quarter of the memory, and of the bytes in a checkpoint.
    """
    lr: Rate = 3e-4
    """The highest learning rate of the schedule."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), strict=False)
    """AdamW's decay of its means of gradients and of squared gradients."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Constant that AdamW adds to the root of the squared gradients' mean."""
    weight_decay: WeightDecay = 0.1
    """The share of the learning rate by which weights shrink at each step; norms and biases are spared."""
    clip_norm: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    """The largest norm of the gradient; a longer one is scaled down to it. 0 does not clip."""
    skip_spikes: bool = False
    """Whether a batch is skipped whose gradient, as clipped by clipNorm, is far larger than those of the last 128
    batches (ten robust deviations, and three times the usual norm); at most three in a row. Left out, every batch with
    a finite loss and gradient is learnt from: rare, hard data have large gradients too.
    """
    schedule: Schedule = Schedule()
    master_weights: bool = True
    """Whether the weights are kept in fp32 where the precision is bf16. Without them, weights and gradients are bf16
    alone, and each update is rounded up or down at random, so that small ones are not lost.
    """
    offload: bool = False
    """Whether the optimizer's state lies in the host's memory, and visits the GPU a few rows at a time for each update.
    It is slower by the time that the state takes over the bus and back; on a CPU it changes nothing.
    """
    ema: Ema | None = None
    """The mean of the weights over the last steps, which is kept alongside them and exported with `--ema`; left out,
    none.
    """
    groups: Annotated[Many[ParameterGroup], Field(max_length=32)] = ()
    """Parameters with a learning rate or weight decay of their own. No two groups may name one parameter."""
    range_test: RangeTest | None = None
    """Looks for a learning rate instead of training with one: lr and schedule are not used, and the job ends with a
    table and a suggestion in its log. Left out, it trains.
    """
