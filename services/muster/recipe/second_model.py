"""A second model that a job computes forward in addition to its own: a teacher, or a reward model."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from muster.words.base import Spec
from muster.words.model_sources import FromCommit, ModelAddress


class SecondModel(Spec):
    """A model's folder or a checkpoint."""

    whose: ClassVar[str]  # what it is called in messages

    source: ModelAddress | None = None
    """The address of a folder as Hugging Face writes it, as in model.source."""
    from_: FromCommit | None = Field(default=None, alias="from")
    """The checkpoint whose weights it has."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.source is None) == (self.from_ is None):
            raise ValueError(exactly_one(self.whose))
        return self

    @property
    def words(self) -> str:
        """Return its address, for messages and comparisons."""
        if self.source is not None:
            return self.source
        assert self.from_ is not None, "a second model is a folder or a checkpoint"
        return f"{self.from_.uri or self.from_.job} step {self.from_.step}"


def exactly_one(whose: str) -> str:
    return f"name the {whose} by exactly one of source (a model's folder) and from (a checkpoint)"
