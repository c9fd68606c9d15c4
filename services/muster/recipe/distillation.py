"""A second model whose predictions a job learns, in addition to the tokens of its data."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from muster.recipe.second_model import SecondModel, names_one
from muster.words.base import Spec


class Teacher(SecondModel):
    """The model that predicts: a model's folder or a checkpoint. It must have the learning model's tokenizer."""

    whose: ClassVar[str] = "teacher"
    rules = (names_one(whose),)


class Distillation(Spec):
    """Learn what a teacher predicts: (1 - weight) × cross-entropy + weight × T² × KL(teacher, student), where both
    predict at temperature T (Hinton et al. 2015, arXiv 1503.02531), over the tokens that the loss counts.
    """

    teacher: Teacher
    temperature: Annotated[float, Field(gt=0, le=1_000)] = 1.0
    """Divisor of the logits of both; larger values show more of what the teacher considers possible."""
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The teacher's share of the loss; at 1 nothing is learnt from the tokens themselves."""
