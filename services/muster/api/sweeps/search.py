"""Trials of a sweep: their parameters follow from its document alone, so they are the same whenever they are
computed."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from muster.recipe.sweep import Parameter, Sweep
from muster.words.base import DocumentProblem

Parameters = dict[str, Any]  # a value by the path of each field

_DIGITS = 6  # of a number that is drawn: more would be noise, and fewer would show in a schedule


def trials_of(sweep: Sweep) -> list[Parameters]:
    """The parameters of each trial, in order; trial 1 is the first."""
    return list(itertools.islice(_grid(sweep) if sweep.search == "grid" else _drawn(sweep), sweep.size))


def _grid(sweep: Sweep) -> Iterator[Parameters]:
    """The last parameter changes fastest."""
    for values in itertools.product(*(parameter.values or () for parameter in sweep.parameters.values())):
        yield dict(zip(sweep.parameters, values, strict=True))


def _drawn(sweep: Sweep) -> Iterator[Parameters]:
    """Yield random combinations, none twice if they can be counted. Only `random()` is used, whose numbers Python
    promises to be the same in later releases."""
    source = random.Random(sweep.seed)
    seen: set[str] = set()
    while True:
        drawn = {path: _draw(parameter, source.random()) for path, parameter in sweep.parameters.items()}
        key = json.dumps(drawn, sort_keys=True)
        if sweep.combinations is None or key not in seen:
            seen.add(key)
            yield drawn


def _draw(parameter: Parameter, share: float) -> Any:
    """The value at `share`, from 0 up to 1, of all that the parameter can be."""
    if parameter.values is not None:
        return parameter.values[int(share * len(parameter.values))]
    low, high = parameter.min, parameter.max
    assert low is not None
    assert high is not None
    top = high + 1 if parameter.is_whole else high  # each whole number has the same room, the last one too
    drawn = low * (top / low) ** share if parameter.log else low + (top - low) * share
    if parameter.is_whole:
        return min(int(high), max(int(low), math.floor(drawn)))
    return min(float(high), max(float(low), float(f"{drawn:.{_DIGITS}g}")))


class NoSuchPlace(ValueError):
    """The job's document has no place for a parameter; the message says why."""


def with_parameters(template: Mapping[str, Any], parameters: Parameters) -> dict[str, Any]:
    """The job's document with these values in its spec. Raises NoSuchPlace with the path of the parameter."""
    document = copy.deepcopy(dict(template))
    for path, value in parameters.items():
        _set(document, path, copy.deepcopy(value))
    return document


def _set(document: dict[str, Any], path: str, value: Any) -> None:
    parts = _parts(path)
    here: Any = document
    for part, after in itertools.pairwise(parts):
        if isinstance(here, dict) and isinstance(part, str):
            if here.get(part) is None and isinstance(after, str):
                here[part] = {}  # a part of the spec that is left to its defaults
            here = here.get(part)
        else:
            here = _item(here, part, path)
    last = parts[-1]
    if not (isinstance(here, dict) and isinstance(last, str)):
        _item(here, last, path)
    here[last] = value


def _parts(path: str) -> list[str | int]:
    """Return the keys and places in lists, from the document down."""
    tokens = re.findall(r"([A-Za-z0-9_-]+)|\[(\d+)\]", path)
    return ["spec", *(int(index) if index else key for key, index in tokens)]


def _item(here: Any, part: str | int, path: str) -> Any:
    if not isinstance(here, list) or not isinstance(part, int):
        raise NoSuchPlace(path, "leads through what is no mapping or list in this job's spec")
    if part >= len(here):
        raise NoSuchPlace(path, f"the list has {len(here)} items in this job's spec, and no [{part}]")
    return here[part]


def problem_of(error: NoSuchPlace) -> DocumentProblem:
    path, words = error.args
    return DocumentProblem(f"sweep.parameters.{path}", words)
