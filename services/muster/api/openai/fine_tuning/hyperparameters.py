"""Resolution of `"auto"`: numbers are chosen from the number of examples, and reported. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

Auto = Literal["auto"]

# How OpenAI chooses epochs, as its cookbook publishes it ("Data preparation and analysis for chat model fine-tuning"):
# three, more where that would show fewer than a hundred examples, fewer where it would show more than 25,000.
EPOCHS: Final = 3
EPOCHS_MAX: Final = 25
EXAMPLES_MIN: Final = 100
EXAMPLES_MAX: Final = 25_000
# And its batches: 0.2% of the examples (its fine-tuning guide).
BATCH_SHARE: Final = 0.002
BATCH_MAX: Final = 256
BETA: Final = 0.1  # of Rafailov et al. 2023 (arXiv 2305.18290), and dpo's default here


@dataclass(frozen=True)
class GivenHyperparameters:
    """Hyperparameters as a request has them."""

    n_epochs: int | Auto = "auto"
    batch_size: int | Auto = "auto"
    learning_rate_multiplier: float | Auto = "auto"
    beta: float | Auto | None = None  # None: not of this method, and so below
    compute_multiplier: float | Auto | None = None
    eval_interval: int | Auto | None = None
    eval_samples: int | Auto | None = None


@dataclass(frozen=True)
class ChosenHyperparameters:
    """Hyperparameters as numbers; `choices` says of each that was chosen here what it is and why."""

    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float
    beta: float | None
    choices: tuple[str, ...]
    compute_multiplier: float | None = None
    eval_interval: int | None = None  # None also where it follows from the length
    eval_samples: int | None = None


def choose(asked: GivenHyperparameters, examples: int | None, multiple: int) -> ChosenHyperparameters:
    """Return numbers for every `"auto"`. `examples` is None if they can't be counted from here, and the examples of a
    step are a `multiple` of what the gang computes in one pass."""
    epochs = _epochs(examples) if asked.n_epochs == "auto" else asked.n_epochs
    batch = _batch(examples, multiple) if asked.batch_size == "auto" else asked.batch_size
    multiplier = 1.0 if asked.learning_rate_multiplier == "auto" else asked.learning_rate_multiplier
    beta = BETA if asked.beta == "auto" else asked.beta
    chosen = ChosenHyperparameters(
        epochs,
        batch,
        multiplier,
        beta,
        (),
        1.0 if asked.compute_multiplier == "auto" else asked.compute_multiplier,
        None if asked.eval_interval == "auto" else asked.eval_interval,
        None if asked.eval_samples == "auto" else asked.eval_samples,
    )
    return replace(chosen, choices=tuple(_explain_choices(asked, chosen, examples, multiple)))


def _epochs(examples: int | None) -> int:
    if not examples:
        return EPOCHS
    if examples * EPOCHS < EXAMPLES_MIN:
        return min(EPOCHS_MAX, EXAMPLES_MIN // examples)
    if examples * EPOCHS > EXAMPLES_MAX:
        return max(1, EXAMPLES_MAX // examples)
    return EPOCHS


def _batch(examples: int | None, multiple: int) -> int:
    size = min(BATCH_MAX, max(1, round((examples or 0) * BATCH_SHARE)))
    return math.ceil(size / multiple) * multiple


def _explain_choices(
    asked: GivenHyperparameters, chosen: ChosenHyperparameters, examples: int | None, multiple: int
) -> Iterator[str]:
    seen = f"{examples:,} examples" if examples else "a number of examples that can't be counted from here"
    if asked.n_epochs == "auto":
        yield f"n_epochs {chosen.n_epochs}, for {seen}"
    if asked.batch_size == "auto":
        yield f"batch_size {chosen.batch_size}, for {seen}, in multiples of {multiple} on this model's gang"
    if asked.learning_rate_multiplier == "auto":
        yield "learning_rate_multiplier 1, the learning rate that this model is mapped with"
    if asked.beta == "auto":
        yield f"beta {chosen.beta:g}"
    if asked.compute_multiplier == "auto":
        yield "compute_multiplier 1, the answers to a prompt that this model is mapped with"
