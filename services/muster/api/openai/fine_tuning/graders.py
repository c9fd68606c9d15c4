"""Graders of reinforcement fine-tuning, in OpenAI's terms, as verifiers of task grpo."""

from __future__ import annotations

import ast
import math
import re
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from muster.api.openai.requests import OpenAIRequest
from muster.recipe.verifiers import Verifier
from muster.words.base import DocumentProblem, InvalidDocument, parse

_ANSWER: Final = re.compile(r"\{\{\s*sample\.output_text\s*\}\}")
_COLUMN: Final = re.compile(r"\{\{\s*item\.([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")
_SPECIAL: Final = re.compile(r"([\\.+*?()|\[\]{}^$#&\-~/])")
_TYPES: Final = ("string_check", "multi", "x_verifier")
_NO_VERIFIER: Final = {
    "text_similarity": "no verifier measures how alike two texts are",
    "score_model": "no other model is asked for a reward",
    "label_model": "no other model is asked for a reward",
    "python": "programs of a request are not run",
    "endpoint": "no other server is asked for a reward",
}
NAME_MAX: Final = 200


def _checked_type(given: Any) -> Any:
    if given not in _TYPES:
        why = f": {_NO_VERIFIER[given]}" if isinstance(given, str) and given in _NO_VERIFIER else ""
        raise ValueError(f"must be one of {', '.join(_TYPES)}, not {given!r}"[:160] + why)
    return given


Kind = Annotated[
    Literal["string_check", "multi", "x_verifier"],
    BeforeValidator(_checked_type),
    WithJsonSchema({"type": "string", "enum": [*_TYPES]}),
]
Text = Annotated[str, Field(min_length=1, max_length=10_000)]


class Grader(OpenAIRequest):
    """Grader that rewards an answer. `string_check` compares `input`, which is `{{sample.output_text}}`, with
    `reference`: a text, or a record's column as `{{item.answer}}`. `multi` adds up several graders as
    `calculate_output` says. `x_verifier` is a verifier of task grpo (numericAnswer, regex, jsonSchema, unitTests,
    exactMatch), beyond OpenAI's."""

    type: Kind
    name: Annotated[str, Field(min_length=1, max_length=NAME_MAX)]
    input: Text | None = None
    reference: Text | None = None
    operation: Literal["eq", "ne", "like", "ilike"] | None = None
    graders: Annotated[dict[str, Grader], Field(min_length=1, max_length=16)] | None = None
    calculate_output: Text | None = None
    verifier: dict[str, Any] | None = None


class WrongGrader(Exception):
    """A grader that no verifier does the work of: `problem` names its field."""

    def __init__(self, path: str, words: str) -> None:
        super().__init__(f"{path}: {words}")
        self.problem = DocumentProblem(path, words)


def verifiers_of(grader: Grader, at: str) -> list[dict[str, Any]]:
    """The verifiers of task grpo whose weighted sum is what the grader gives. Raises WrongGrader."""
    if grader.type != "multi":
        return [_single(grader, at, grader.name, 1.0)]
    _only(grader, at, "graders", "calculate_output")
    assert grader.graders is not None
    assert grader.calculate_output is not None
    weights = _weights(grader.calculate_output, set(grader.graders), f"{at}.calculate_output")
    verifiers = []
    for name, each in grader.graders.items():
        if each.type == "multi":
            raise WrongGrader(f"{at}.graders.{name}.type", "a multi grader holds no other one")
        verifiers.append(_single(each, f"{at}.graders.{name}", name, weights[name]))
    return verifiers


def _single(grader: Grader, at: str, name: str, weight: float) -> dict[str, Any]:
    kind = _verifier(grader, at)
    document = {**kind, "name": _slug(name), "weight": weight}
    try:
        parse(Verifier, document)
    except InvalidDocument as invalid:
        fault = invalid.problems[0]
        field = "verifier" if grader.type == "x_verifier" else "reference"
        raise WrongGrader(f"{at}.{field}", f"{fault}") from None
    return document


def _verifier(grader: Grader, at: str) -> dict[str, Any]:
    if grader.type == "x_verifier":
        _only(grader, at, "verifier")
        assert grader.verifier is not None
        return {key: value for key, value in grader.verifier.items() if key not in ("name", "weight")}
    _only(grader, at, "input", "reference", "operation")
    assert grader.reference is not None
    if grader.input is None or not _ANSWER.fullmatch(grader.input.strip()):
        raise WrongGrader(f"{at}.input", "must be {{sample.output_text}}: the whole answer is compared")
    if grader.operation == "ne":
        raise WrongGrader(f"{at}.operation", "ne has no verifier: reward what an answer is, by eq, like or ilike")
    column = _COLUMN.fullmatch(grader.reference.strip())
    if column is not None:
        if grader.operation != "eq":
            words = f"{grader.operation} compares with a text alone; with a record's column take eq"
            raise WrongGrader(f"{at}.operation", words)
        return {"exactMatch": {"column": column[1]}}
    if "{{" in grader.reference:
        raise WrongGrader(f"{at}.reference", "must be a text, or one column of the record, as {{item.answer}}")
    text = _SPECIAL.sub(r"\\\1", grader.reference)
    if grader.operation == "eq":
        return {"regex": {"pattern": rf"\A\s*{text}\s*\z"}}
    return {"regex": {"pattern": text if grader.operation == "like" else f"(?i){text}"}}


def _only(grader: Grader, at: str, *needed: str) -> None:
    """Raises WrongGrader where a field is missing, or is another type's."""
    for field in ("input", "reference", "operation", "graders", "calculate_output", "verifier"):
        given = getattr(grader, field) is not None
        if given != (field in needed):
            words = f"is of no grader of the type {grader.type}; leave it out" if given else "is required"
            raise WrongGrader(f"{at}.{field}", words)


def _slug(name: str) -> str:
    """A verifier's name of a grader's."""
    return re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-_")[:40] or "grader"


def _weights(formula: str, names: set[str], at: str) -> dict[str, float]:
    """Return the weight of each grader in a sum such as `0.8 * exact + 0.2 * short`. Raises WrongGrader for any other
    formula, and for one that leaves a grader out."""
    try:
        weights = _sum(ast.parse(formula.strip(), mode="eval").body, names)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        words = "must be a sum of the graders with weights, such as 0.8 * exact + 0.2 * short"
        raise WrongGrader(at, f"{words}; there are {', '.join(sorted(names))}"[:500]) from None
    if missing := names - weights.keys():
        raise WrongGrader(at, f"leaves out the grader {min(missing)[:100]}")
    return weights


def _sum(node: ast.expr, names: set[str]) -> dict[str, float]:
    """Raises ValueError for what is no such sum."""
    match node:
        case ast.Name(id=name) if name in names:
            return {name: 1.0}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _times(-1.0, _sum(operand, names))
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as sign, right=right):
            one, other = _sum(left, names), _times(1.0 if isinstance(sign, ast.Add) else -1.0, _sum(right, names))
            return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in one | other}
        case ast.BinOp(left=ast.Constant(value=int() | float() as factor), op=ast.Mult(), right=right):
            return _times(factor, _sum(right, names))
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int() | float() as factor)):
            return _times(factor, _sum(left, names))
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=int() | float() as factor)) if factor:
            return _times(1.0 / factor, _sum(left, names))
    raise ValueError(ast.dump(node))


def _times(factor: float, weights: dict[str, float]) -> dict[str, float]:
    if not math.isfinite(factor):
        raise ValueError(factor)
    return {name: factor * weight for name, weight in weights.items()}
