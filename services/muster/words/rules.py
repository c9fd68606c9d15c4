"""Rules that the parts of a document keep together, each stated once.

A model lists its rules as `rules`. What follows from the list: the model refuses a document that breaks a rule; the CRD
has the rule, too, where CEL can say it (`recipe.schema`); and docs/job.md states it at the model's section.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import model_validator

from muster.words.base import Spec

M = TypeVar("M")


@dataclass(frozen=True)
class DocumentRule(Generic[M]):
    """One rule of a model.

    `text` states it, for documentation and for kubectl. `fault` returns what is wrong with an instance, in words that
    name its values, or nothing; True stands for `text`. `cel` says the same of the object as CEL reads it; empty where
    CEL can't.
    """

    text: str
    fault: Callable[[M], str | bool | None]
    cel: str = ""


def refused_by(check: Callable[[], object]) -> str | None:
    """Return the words with which `check` refuses by a ValueError; None if it does not."""
    try:
        check()
    except ValueError as error:
        return str(error)
    return None


class RuledSpec(Spec):
    """Base of documents whose parts must agree. The first rule that is broken refuses."""

    rules: ClassVar[tuple[DocumentRule[Any], ...]] = ()

    @model_validator(mode="after")
    def _keeps_its_rules(self) -> Self:
        for rule in self.rules:
            if fault := rule.fault(self):
                raise ValueError(rule.text if fault is True else fault)
        return self
