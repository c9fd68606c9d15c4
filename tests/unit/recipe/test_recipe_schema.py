"""The CRD says what the models say, in the dialect that a real API server takes (tests/cluster asks one)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError, create_model

from muster.recipe.distillation import Teacher
from muster.recipe.document import JobSpec, parse_job
from muster.recipe.model_config import ModelConfig
from muster.recipe.schema import RULES, definition, document_schema, rules_of
from muster.words.base import dump
from muster.words.job import MUTABLE

FORBIDDEN = {"$ref", "$defs", "anyOf", "oneOf", "allOf", "additionalItems", "const", "title", "prefixItems"}

crd_schema = functools.cache(document_schema)  # to make it takes a second


def nodes(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema inside a schema."""
    yield path, schema
    for key, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{key}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


def test_the_schema_is_structural() -> None:
    typed = ("type", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields")
    for path, schema in nodes(crd_schema()):
        assert not FORBIDDEN & set(schema), path
        assert any(key in schema for key in typed), path
        assert not ("properties" in schema and "additionalProperties" in schema), path


def test_no_whole_number_is_refused_for_a_fraction_that_it_is_below() -> None:
    """An API server cuts a limit to a whole number where the value is one: it took 0 for no less than 0.5."""
    for path, schema in nodes(crd_schema()):
        limit = schema.get("maximum", 0)
        assert limit == int(limit) or not schema.get("exclusiveMaximum"), path


def test_its_defaults_are_the_models_defaults() -> None:
    """What the API server fills in is what the parser would have filled in."""

    def fill(schema: dict[str, Any], value: Any) -> Any:
        if isinstance(value, dict):
            inner = schema.get("properties", {})
            value = {**{k: s["default"] for k, s in inner.items() if "default" in s}, **value}
            return {key: fill(inner.get(key, {}), part) for key, part in value.items()}
        return [fill(schema.get("items", {}), part) for part in value] if isinstance(value, list) else value

    written = {
        "training": {
            "model": {"preset": "muster-1m"},
            "data": {"train": [{"source": "x"}]},
            "batch": {"tokensPerStep": 512},
            "length": {"steps": 1},
            "evaluation": {"every": 1, "holdout": 0.1},
        }
    }
    document = {"metadata": {"name": "x"}, "spec": written}
    filled = fill(crd_schema()["properties"]["spec"], written)
    assert filled == dump(parse_job(document).spec)


def test_what_may_not_change_is_said_for_each_key() -> None:
    rules = " ".join(rule["rule"] for rule in crd_schema()["x-kubernetes-validations"])
    for name, field in JobSpec.model_fields.items():
        assert (f"self.spec.{field.alias} == oldSelf.spec.{field.alias}" in rules) == (name not in MUTABLE), name


@pytest.mark.parametrize(("path", "rule"), [(path, rule) for path, rule, _ in RULES])
def test_rules_stand_where_they_belong(path: str, rule: str) -> None:
    schemas = dict(nodes(crd_schema()["properties"]["spec"]))
    place = f".{path}".replace(".*", "[]") if path else ""  # `*` stands for each value of a mapping
    assert rule in [entry["rule"] for entry in schemas[place]["x-kubernetes-validations"]]


def test_a_rule_is_stated_once_and_by_the_model_that_keeps_it() -> None:
    """Validator, CRD and document are made of the same list, in which no sentence stands twice for a place."""
    stated = [(path, rule.text) for path, rule in rules_of(JobSpec)]
    assert len(stated) == len(set(stated)) > 50
    assert {path for path, _ in stated} >= {
        "",
        "training",
        "training.grpo.rewardModel.from",
        "program.inputs.*",
        "gang",
    }
    assert {(path, rule.cel, rule.text) for path, rule in rules_of(JobSpec) if rule.cel} < set(RULES)


@pytest.mark.parametrize("source", [{}, {"source": "s3://models/base", "from": {"job": "a"}}])
def test_a_rule_refuses_in_its_own_words_where_it_names_no_values(source: dict[str, Any]) -> None:
    (rule,) = Teacher.rules
    with pytest.raises(ValidationError, match=re.escape(rule.text)):
        Teacher.model_validate(source)


def test_every_kind_of_model_is_one_that_kubectl_may_give() -> None:
    """A cluster's API server refuses a document whose model the rule does not count."""
    rule = next(rule for path, rule, _ in RULES if path == "training.model")
    kinds = [field.alias or name for name, field in ModelConfig.model_fields.items()]
    assert all(f"has(self.{kind})" in rule for kind in kinds), kinds


def test_kubectl_prints_the_columns_of_the_plan() -> None:
    columns = definition()["spec"]["versions"][0]["additionalPrinterColumns"]
    wide = [column["name"] for column in columns if not column.get("priority")]
    assert wide == ["Phase", "Ready", "Attempt", "Step", "Restarts", "Queue", "Age"]


def test_kubectl_explain_describes_every_field() -> None:
    """Of spec and status, down to the last; a mapping's values and a list's items have no name to explain."""

    def silent(node: dict[str, Any], path: str) -> Iterator[str]:
        for key, inner in node.get("properties", {}).items():
            if not inner.get("description"):
                yield f"{path}.{key}"
            yield from silent(inner, f"{path}.{key}")
        for inner in (node.get("items"), node.get("additionalProperties")):
            if isinstance(inner, dict):
                yield from silent(inner, f"{path}[]")

    schema = crd_schema()["properties"]
    assert [*silent(schema["spec"], "spec"), *silent(schema["status"], "status")] == []
    every = schema["spec"]["properties"]["checkpoint"]["properties"]["every"]["description"]
    assert every.startswith("Interval between checkpoints: a number of steps, a time (`10m`), or `auto`")


def test_models_elsewhere_may_have_a_fields_name() -> None:
    """OpenAI's façade has a Dpo too. Whichever of the two was found last gave its words, or none."""
    elsewhere = [create_model("Dpo", beta=(float, 1.0)) for _ in range(20)]
    training = document_schema()["properties"]["spec"]["properties"]["training"]["properties"]
    assert all(field.get("description") for field in training["dpo"]["properties"].values()), elsewhere
