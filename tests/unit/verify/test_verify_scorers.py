"""Verifiers: what each says of an answer, and of a record that it can't score by."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.recipe.verifiers import Verifier
from muster.trainer.verify.scorers import ModelCompletion, scorer
from muster.words.base import InvalidDocument, parse

OBJECT = json.dumps({"type": "object", "required": ["a"], "properties": {"a": {"type": "string", "pattern": "^x+$"}}})


def score(document: dict[str, Any], text: str, **columns: Any) -> float:
    made = scorer(parse(Verifier, document))
    made.check(columns)
    return made.score(ModelCompletion("asked", text, columns)).value


@pytest.mark.parametrize(
    ("verifier", "text", "columns", "expected"),
    [
        ({"exactMatch": {}}, " Paris\n", {"answer": "Paris"}, 1),
        ({"exactMatch": {}}, "paris", {"answer": "Paris"}, 0),
        ({"exactMatch": {"ignoreCase": True}}, "PARIS", {"answer": "paris"}, 1),
        ({"exactMatch": {"column": "n"}}, "42", {"n": 42}, 1),
        ({"exactMatch": {"after": "####"}}, "it is 3 #### 4 #### 5", {"answer": "5"}, 1),
        ({"exactMatch": {"after": "####"}}, "5", {"answer": "5"}, 0),
        ({"regex": {"pattern": r"^\d{3}$"}}, "123", {}, 1),
        ({"regex": {"pattern": r"^\d{3}$"}}, "1234", {}, 0),
        ({"regex": {"column": "wanted"}}, "so it is blue", {"wanted": "red|blue"}, 1),
        ({"numericAnswer": {}}, "3 apples and 4 make 7.", {"answer": "7"}, 1),
        ({"numericAnswer": {}}, "It costs 1,234.50 dollars", {"answer": 1234.5}, 1),
        ({"numericAnswer": {}}, "-3", {"answer": "3"}, 0),
        ({"numericAnswer": {}}, "6.02e23", {"answer": "The answer is 6.02e+23"}, 1),
        ({"numericAnswer": {}}, "none at all", {"answer": "0"}, 0),
        ({"numericAnswer": {"tolerance": 0.5}}, "7.4", {"answer": "7"}, 1),
        ({"numericAnswer": {"relativeTolerance": 0.1}}, "109", {"answer": "100"}, 1),
        ({"numericAnswer": {"relativeTolerance": 0.1}}, "111", {"answer": "100"}, 0),
        ({"numericAnswer": {}}, "1e9999", {"answer": "1"}, 0),
        ({"jsonSchema": {"schema": OBJECT}}, '{"a": "xx"}', {}, 1),
        ({"jsonSchema": {"schema": OBJECT}}, 'Here:\n```json\n{"a": "x"}\n```\nDone.', {}, 1),
        ({"jsonSchema": {"schema": OBJECT}}, '{"a": "y"}', {}, 0),
        ({"jsonSchema": {"schema": OBJECT}}, '{"a": "x"', {}, 0),
        ({"jsonSchema": {"schema": "true"}}, "NaN", {}, 0),
        ({"jsonSchema": {"column": "shape"}}, "[1, 2]", {"shape": {"items": {"type": "integer"}}}, 1),
        ({"jsonSchema": {"column": "shape"}}, '["a"]', {"shape": '{"items": {"type": "integer"}}'}, 0),
    ],
)
def test_an_answer_is_scored(verifier: dict[str, Any], text: str, columns: dict[str, Any], expected: float) -> None:
    assert score(verifier, text, **columns) == expected


@pytest.mark.parametrize(
    ("verifier", "columns", "words"),
    [
        ({"exactMatch": {}}, {"answer": " "}, "column answer is empty"),
        ({"numericAnswer": {}}, {"answer": "many"}, "column answer is 'many', which has no number"),
        ({"regex": {"column": "p"}}, {"p": "(?=a)"}, "column p: .* is no regular expression that is taken here"),
        ({"jsonSchema": {"column": "s"}}, {"s": {"type": "objet"}}, "column s: is no JSON schema that is taken here"),
        ({"jsonSchema": {"column": "s"}}, {"s": {"$ref": "http://a.b/c"}}, "column s: .* retrieving it failed"),
        ({"jsonSchema": {"column": "s"}}, {"s": {"pattern": r"(a)\1"}}, "column s: is no JSON schema"),
        ({"unitTests": {}}, {"tests": ""}, "column tests is not the text of tests"),
        ({"unitTests": {}}, {"tests": "assert f("}, "column tests is no Python program"),
    ],
)
def test_a_record_that_nothing_can_be_scored_by_is_refused(
    verifier: dict[str, Any], columns: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        scorer(parse(Verifier, verifier)).check(columns)


@pytest.mark.parametrize(
    ("verifier", "words"),
    [
        ({}, "give exactly one of exactMatch, regex, jsonSchema, numericAnswer, unitTests"),
        ({"exactMatch": {}, "numericAnswer": {}}, "give exactly one of exactMatch"),
        ({"exactMatch": {}, "name": "loss"}, "name loss is that of another metric"),
        ({"regex": {}}, "give exactly one of pattern"),
        ({"regex": {"pattern": "("}}, "is no regular expression"),
        ({"jsonSchema": {"schema": "{]"}}, "is not valid JSON"),
        ({"jsonSchema": {"schema": "[]"}}, "but no schema"),
        ({"unitTests": {"memoryMegabytes": 1}}, "at least 64"),
    ],
)
def test_a_verifier_that_is_none_is_refused(verifier: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidDocument, match=words):
        parse(Verifier, verifier)


ALL = [
    ({"exactMatch": {"after": "a"}}, {"answer": "x"}),
    ({"regex": {"pattern": "(a+)+$"}}, {}),
    ({"numericAnswer": {}}, {"answer": "1"}),
    ({"jsonSchema": {"schema": OBJECT}}, {}),
]


@settings(max_examples=60, deadline=None)
@given(st.text() | st.text(alphabet='0123456789,.eE+-{}[]"`\n ').map(lambda text: text * 3))
def test_no_answer_is_too_odd(text: str) -> None:
    for verifier, columns in ALL:
        assert score(verifier, text, **columns) in (0.0, 1.0)


def test_no_answer_takes_long() -> None:
    """Each of these takes a backtracking engine, or a careless parser, longer than a test may take."""
    texts = ["a" * 100_000 + "b", "1," * 50_000 + "x", "1e" * 50_000, "[" * 100_000, '{"a":"' + "x" * 100_000 + 'y"}']
    for text in texts:
        for verifier, columns in ALL:
            assert score(verifier, text, **columns) in (0.0, 1.0)
