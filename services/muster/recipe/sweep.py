"""A sweep: many jobs of one document, which differ in a few fields, and the best of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from muster.recipe.evaluation_config import Better
from muster.words.base import DocumentProblem, InvalidDocument, Many, Spec, parse
from muster.words.fields import Positive, Seed, Text
from muster.words.names import JOB_NAME

TRIALS_MAX: Final = 1_000
PARAMETERS_MAX: Final = 32
VALUES_MAX: Final = 1_000
NAME_LENGTH_MAX: Final = 43  # of a sweep: its trials are called `<name>-<number>`, and a job's name has 48 characters
_PATH: Final = re.compile(r"[A-Za-z0-9_-]+(\[\d{1,4}\])*(\.[A-Za-z0-9_-]+(\[\d{1,4}\])*)*")
# What trials are compared by, what ends a job, and where values may be secrets.
_FIXED: Final = {
    "training.evaluation": "is what trials are compared by, so it is the same in all of them",
    "suspend": "is for one job: `muster suspend` asks for it",
    "cancel": "is for one job: `muster cancel` asks for it",
    "runtime.env": "may hold secrets, and a sweep shows its parameters; keep it the same in all trials",
    "runtime.envFrom": "names secrets, and a sweep shows its parameters; keep it the same in all trials",
}

Number = int | float


class Parameter(Spec):
    """Values that a field of the job's spec is tried with: a list, or a range from `min` to `max`."""

    values: Annotated[Many[Any], Field(min_length=1, max_length=VALUES_MAX)] | None = None
    """The values that are tried."""
    min: Number | None = None
    """The least value. Where both ends are whole numbers, only whole numbers are tried: write 1.0 for any number."""
    max: Number | None = None
    """The greatest value."""
    log: bool = False
    """Whether orders of magnitude are equally likely, rather than values: for learning rates and the like."""

    @model_validator(mode="after")
    def _is_values_or_range(self) -> Self:
        if (self.values is None) == (self.min is None and self.max is None):
            raise ValueError("give either values, or min and max")
        if self.values is not None:
            if self.log:
                raise ValueError("log is for min and max: values are tried as they are")
            if len({json.dumps(value, sort_keys=True) for value in self.values}) < len(self.values):
                raise ValueError("values: one of them is given twice, and would be tried twice")
            return self
        if self.min is None or self.max is None:
            raise ValueError("a range has two ends: give min and max")
        if self.min >= self.max:
            raise ValueError(f"min {self.min} must be less than max {self.max}")
        if self.log and self.min <= 0:
            raise ValueError(f"log needs a min above 0, not {self.min}: 0 is infinitely many orders of magnitude away")
        return self

    @property
    def is_whole(self) -> bool:
        """Return whether only whole numbers of the range are tried."""
        return isinstance(self.min, int) and isinstance(self.max, int)


class SweepMetric(Spec):
    """Metric that trials are compared by."""

    name: Text = "loss"
    """`loss`, or the name of any other metric that the evaluations report, such as `code/loss` or `perplexity`. It
    takes the place of training.evaluation.metric, so that each trial's best checkpoint is judged by it too.
    """
    better: Better | None = None
    """Whether a lower or a higher value is better, where the name does not say so."""


class Asha(Spec):
    """Asynchronous successive halving (Li et al. 2020, arXiv:1810.05934), the variant that stops: at the steps
    minSteps, minSteps × factor, minSteps × factor² … a trial goes on only if its metric is among the best n/factor of
    the n trials that have come so far.
    """

    kind: Literal["asha"] = "asha"
    min_steps: Positive
    """The steps that each trial is given before it may be stopped; a multiple of training.evaluation.every."""
    factor: Annotated[int, Field(ge=2, le=100)] = 3
    """One of so many trials goes on at each of these steps."""


