"""A document as it was read: plain data, the text that it came from, and where each value stands in that text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from muster.words.base import DocumentProblem

# Every limit is checked while the text is read, before the value that goes beyond it is built, so that no text takes
# more than some tenths of a second. An honest job has some hundred values, eight levels deep; etcd takes 1.5 MB.
BYTES_MAX = 1_000_000
DEPTH_MAX = 64
KEY_LENGTH_MAX = 400  # Kubernetes' longest have 317; a key is repeated in what is said about it
VALUES_MAX = 20_000  # aliases followed: ten lines of YAML can stand for a billion values

_INTEGER_MAX = 2**63 - 1


class TextPlace(NamedTuple):
    """Line and column in a text, counted from 1."""

    line: int
    column: int


class ValueMark(NamedTuple):
    """The place of a value: that of its key in a mapping, or its own in a list; and the marks of the values inside."""

    place: TextPlace
    inside: dict[str, ValueMark] | list[ValueMark] | None = None


class DocumentError(ValueError):
    """The text can't be read. `message` says why, without the place; `excerpt` is the line at that place."""

    def __init__(self, message: str, place: TextPlace | None = None, excerpt: str = "") -> None:
        self.message, self.place, self.excerpt = message, place, excerpt
        super().__init__(f"line {place.line}, column {place.column}: {message}" if place else message)


@dataclass(frozen=True)
class Document:
    """Parsed document, with the place in the text of each of its parts."""

    data: Any  # of JSON's types: finite numbers, integers of at most 64 bits, no NUL and no half surrogate pair
    text: str = ""
    # Called when a fault is to be shown, and not before: finding places may take a second look at the text.
    marks: Callable[[], ValueMark | None] = lambda: None

    @cached_property
    def mark(self) -> ValueMark | None:
        return self.marks()

    def place_of(self, path: str) -> TextPlace | None:
        """The place of the value at `path` (`spec.training.data.train[0]`), or of the nearest one around it.

        None when the document itself is the nearest.
        """
        here, rest = self.mark, path
        while here is not None and here.inside and rest:
            step = _step(here.inside, rest)
            if step is None:
                break
            here, rest = step
        return None if here is self.mark or here is None else here.place

    def located(self, problem: DocumentProblem) -> DocumentProblem:
        """The problem with its line and column, where the text has them."""
        place = self.place_of(problem.path)
        return dataclasses.replace(problem, line=place.line, column=place.column) if place else problem

    def excerpt(self, line: int) -> str:
        """The text of one line, counted from 1; empty when there is no such line."""
        return line_of(self.text, line)


def line_of(text: str, line: int) -> str:
    lines = text.splitlines()
    return lines[line - 1] if 0 < line <= len(lines) else ""


def check_text(text: str) -> str | None:
    """Return the fault of a text that databases and Kubernetes would refuse, or None."""
    if "\x00" in text:
        return "a text with a NUL character can't be stored"
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        return "a text with half a surrogate pair is not Unicode"
    return None


def check_key(key: str) -> str | None:
    """Return the fault of a key, or None."""
    if len(key) > KEY_LENGTH_MAX:
        return f"a key may have {KEY_LENGTH_MAX} characters, not {len(key):,}"
    return check_text(key)


def check_number(number: float, text: str) -> str | None:
    """Return the fault of a number that JSON or a 64-bit integer can't hold, or None."""
    if isinstance(number, int):
        return None if abs(number) <= _INTEGER_MAX else f"{text} is a whole number of more than 64 bits"
    return None if math.isfinite(number) else f"{text} is not a number that a document can carry"


def _step(inside: dict[str, ValueMark] | list[ValueMark], rest: str) -> tuple[ValueMark, str] | None:
    """Return the mark one level down towards `rest`. Keys may contain dots themselves, so the longest one that fits is
    taken."""
    if isinstance(inside, list):
        match = re.match(r"\.?\[?(\d{1,9})\]?", rest)
        if match is None or int(match[1]) >= len(inside):
            return None
        return inside[int(match[1])], rest[match.end() :]
    rest = rest.removeprefix(".")
    ends = [len(rest), *(match.start() for match in re.finditer(r"[.\[]", rest))]
    for end in sorted(ends, reverse=True):
        if (mark := inside.get(rest[:end])) is not None:
            return mark, rest[end:]
    return None
