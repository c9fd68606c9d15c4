"""A second model that a job computes forward in addition to its own: a teacher, or a reward model."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from muster.words.model_sources import FromCommit, ModelAddress
from muster.words.rules import DocumentRule, RuledSpec


def names_one(whose: str) -> DocumentRule[Any]:
    return DocumentRule(
        f"name the {whose} by exactly one of source (a model's folder) and from (a checkpoint)",
        lambda it: (it.source is None) == (it.from_ is None),
        "has(self.source) != has(self.from)",
    )


class SecondModel(RuledSpec):
    """A model's folder or a checkpoint."""

    whose: ClassVar[str]  # what it is called in messages

    source: ModelAddress | None = None
    """The address of a folder as Hugging Face writes it, as in model.source."""
    from_: FromCommit | None = Field(default=None, alias="from")
    """The checkpoint whose weights it has."""

    @property
    def words(self) -> str:
        """Return its address, for messages and comparisons."""
        if self.source is not None:
            return self.source
        assert self.from_ is not None, "a second model is a folder or a checkpoint"
        return f"{self.from_.uri or self.from_.job} step {self.from_.step}"
