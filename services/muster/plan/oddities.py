"""Settings that are allowed and seldom meant."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from muster.recipe.data_config import WEIGHT_SHARE_ODD
from muster.words.text import plural

if TYPE_CHECKING:
    from muster.recipe.training import TrainingConfig


def oddities_of(
    training: TrainingConfig, steps: int | None = None, about: str = "about "
) -> tuple[tuple[str, str], ...]:
    """Return the warnings, as (path, text), about settings that are allowed and seldom meant. `steps` are those of a
    run whose length the data decides; `about` precedes them, and is empty where they are exact."""
    schedule = training.optimizer.schedule
    if (planned := training.known_steps()) is not None:
        steps, about = planned, ""
    pairs = []
    if steps is not None and schedule.warmup_steps >= steps:
        pairs.append(
            (
                "optimizer.schedule.warmupSteps",
                f"{plural(schedule.warmup_steps, 'step')} of warm-up are all of the {about}{plural(steps, 'step')} of "
                f"the run: the learning rate ends at {training.optimizer.lr * steps / schedule.warmup_steps:.3g} and "
                "never decays",
            )
        )
    elif steps == 1 and schedule.name not in ("constant", "inverse_sqrt") and schedule.min_ratio < 1:
        pairs.append(
            (
                "length",
                f"the run has one step, which is the last of schedule {schedule.name}: it is made at minRatio × lr "
                f"= {schedule.min_ratio * training.optimizer.lr:.3g}",
            )
        )
    if training.data.in_epochs:
        pairs += [
            (
                f"data.train[{number}].weight",
                f"{source.weight:g} is {source.weight:g} samples for each one of all sources with epochs; 0.05 to "
                "0.25 is usual to keep what a model knows",
            )
            for number, source in enumerate(training.data.train)
            if source.epochs is None and source.weight >= 1
        ]
        return tuple(pairs)
    total = math.fsum(source.weight for source in training.data.train)
    pairs += [
        (
            f"data.train[{number}].weight",
            f"{source.weight:g} is {source.weight / total:.1g} of all weights: an epoch takes at least "
            f"{total / source.weight:,.0f} times this source's samples",
        )
        for number, source in enumerate(training.data.train)
        if source.weight / total < WEIGHT_SHARE_ODD
    ]
    return tuple(pairs)
