"""Base classes of all documents: strict for what people write, lenient for what machines wrote."""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

from muster.words.text import plural
from muster.words.times import epoch_seconds, rfc3339

# Nobody reads more; and a document of 20,000 faults would take minutes to answer, for each is compared with all words.
FAULTS_MAX = 100

UNKNOWN_KEY = "unknown key"  # how the message of such a problem begins

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

# A list in YAML and JSON, a tuple in Python. Strict pydantic would refuse the list.
Many = Annotated[tuple[T, ...], Field(strict=False)]

# Seconds since the epoch in Python, RFC 3339 in JSON. The numbers of earlier releases are still read.
Time = Annotated[
    float,
    BeforeValidator(epoch_seconds),
    PlainSerializer(rfc3339, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]


class UserError(Exception):
    """The job or the command asks for something impossible. The message says where, why, and what to change."""


class Spec(BaseModel):
    """Base of documents that people write: camelCase keys, no unknown ones, no silent conversion (`"2"` is not 2,
    `true` is not 1)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class Record(BaseModel):
    """Base of documents that a machine wrote, maybe a newer one: unknown keys are kept, so that a rewrite loses
    nothing."""

    model_config = ConfigDict(
        frozen=True,
        extra="allow",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        protected_namespaces=(),
    )


@dataclass(frozen=True)
class DocumentProblem:
    """One thing that is wrong with a document."""

    path: str  # where, as in `training.optimizer.lr`
    message: str
    did_you_mean: str | None = None  # a near word, where a key seems misspelt
    # The place in the text that the document was read from, counted from 1; None where there is no text.
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        hint = f". Did you mean {self.did_you_mean!r}?" if self.did_you_mean else ""
        return f"{self.path or 'document'}: {self.message}{hint}"


class InvalidDocument(ValueError):
    """A person's document was refused. `problems` names its faults, not only the first, up to FAULTS_MAX of them; their
    number in all is `count`.
    """

    def __init__(self, problems: Sequence[DocumentProblem], count: int = 0) -> None:
        self.problems = tuple(problems[:FAULTS_MAX])
        self.count = max(count, len(problems))
        super().__init__("\n".join(str(problem) for problem in self.problems))


def parse(model: type[M], document: object, at: str = "") -> M:
    """Parse what a person wrote (decoded JSON or YAML), keys in camelCase only.

    Raises InvalidDocument with the path of every fault, prefixed by `at`.
    """
    if not isinstance(document, dict):
        raise InvalidDocument((DocumentProblem(at, f"must be a mapping of keys to values, not {_kind(document)}"),))
    try:
        return model.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        entries = _independent(error)
        raise InvalidDocument(_problems(model, entries, at), len(entries)) from None


def known_part(model: type[BaseModel], document: dict[str, Any]) -> dict[str, Any]:
    """The document without the keys that `model` does not know; the document itself if it knows all.

    For what an API server has let in: its definition drops unknown keys, so those are a newer Muster's. One that is
    defaulted there would else have this Muster refuse every job while the two versions overlap.
    """
    try:
        model.model_validate(document, by_alias=True, by_name=False)
        return document
    except ValidationError as error:
        faults = [tuple(entry["loc"]) for entry in error.errors() if entry["type"] == "extra_forbidden"]
    if not faults:
        return document
    document = copy.deepcopy(document)
    for *above, key in faults:
        here: Any = document
        for part in above:
            with contextlib.suppress(LookupError, TypeError):  # a branch of a union is in no document
                here = here[part]
        here.pop(key, None)
    return document


def problems(model: type[BaseModel], error: ValidationError, at: str = "") -> tuple[DocumentProblem, ...]:
    """The first FAULTS_MAX of pydantic's errors in the words of the document."""
    return _problems(model, _independent(error), at)


def _problems(model: type[BaseModel], entries: list[dict[str, Any]], at: str) -> tuple[DocumentProblem, ...]:
    return tuple(_problem(model, entry, at) for entry in entries[:FAULTS_MAX])


def _independent(error: ValidationError) -> list[dict[str, Any]]:
    """The errors without those that only follow from others: pydantic calls a list too short, too, when it has refused
    its items.
    """
    entries: list[dict[str, Any]] = [{**entry} for entry in error.errors(include_url=False)]
    above = {loc[:end] for loc in (tuple(entry["loc"]) for entry in entries) for end in range(len(loc))}
    return [entry for entry in entries if entry["type"] != "too_short" or tuple(entry["loc"]) not in above]


def dump(model: BaseModel) -> dict[str, Any]:
    """The document of a model: camelCase keys, JSON types, None left out."""
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def dump_json(model: BaseModel) -> str:
    """Return `dump` as one line of JSON with sorted keys: equal models give equal bytes."""
    return json.dumps(dump(model), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _problem(model: type[BaseModel], entry: dict[str, Any], at: str) -> DocumentProblem:
    loc = tuple(entry["loc"])
    path = _path(at, loc)
    if entry["type"] == "extra_forbidden":
        keys = _keys_at(model, loc[:-1])
        near = difflib.get_close_matches(fold(str(loc[-1])), [fold(key) for key in keys], n=1, cutoff=0.6)
        suggestion = next((key for key in keys if near and fold(key) == near[0]), None)
        return DocumentProblem(path, UNKNOWN_KEY, suggestion)
    if entry["type"] == "missing":
        return DocumentProblem(path, "is required")
    if entry["type"] == "literal_error":
        expected = str(entry["ctx"]["expected"])
        near = difflib.get_close_matches(str(entry["input"]), re.findall(r"'([^']*)'", expected), n=1, cutoff=0.6)
        return DocumentProblem(
            path, f"must be {expected}, not {_kind(entry['input'])}"[:300], near[0] if near else None
        )
    return DocumentProblem(path, _message(entry))


# What pydantic finds wrong, in words of YAML and JSON: its own speak of dictionaries, tuples and classes.
_WORDS = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping of keys to values",
    "enum": "must be {expected}",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt:,}",
    "greater_than_equal": "must be at least {ge:,}",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a whole number of at most 64 bits",
    "int_type": "must be a whole number",
    "less_than": "must be less than {lt:,}",
    "less_than_equal": "must be at most {le:,}",
    "list_type": "must be a list",
    "model_attributes_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "none_required": "must be null",
    "string_pattern_mismatch": "must look like {pattern}",
    "string_too_long": "must have at most {max_length:,} characters",
    "string_too_short": "must have at least {min_length:,} characters",
    "string_type": "must be text",
    "tuple_type": "must be a list",
}


