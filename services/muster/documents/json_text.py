"""JSON (RFC 8259) as data with places. The standard library's reader gives none and takes the last of equal keys."""

from __future__ import annotations

import bisect
import json
import re
from typing import Any

from muster.documents.document import (
    DEPTH_MAX,
    KEY_LENGTH_MAX,
    VALUES_MAX,
    Document,
    DocumentError,
    TextPlace,
    ValueMark,
    check_key,
    check_number,
    check_text,
    line_of,
)

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None}
_WORD = re.compile(r"[A-Za-z]+")
_NUMBER_LENGTH_MAX = 400  # the longest finite number written without an exponent has 309 digits


# A small text without anything that can be beyond a limit is read by the standard library, many times as fast. What
# can: escapes (halves of surrogate pairs, NUL), numbers of over 64 bits, exponents of three digits, deep nesting.
_SMALL = 5_000
_MAYBE_BEYOND = re.compile(r"\\u|[0-9]{19}|[eE]\+?[0-9]{3}")


def read_json(text: str) -> Document:
    """Raises DocumentError with the place of the first fault."""
    if len(text) <= _SMALL and text.count("[") + text.count("{") < DEPTH_MAX and not _MAYBE_BEYOND.search(text):
        try:
            data = json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_constant)
        except ValueError:
            pass  # the other reader says where
        else:
            return Document(data, text, lambda: _read(text)[1])
    data, mark = _read(text)
    return Document(data, text, lambda: mark)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs) or any(len(key) > KEY_LENGTH_MAX for key in mapping):
        raise ValueError("a key stands twice, or is too long")
    return mapping


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _read(text: str) -> tuple[Any, ValueMark]:
    reader = _JsonReader(text)
    data, mark = reader.value(1)
    reader.skip_space()
    if reader.at < len(text):
        raise reader.fault("the document has ended; nothing may follow it")
    return data, mark


class _JsonReader:
    """Descends through the text once; `at` is the next character to read."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.values = text, 0, 0
        self.lines = [0, *(match.end() for match in re.finditer("\n", text))]
        self.strings = json.JSONDecoder()

    def value(self, depth: int) -> tuple[Any, ValueMark]:
        self.skip_space()
        begin = self.at
        self.values += 1
        if self.values > VALUES_MAX:
            raise self.fault(f"holds more than {VALUES_MAX:,} values")
        if depth > DEPTH_MAX:
            raise self.fault(f"is nested deeper than {DEPTH_MAX} levels")
        letter = self.text[begin : begin + 1]
        place = self.place(begin)
        if letter == "{":
            data, marks = self.mapping(depth)
            return data, ValueMark(place, marks)
        if letter == "[":
            items, item_marks = self.items(depth)
            return items, ValueMark(place, item_marks)
        return (self.string() if letter == '"' else self.scalar()), ValueMark(place)

    def mapping(self, depth: int) -> tuple[dict[str, Any], dict[str, ValueMark]]:
        data: dict[str, Any] = {}
        marks: dict[str, ValueMark] = {}
        self.at += 1
        while not self.taken("}"):
            if data and not self.taken(","):
                raise self.fault("expected ',' or '}'")
            self.skip_space()
            begin = self.at
            if self.text[begin : begin + 1] != '"':
                raise self.fault("expected a key in double quotes")
            key = self.string()
            if wrong := check_key(key):
                raise self.fault(wrong, begin)
            if key in data:
                raise self.fault(f"the key {key[:100]!r} stands here and in line {marks[key].place.line}", begin)
            if not self.taken(":"):
                raise self.fault("expected ':'")
            data[key], mark = self.value(depth + 1)
            marks[key] = ValueMark(self.place(begin), mark.inside)
        return data, marks

    def items(self, depth: int) -> tuple[list[Any], list[ValueMark]]:
        data: list[Any] = []
        marks: list[ValueMark] = []
        self.at += 1
        while not self.taken("]"):
            if data and not self.taken(","):
                raise self.fault("expected ',' or ']'")
            item, mark = self.value(depth + 1)
            data.append(item)
            marks.append(mark)
        return data, marks

    def string(self) -> str:
        begin = self.at
        try:
            content, self.at = self.strings.raw_decode(self.text, begin)
        except json.JSONDecodeError as error:
            raise self.fault(error.msg[:1].lower() + error.msg[1:].removesuffix(" at"), error.pos) from None
        if wrong := check_text(content):
            raise self.fault(wrong, begin)
        return str(content)

    def scalar(self) -> Any:
        begin = self.at
        if match := _NUMBER.match(self.text, begin):
            self.at = match.end()
            text = match[0]
            if len(text) > _NUMBER_LENGTH_MAX:
                raise self.fault("is too long for a number", begin)
            number = float(text) if match[1] or match[2] else int(text)
            if wrong := check_number(number, text[:40]):
                raise self.fault(wrong, begin)
            return number
        if match := _WORD.match(self.text, begin):
            if match[0] in _WORDS:
                self.at = match.end()
                return _WORDS[match[0]]
            raise self.fault(f"{match[0][:40]} is not a word of JSON; text needs double quotes")
        raise self.fault("expected a value" if begin < len(self.text) else "the document ends too early")

    def taken(self, letter: str) -> bool:
        self.skip_space()
        is_next = self.text.startswith(letter, self.at)
        self.at += is_next
        return is_next

    def skip_space(self) -> None:
        match = _SPACE.match(self.text, self.at)
        assert match is not None, "the pattern matches nothing too"
        self.at = match.end()

    def place(self, offset: int) -> TextPlace:
        line = bisect.bisect_right(self.lines, offset)
        return TextPlace(line, offset - self.lines[line - 1] + 1)

    def fault(self, message: str, offset: int | None = None) -> DocumentError:
        place = self.place(self.at if offset is None else offset)
        return DocumentError(message, place, line_of(self.text, place.line))
