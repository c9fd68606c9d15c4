"""Runs that are made to find something out: which learning rate suits, and whether the model can learn a few samples
by heart. Each sees the loss of every step, which is the same on all ranks, so all end it alike; what it has seen is in
every commit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Final, Protocol

from muster.recipe.training import TrainingConfig
from muster.storage.opening import open_store
from muster.trainer.errors import StorageError
from muster.trainer.train.step import StepOutcome

TRIAL: Final = "trial.json"  # in the job's folder, beside the commits
SMOOTHING: Final = 0.9  # the mean goes back over about ten steps
# Of the lowest loss: beyond, all larger rates diverge too (as in fastai's lr_find).
DIVERGED: Final = 4.0
FEW: Final = 10  # steps before a mean is believed
LEARNT_SHARE: Final = 0.05  # of the first loss: what is left where samples were learnt by heart
ROWS, BAR = 20, 40


class TrainingTrial(Protocol):
    """Protocol of a trial, by which a run finds something out instead of training a model."""

    @property
    def over(self) -> bool: ...  # whether enough is known before the length is reached
    def saw(self, outcome: StepOutcome) -> None: ...
    def verdict(self) -> str: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


def trial_of(training: TrainingConfig) -> TrainingTrial | None:
    """Return the trial of a configuration; None for a run that trains a model."""
    if training.optimizer.range_test is not None:
        return RangeTest()
    if training.data.overfit is not None:
        return OverfitTrial(training.data.overfit, math.ceil(training.data.overfit / training.samples_per_step()))
    return None


def report_verdict(trial: TrainingTrial, folder: str, say: Callable[[str], None]) -> None:
    """Say it, and keep it with the numbers. A store that fails costs the file alone."""
    words = trial.verdict()
    for line in words.splitlines():
        say(line)
    try:
        open_store(folder).replace(TRIAL, json.dumps(trial.state() | {"verdict": words}, indent=1).encode())
    except StorageError as error:
        say(f"{TRIAL} could not be kept: {error}")


class RangeTest:
    """The loss at rates that grow from step to step (Smith 2017, arXiv 1506.01186)."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []  # as they were
        self._mean, self._means = 0.0, list[float]()
        self.over = False

    def saw(self, outcome: StepOutcome) -> None:
        self._add(outcome.learning_rate, outcome.loss)
        # A skipped batch is one whose numbers are unsound: so is every larger rate.
        lowest = min(self._means[FEW:], default=math.inf)
        self.over = bool(outcome.skipped) or self._means[-1] > DIVERGED * lowest > 0

    def suggested(self) -> float | None:
        """Return the rate at which the loss falls most steeply over the logarithm of the rate; None where it never
        falls."""
        lowest = min(range(len(self._means)), key=self._means.__getitem__, default=0)
        slopes = [
            (self._means[at + 1] - self._means[at - 1]) / math.log(self.rates[at + 1] / self.rates[at - 1])
            for at in range(1, min(lowest + 1, len(self._means) - 1))
        ]
        steep = [(slope, at) for at, slope in enumerate(slopes, start=1) if at >= min(FEW, lowest // 2)]
        slope, at = min(steep, default=(0.0, 0))
        return self.rates[at] if slope < 0 else None

    def verdict(self) -> str:
        if len(self._means) < 3:
            return "learning-rate range test: too few steps to tell anything; set length.steps to 100 or more"
        every = max(1, len(self._means) // ROWS)
        rows = list(zip(self.rates, self._means, strict=True))[::every]
        low, high = min(self._means), max(mean for _, mean in rows)
        lines = ["learning-rate range test: rate, loss (mean of about ten steps)"]
        lines += [f"  {rate:9.2e} {mean:9.4f} {'█' * _bar(mean, low, high)}" for rate, mean in rows]
        at_lowest = self.rates[self._means.index(low)]
        suggested = self.suggested()
        if suggested is None:
            return "\n".join(
                [*lines, "the loss falls at no rate: look at the data, or let rangeTest go from a lower one"]
            )
        ended = "; it diverges at the last rate" if self.over else ""
        said = f"steepest descent at {suggested:.2e}, lowest loss at {at_lowest:.2e}{ended}"
        return "\n".join([*lines, f"{said}. Suggested: optimizer.lr {suggested:.1e}"])

    def state(self) -> dict[str, Any]:
        return {"rates": self.rates, "losses": self.losses, "over": self.over}

    def restore(self, state: dict[str, Any]) -> None:
        for rate, loss in zip(state.get("rates", ()), state.get("losses", ()), strict=True):
            self._add(rate, loss)
        self.over = bool(state.get("over"))

    def _add(self, rate: float, loss: float) -> None:
        self.rates.append(rate)
        self.losses.append(loss)
        self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * loss
        self._means.append(self._mean / (1 - SMOOTHING ** len(self.losses)))


class OverfitTrial:
    """Trial that checks whether the loss of a few samples, seen again and again, falls to nearly nothing."""

    over = False

    def __init__(self, samples: int, steps_per_pass: int) -> None:
        self.samples, self._steps_per_pass = samples, steps_per_pass
        self.first: float | None = None
        self.last: list[float] = []  # of the last pass

    def saw(self, outcome: StepOutcome) -> None:
        self.first = outcome.loss if self.first is None else self.first
        self.last = [*self.last, outcome.loss][-self._steps_per_pass :]

    def verdict(self) -> str:
        if self.first is None:
            return "overfit: no step was made"
        now = sum(self.last) / len(self.last)
        what = f"overfit: the loss of {self.samples} samples went from {self.first:.4f} to {now:.4f}"
        if now <= LEARNT_SHARE * self.first:
            return f"{what}: they are learnt by heart, so data, loss and optimizer work together"
        return (
            f"{what}, which is not near 0 (at most {LEARNT_SHARE * self.first:.4f}). Give it more steps or a higher "
            "optimizer.lr; where that is no help, look at what is learnt: `muster data inspect --samples 2`"
        )

    def state(self) -> dict[str, Any]:
        return {"samples": self.samples, "first": self.first, "last": self.last}

    def restore(self, state: dict[str, Any]) -> None:
        self.first, self.last = state.get("first"), list(state.get("last", ()))


def _bar(value: float, low: float, high: float) -> int:
    return round(BAR * (value - low) / (high - low)) if high > low else 0
