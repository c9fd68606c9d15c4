"""Verifiers: programs that score the answers of a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Self

from pydantic import Field, field_validator, model_validator

from muster.recipe.curation import matcher
from muster.words.base import Many, Spec
from muster.words.fields import Text

# What is reported of the answers of a set, beside the mean score of each verifier.
ANSWER_METRICS: Final = ("score", "finished", "answer_tokens")
# How a program that is stopped ends, as in `unit_tests/out_of_time`: the share of answers whose program ended so.
OUT_OF_TIME: Final = "out_of_time"
OUT_OF_MEMORY: Final = "out_of_memory"
LIMITS: Final = (OUT_OF_TIME, OUT_OF_MEMORY)
_TAKEN: Final = frozenset({*ANSWER_METRICS, "loss", "perplexity", "bits_per_byte", "sources", "rewards", "logps", "kl"})


class ExactMatch(Spec):
    """1 where the answer is the reference, but for white space around it, else 0."""

    column: Text = "answer"
    """The column of the record that holds the reference."""
    ignore_case: bool = False
    """Whether upper and lower case are alike."""
    after: Text | None = None
    """Compare only what follows the last place where the answer says this, such as `####`."""


class Regex(Spec):
    """1 where a regular expression is found in the answer, else 0. It is one of Rust's regex crate: linear in time, no
    look-around and no backreferences."""

    pattern: Text | None = None
    """The expression for all answers."""
    column: Text | None = None
    """The column of the record that holds the expression for its answer."""

    @field_validator("pattern")
    @classmethod
    def _is_one(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            matcher(pattern)
        return pattern

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.pattern is None) == (self.column is None):
            raise ValueError("give exactly one of pattern (for all answers) and column (of the record)")
        return self


class JsonSchema(Spec):
    """1 where the answer is JSON that a schema accepts, alone or as its last fenced block, else 0. `pattern` in a
    schema is an expression of Rust's regex crate, and a `$ref` to elsewhere is refused."""

    schema_: Annotated[str, Field(min_length=2, max_length=20_000)] | None = Field(default=None, alias="schema")
    """The schema for all answers, as JSON text."""
    column: Text | None = None
    """The column of the record that holds the schema for its answer."""

    @field_validator("schema_")
    @classmethod
    def _is_json(cls, schema: str | None) -> str | None:
        try:
            if schema is not None and not isinstance(json.loads(schema), dict | bool):
                raise ValueError("is JSON, but no schema: that is an object")
        except json.JSONDecodeError as error:
            raise ValueError(f"is not valid JSON: {error}") from None
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        return schema

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.schema_ is None) == (self.column is None):
            raise ValueError("give exactly one of schema (for all answers) and column (of the record)")
        return self


class NumericAnswer(Spec):
    """1 where the last number in the answer is the reference, within the tolerances, else 0."""

    column: Text = "answer"
    """The column of the record that holds the number, or text whose last number it is."""
    tolerance: Annotated[float, Field(ge=0)] = 0.0
    """Absolute difference that is allowed."""
    relative_tolerance: Annotated[float, Field(ge=0, lt=1)] = 1e-6
    """Relative difference from the reference that is allowed."""
    after: Text | None = None
    """Look only behind the last place where the answer says this, such as `####`."""


class UnitTests(Spec):
    """1 where the Python program in the answer (its last fenced block, or all of it) runs and so do the tests behind
    it, else 0. They run in a process of their own without network, files or other processes."""

    column: Text = "tests"
    """The column of the record that holds the tests: Python that raises where one fails."""
    timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 10.0
    """After so long the process is killed, and the score is 0."""
    memory_megabytes: Annotated[int, Field(ge=64, le=65_536)] = 512
    """The address space of the process, Python's own included."""


class Verifier(Spec):
    """One way to score an answer between 0 and 1: exactly one of its kinds, and what its score weighs."""

    exact_match: ExactMatch | None = None
    regex: Regex | None = None
    json_schema: JsonSchema | None = None
    numeric_answer: NumericAnswer | None = None
    unit_tests: UnitTests | None = None
    name: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9_-]{0,39}$")] | None = None
    """Name of its score in metrics; left out, its kind, as in `exact_match`."""
    weight: Annotated[float, Field(ge=-1_000, le=1_000)] = 1.0
    """Factor of its score in the sum of all."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            names = ", ".join(str(type(self).model_fields[name].alias) for name in KINDS)
            raise ValueError(f"give exactly one of {names}, as in `exactMatch: {{}}` (given: {len(given)})")
        if self.called in _TAKEN:
            raise ValueError(f"name {self.called} is that of another metric; choose another")
        return self

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def called(self) -> str:
        """Return the name of its score in metrics."""
        return self.name or self.kind

    @property
    def column(self) -> str | None:
        """The column of a record that it reads; None where it needs none."""
        settings: ExactMatch | Regex | JsonSchema | NumericAnswer | UnitTests = getattr(self, self.kind)
        return settings.column


KINDS: Final = ("exact_match", "regex", "json_schema", "numeric_answer", "unit_tests")

Verifiers = Annotated[Many[Verifier], Field(min_length=1, max_length=16)]


def must_differ(verifiers: Sequence[Verifier]) -> None:
    """Raises ValueError where two of them have one name."""
    names = [each.called for each in verifiers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two verifiers are called {twice[0]}; give one of them a name")


def score_metrics(verifiers: Sequence[Verifier]) -> Iterator[str]:
    """The names of what is reported of answers that these verifiers score."""
    yield from (each.called for each in verifiers)
    yield from ANSWER_METRICS
    yield from limit_metrics(verifiers)


def limit_metrics(verifiers: Sequence[Verifier]) -> Iterator[str]:
    """The names of what is reported of programs that reached a limit."""
    for each in verifiers:
        if each.unit_tests is not None:
            yield from (f"{each.called}/{limit}" for limit in LIMITS)
