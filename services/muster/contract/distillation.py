"""A second model whose predictions a job learns, beside the tokens of its data."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from muster.contract.base import Spec
from muster.contract.model_config import FromCommit, ModelAddress


class Teacher(Spec):
    """The model that predicts: a model's folder or a commit. It must have the tokenizer of the model that learns."""

    source: ModelAddress | None = None
    """The address of a folder as Hugging Face writes it, as in model.source."""
    from_: FromCommit | None = Field(default=None, alias="from")
    """The commit whose weights it has."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.source is None) == (self.from_ is None):
            raise ValueError("name the teacher by exactly one of source (a model's folder) and from (a commit)")
        return self

    @property
    def words(self) -> str:
        """Its address, for messages and to compare by."""
        if self.source is not None:
            return self.source
        assert self.from_ is not None, "a teacher is a folder or a commit"
        return f"{self.from_.uri or self.from_.job} step {self.from_.step}"


class Distillation(Spec):
    """Learn what a teacher predicts: (1 - weight) × cross-entropy + weight × T² × KL(teacher, student), where both
    predict at temperature T (Hinton et al. 2015, arXiv 1503.02531), over the tokens that the loss counts.
    """

    teacher: Teacher
    temperature: Annotated[float, Field(gt=0, le=1_000)] = 1.0
    """What the logits of both are divided by; larger values show more of what the teacher holds possible."""
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The teacher's share of the loss; at 1 nothing is learnt from the tokens themselves."""
