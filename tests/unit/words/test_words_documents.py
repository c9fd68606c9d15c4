"""Every refusal is in words of YAML and JSON, whatever is wrong and wherever; none speaks of Python's types."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from muster.recipe.document import parse_job
from muster.recipe.schema import document_schema
from muster.words.base import DocumentProblem, InvalidDocument, Many, Spec, parse


class Inner(Spec):
    a: int = 0


class Everything(Spec):
    truth: bool = False
    whole: int = 0
    number: float = 0.0
    text: str = ""
    items: Many[int] = ()
    pair: tuple[int, int] = Field(default=(0, 0), strict=False)
    mapping: dict[str, int] = Field(default_factory=dict)
    inner: Inner = Inner()
    word: Literal["fast", "slow"] = "fast"
    above: Annotated[int, Field(gt=10)] = 11
    from_ten: Annotated[int, Field(ge=10)] = 10
    below: Annotated[float, Field(lt=10)] = 1.0
    to_ten: Annotated[int, Field(le=10_000)] = 1
    short: Annotated[str, Field(min_length=2, max_length=3)] = "ab"
    few: Annotated[Many[int], Field(min_length=1, max_length=2)] = (1,)
    name: Annotated[str, Field(pattern="^[a-z]+$")] = "a"
    maybe: int | None = None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("truth", "yes", "must be true or false, not text ('yes')"),
        ("truth", 1, "must be true or false, not 1"),
        ("whole", "2", "must be a whole number, not text ('2')"),
        ("whole", True, "must be a whole number, not true"),
        ("whole", 1.5, "must be a whole number, not 1.5"),
        ("whole", None, "must be a whole number, not nothing"),
        ("number", "1e-4", "must be a number, not text ('1e-4')"),
        ("number", float("nan"), "must be a finite number, not nan"),
        ("text", 5, "must be text, not 5"),
        ("text", {}, "must be text, not a mapping"),
        ("items", {}, "must be a list, not a mapping"),
        ("items", "abc", "must be a list, not text ('abc')"),
        ("pair", 3, "must be a list, not 3"),
        ("mapping", [], "must be a mapping of keys to values, not a list"),
        ("inner", 3, "must be a mapping of keys to values, not 3"),
        ("inner", [], "must be a mapping of keys to values, not a list"),
        ("word", "fsat", "must be 'fast' or 'slow', not text ('fsat')"),
        ("above", 10, "must be greater than 10, not 10"),
        ("fromTen", 9, "must be at least 10, not 9"),
        ("below", 10.0, "must be less than 10, not 10.0"),
        ("toTen", 10_001, "must be at most 10,000, not 10001"),
        ("short", "a", "must have at least 2 characters, not text ('a')"),
        ("short", "abcd", "must have at most 3 characters, not text ('abcd')"),
        ("few", [], "must have at least 1 item, not 0"),
        ("few", [1, 2, 3], "must have at most 2 items, not 3"),
        ("name", "A", "must look like ^[a-z]+$, not text ('A')"),
        ("maybe", "x", "must be a whole number, not text ('x')"),
        ("nothing", 1, "unknown key"),
    ],
)
def test_words(key: str, value: object, message: str) -> None:
    with pytest.raises(InvalidDocument) as refused:
        parse(Everything, {key: value})
    (problem,) = refused.value.problems
    assert (problem.path, problem.message) == (key, message)


def test_a_list_of_a_fixed_length() -> None:
    with pytest.raises(InvalidDocument) as refused:
        parse(Everything, {"pair": [1]})
    assert refused.value.problems == (DocumentProblem("pair[1]", "is required"),)


TRAINING: dict[str, Any] = {
    "model": {"preset": "muster-1m"},
    "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 256},
    "batch": {"tokensPerStep": 16_384, "microBatch": 8},
    "length": {"steps": 200},
}
WRONG = (None, "x", "", -1, 0, 1.5, True, [], {}, ["x"], {"x": 1}, 10**18, 1e308, "²", "a\nb")
PYTHONS = re.compile(r"(?i)dictionary|instance of|tuple|input should|NoneType|valid (integer|string|number)|\bdict\b")


def places(schema: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path] if path else []
    for key, inner in schema.get("properties", {}).items():
        found += places(inner, (*path, key))
    return found


def document(path: tuple[str, ...], value: object) -> dict[str, Any]:
    spec: dict[str, Any] = {"training": TRAINING}
    here = spec
    for key in path[:-1]:
        inner = here.get(key)
        here[key] = dict(inner) if isinstance(inner, dict) else {}
        here = here[key]
    here[path[-1]] = value
    return {"metadata": {"name": "a"}, "spec": spec}


@pytest.mark.parametrize("path", places(document_schema()["properties"]["spec"]), ids=".".join)
def test_no_refusal_of_any_key_speaks_of_python(path: tuple[str, ...]) -> None:
    for value in WRONG:
        try:
            parse_job(document(path, value))
        except InvalidDocument as invalid:
            for problem in invalid.problems:
                assert not PYTHONS.search(problem.message), problem
                assert "literal[" not in problem.path, problem
                assert len(str(problem)) < 1_000


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("gang.nodes", "four", "must be a whole number, or a mapping with min and max, not 'four'"),
        ("gang.nodes", 0, "must be at least 1 and at most 10,000, not 0"),
        ("gang.processesPerNode", 100_000, "must be at most 1,024, not 100000"),
        ("gang.resources.memory", "1Gigs", "must be a Kubernetes quantity (90, 500m, 900Gi), not '1Gigs'"),
        ("gang.resources.memory", "٣Gi", "must be a Kubernetes quantity (90, 500m, 900Gi), not '٣Gi'"),
        ("checkpoint.every", "１0m", "must be a number with a unit s, m or h (`10m`), not '１0m'"),
        ("training.optimizer.weightDecay", 1e308, "must be at most 10, not 1e+308"),
    ],
)
def test_what_nobody_means_is_refused(path: str, value: object, message: str) -> None:
    with pytest.raises(InvalidDocument) as refused:
        parse_job(document(tuple(path.split(".")), value))
    (problem,) = refused.value.problems
    assert (problem.path, problem.message) == (f"spec.{path}", message)


@pytest.mark.parametrize(
    "labels", [{"team/": "a"}, {"-a": "b"}, {"Ex.com/a": "b"}, {"a": "b c"}, {"a": "é"}, {"a": "b-"}, {"": ""}]
)
def test_labels_that_kubernetes_refuses_are_refused(labels: dict[str, str]) -> None:
    with pytest.raises(InvalidDocument, match=r"metadata\.labels\..*must be at most 63 letters"):
        parse_job({"metadata": {"name": "a", "labels": labels}, "spec": {"training": TRAINING}})