class Sweep(Spec):
    """Sweep over a job document: its trials, how many run at once, and early stopping."""

    parameters: Annotated[dict[str, Parameter], Field(min_length=1, max_length=PARAMETERS_MAX)]
    """Parameters to try, by the path of the field in the job's spec, such as `training.optimizer.lr`."""
    search: Literal["grid", "random"] = "random"
    """`grid` tries every combination of the values, `random` as many as `trials` says, drawn at random."""
    trials: Annotated[int, Field(gt=0, le=TRIALS_MAX)] | None = None
    """Number of jobs that a random search creates."""
    seed: Seed = 0
    """Seed of a random search: the same seed gives the same trials."""
    concurrency: Annotated[int, Field(gt=0, le=TRIALS_MAX)] = 4
    """Maximum number of trials at once."""
    metric: SweepMetric | None = None
    """Metric by which trials are compared; left out, training.evaluation.metric."""
    stopping: Asha | None = None
    """Rule for stopping a trial before its end; left out, never."""

    @model_validator(mode="after")
    def _paths_can_be_set(self) -> Self:
        for path in self.parameters:
            if not _PATH.fullmatch(path):
                raise ValueError(
                    f"parameters.{path[:200]}: is no path of the job's spec, such as training.optimizer.lr"
                )
            for fixed, why in _FIXED.items():
                if _within(path, fixed) or _within(fixed, path):
                    raise ValueError(f"parameters.{path}: {fixed} {why}")
        for inner in self.parameters:
            if outer := next((path for path in self.parameters if path != inner and _within(inner, path)), None):
                raise ValueError(
                    f"parameters.{inner}: lies within {outer}, which is a parameter itself; give one of them"
                )
        return self

    @model_validator(mode="after")
    def _can_be_searched(self) -> Self:
        ranges = [path for path, parameter in self.parameters.items() if parameter.values is None]
        if self.search == "grid":
            if ranges:
                raise ValueError(
                    f"parameters.{ranges[0]}: a grid needs values, and a range has none; take search: random"
                )
            if self.trials is not None:
                raise ValueError(f"trials: a grid tries all its {self.combinations:,} combinations; leave trials out")
            if (self.combinations or 0) > TRIALS_MAX:
                raise ValueError(
                    f"parameters: a grid of {self.combinations:,} combinations is more than {TRIALS_MAX:,} trials; "
                    "give fewer values, or take search: random"
                )
            return self
        if self.trials is None:
            raise ValueError("trials: is required: a random search makes so many jobs")
        if self.combinations is not None and self.trials > self.combinations:
            raise ValueError(
                f"trials: there are only {self.combinations:,} different combinations; ask for no more, or take "
                "search: grid"
            )
        return self

    @property
    def combinations(self) -> int | None:
        """Return the number of different trials that are possible; None if it is practically unlimited."""
        if any(parameter.values is None and not parameter.is_whole for parameter in self.parameters.values()):
            return None
        return math.prod(_choices(parameter) for parameter in self.parameters.values())

    @property
    def size(self) -> int:
        """Return the number of trials."""
        return self.trials if self.trials is not None else self.combinations or 0


def _choices(parameter: Parameter) -> int:
    if parameter.values is not None:
        return len(parameter.values)
    assert parameter.min is not None
    assert parameter.max is not None
    return int(parameter.max - parameter.min) + 1


def _within(path: str, outer: str) -> bool:
    return path == outer or path.startswith((f"{outer}.", f"{outer}["))


def parse_sweep(document: object) -> tuple[Sweep, dict[str, Any]]:
    """A sweep's document: what to try, and the job's document that is left without it.

    Raises InvalidDocument with the path of every fault of the sweep; those of the job are found with its trials.
    """
    if not isinstance(document, Mapping) or "sweep" not in document:
        words = "is required: what to try, above a job's `spec`; `muster submit` sends a job alone"
        raise InvalidDocument((DocumentProblem("sweep", words),))
    template = {str(key): value for key, value in document.items() if key != "sweep"}
    faults: list[DocumentProblem] = []
    metadata = template.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not JOB_NAME.fullmatch(name) or len(name) > NAME_LENGTH_MAX:
        rule = f"lower-case letters, digits and dashes, starting with a letter, at most {NAME_LENGTH_MAX} characters"
        faults.append(
            DocumentProblem("metadata.name", f"must be {rule}, for its number comes after it, not {name!r}"[:300])
        )
    try:
        sweep = parse(Sweep, document["sweep"], "sweep")
    except InvalidDocument as invalid:
        raise InvalidDocument([*faults, *map(_placed, invalid.problems)], invalid.count + len(faults)) from None
    if faults:
        raise InvalidDocument(faults)
    return sweep, template


def _placed(problem: DocumentProblem) -> DocumentProblem:
    """The field that a validator of the whole sweep names is the fault's place."""
    field, colon, words = problem.message.partition(": ")
    if problem.path != "sweep" or not colon or not re.match(r"(parameters|trials)\b", field):
        return problem
    return DocumentProblem(f"sweep.{field}", words)


class SweepPhase(StrEnum):
    """State of a sweep."""

    RUNNING = "Running"
    STOPPING = "Stopping"  # it was cancelled, and its jobs end
    SUCCEEDED = "Succeeded"  # all trials have ended, and one is the best
    FAILED = "Failed"  # all trials have ended, and none reported the metric
    CANCELLED = "Cancelled"

    @property
    def terminal(self) -> bool:
        return self not in (SweepPhase.RUNNING, SweepPhase.STOPPING)