def _message(entry: dict[str, Any]) -> str:
    kind = entry["type"]
    bounds = entry.get("ctx", {}).items()
    context = {key: int(v) if isinstance(v, float) and v.is_integer() else v for key, v in bounds}
    if kind in ("value_error", "assertion_error"):
        return str(entry["msg"]).partition(", ")[2]
    if kind in ("too_long", "too_short"):
        limit = (
            f"at most {plural(context['max_length'], 'item')}"
            if kind == "too_long"
            else f"at least {plural(context['min_length'], 'item')}"
        )
        return f"must have {limit}, not {context['actual_length']}"
    words = _WORDS.get(kind)
    if words is None:
        return str(entry["msg"]).replace("Input should", "must").replace("must be a valid", "must be a")
    return f"{words.format(**context)}, not {_kind(entry['input'])}"


def fold(key: str) -> str:
    """Return the key as it is compared with others: `warmup_steps`, `warmup-steps` and `warmupSteps` are alike."""
    return key.replace("_", "").replace("-", "").lower()


def _path(at: str, loc: tuple[Any, ...]) -> str:
    path = at
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else (f".{part}" if path else str(part))
    return path


def _keys_at(model: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    """The keys that the model at `loc` knows; empty where the walk leaves the models."""
    here: type[BaseModel] | None = model
    for part in loc:
        if isinstance(part, int) or here is None:
            continue
        annotation = next((f.annotation for n, f in here.model_fields.items() if part in (n, f.alias)), None)
        here = _model_in(annotation)
    return [field.alias or name for name, field in here.model_fields.items()] if here else []


def fields_within(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every field of a model and of the models in its fields, each with its path in the document: `[]` stands for
    each item of a list, `*` for each name of a mapping."""
    for name, field in model.model_fields.items():
        path = f"{at}.{field.alias or name}".removeprefix(".")
        yield path, field
        inner = _model_in(field.annotation)
        if inner is not None:
            yield from fields_within(inner, path + _container(field.annotation))


def models_below(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the model of each field that holds one, with the field's path as in `fields_within`."""
    for name, field in model.model_fields.items():
        if (inner := _model_in(field.annotation)) is not None:
            yield f"{field.alias or name}{_container(field.annotation)}", inner


def _container(annotation: Any) -> str:
    """Return how a path goes on into a field that holds models: `[]`, `.*` or not at all."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (tuple, list):
        return "[]"
    if origin is dict:
        return ".*"
    return next((suffix for each in arguments if (suffix := _container(each))), "")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((inner for arg in typing.get_args(annotation) if (inner := _model_in(arg))), None)


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)[:40]
    if isinstance(value, str):
        return f"text ({value!r})"[:120]
    names: dict[type, str] = {dict: "a mapping", list: "a list", type(None): "nothing"}
    return names.get(type(value), "something else")
