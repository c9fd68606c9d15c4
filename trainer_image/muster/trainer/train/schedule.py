"""The learning rate as a pure function of the step; nothing to save, nothing to restore."""

from __future__ import annotations

import math

from muster.recipe.optimizer_config import OptimizerConfig
from muster.recipe.training import Length, TrainingConfig

INVERSE_SQRT_STEPS = 10_000  # that the root counts from where there is no warm-up, as in transformers


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of optimizer step `step` (1 is the first) of `steps`.

    Linear warm-up reaches the peak at step warmup_steps; then the decay ends at min_ratio x peak on the last step
    (`constant` does not decay; `wsd` decays linearly over the last decay_fraction of all steps, arXiv 2404.06395;
    `inverse_sqrt` and `cosine_with_restarts` are those of transformers, but for min_ratio). A range test has a
    course of its own.
    """
    schedule = config.schedule
    if config.range_test is not None:
        lowest, highest = config.range_test.lowest, config.range_test.highest
        return float(lowest * (highest / lowest) ** ((step - 1) / max(1, steps - 1)))
    if step <= schedule.warmup_steps:
        return config.lr * step / schedule.warmup_steps
    start = schedule.warmup_steps
    if schedule.name == "inverse_sqrt":
        scale = start or INVERSE_SQRT_STEPS
        return config.lr * max(schedule.min_ratio, math.sqrt(scale / (step - start + scale)))
    if schedule.name == "wsd":
        start = max(start, steps - round(steps * schedule.decay_fraction))
    done = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
    if schedule.name == "constant":
        return config.lr
    if schedule.name == "cosine_with_restarts" and done < 1.0:
        done = schedule.cycles * done % 1.0
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if schedule.name.startswith("cosine") else 1.0 - done
    return config.lr * (schedule.min_ratio + (1.0 - schedule.min_ratio) * left)


def total_steps(training: TrainingConfig, samples_per_epoch: int) -> int:
    """Optimizer steps of the whole job, rounded up to whole steps."""
    length: Length = training.length
    if length.steps is not None:
        return length.steps
    if length.tokens is not None:
        return math.ceil(length.tokens / training.batch.tokens_per_step)
    assert length.epochs is not None, "Length has exactly one of steps, tokens, epochs"
    return math.ceil(length.epochs * samples_per_epoch / training.samples_per_step())
