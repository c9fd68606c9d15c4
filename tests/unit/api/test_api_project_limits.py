"""The API's side of the limits of a project: the table that the chart's policy is held to as well."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import AfterValidator, BaseModel
from tests.unit.api.project_limit_cases import CASES, LIMITS, OWN_SECRET, Case

from muster.api.core.cluster_objects import object_problems
from muster.api.core.limits import limit_problems, with_defaults
from muster.recipe.document import JobSpec, parse_job
from muster.words.base import InvalidDocument


def refused_at(spec: dict[str, Any]) -> list[str]:
    try:
        submission = parse_job({"metadata": {"name": "demo"}, "spec": spec})
    except InvalidDocument as invalid:
        return [problem.path for problem in invalid.problems]
    spec = with_defaults(submission.spec, LIMITS)
    problems = (*limit_problems(spec, LIMITS, "nlp"), *object_problems(spec, LIMITS, "nlp", (OWN_SECRET,)))
    return [problem.path for problem in problems]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_api_refuses_what_leaves_the_project_and_nothing_else(case: Case) -> None:
    found = refused_at(case.spec)
    assert case.refused in found if case.refused else found == []


def test_every_field_that_names_an_address_is_in_the_table() -> None:
    """So whoever adds one must say what a project's limits let it be, in Python and in the policy."""
    covered = {
        re.sub(r"\[\d+\]|(?<=\.sets)\.\w+|(?<=\.inputs)\.\w+", "", case.refused) for case in CASES if case.refused
    }
    fields = set(address_fields(JobSpec, "spec"))
    assert {"spec.checkpoint.uri", "spec.training.data.train.source"} <= fields, "the walk finds them"
    assert fields - covered == set()


def address_fields(model: type[BaseModel], at: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        place = f"{at}.{field.alias or name}"
        inner = typing.Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        if _is_address(inner):
            yield place
        for each in _models(inner):
            yield from address_fields(each, place)


def _is_address(annotation: Any) -> bool:
    metadata = getattr(annotation, "__metadata__", ())
    marks = (each.func for each in metadata if isinstance(each, AfterValidator))
    return any(getattr(mark, "__qualname__", "").startswith("address_of") for mark in marks) or any(
        _is_address(each) for each in typing.get_args(annotation)
    )


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in typing.get_args(annotation):
        yield from _models(each)
