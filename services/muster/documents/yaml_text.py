"""YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema) as data with places.

PyYAML follows YAML 1.1, where `1e-4` is text, `off` is false and `010` is eight. Only its parser is used (libyaml's,
twenty times as fast as the one in Python): values are built here from its events, so that every limit is checked before
a value is built, and an alias costs as much as the values that it stands for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from muster.documents.document import (
    DEPTH_MAX,
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

_TAG = "tag:yaml.org,2002:"
_CORE = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": re.compile(
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
}
_MAY_BE_NO_TEXT = frozenset("~nNtTfF-+.0123456789")
_NUMBER_LENGTH_MAX = 400
_NESTED_TOO_DEEP = "exceeded maximum nesting depth"  # libyaml's from 0.2.6 on, whose scanner runs ahead
_DIRECTIVES_MAX = 100  # libyaml compares each %TAG with all before it
_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str) -> Document:
    """The one document of the text; `data` is None when there is none. Raises DocumentError with the place."""
    if len(re.findall("^%", text, re.MULTILINE)) > _DIRECTIVES_MAX:
        raise DocumentError(f"has more than {_DIRECTIVES_MAX} lines that start with %")
    try:
        return _DataBuilder(text).document()
    except UnicodeEncodeError as error:
        raise DocumentError(f"has a character that is not Unicode (at {error.start})") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = error.problem or error.context or "is not YAML"
        if message == _NESTED_TOO_DEEP:
            message = f"is nested deeper than {DEPTH_MAX} levels"
        elif error.context and error.context != message:
            message = f"{message} ({error.context})"
        place = TextPlace(mark.line + 1, mark.column + 1) if mark else TextPlace(1, 1)
        raise DocumentError(message, place, line_of(text, place.line)) from None
    except yaml.reader.ReaderError as error:
        raise DocumentError(f"has a character that YAML does not allow: {_character(error)}") from None
    except yaml.YAMLError as error:
        raise DocumentError(f"is not YAML: {str(error)[:200]}") from None


def write_yaml(data: Any, comments: Mapping[str, str] | None = None) -> str:
    """YAML that this reader, and one of YAML 1.1, read back as the same data. A comment stands above the key whose path
    it is for."""
    text = str(yaml.dump(data, Dumper=_TextDumper, sort_keys=False, allow_unicode=True))
    if not comments:
        return text
    document, lines = read_yaml(text), text.splitlines(keepends=True)
    places = {document.place_of(path): words for path, words in comments.items()}
    for place, words in sorted(((place, words) for place, words in places.items() if place), reverse=True):
        lines.insert(place.line - 1, f"{' ' * (place.column - 1)}# {words}\n")
    return "".join(lines)


class _TextDumper(yaml.SafeDumper):
    """Quotes what is no text by YAML 1.1 (`on`) and what is none by 1.2 (`1e-4`)."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Escaped where there is more than printable letters and \\n: PyYAML writes other line breaks as they are, and
        they are read as blanks."""
        style = None if text.replace("\n", "").isprintable() else '"'
        return self.represent_scalar(f"{_TAG}str", text, style)


_TextDumper.add_representer(str, _TextDumper.represent_text)

for _kind, _pattern in _CORE.items():
    _TextDumper.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"(?:{_pattern.pattern})\Z"), None)


def _character(error: Any) -> str:
    character = error.character
    return f"U+{character:04X}" if isinstance(character, int) else repr(character)


@dataclass(frozen=True)
class _AnchoredValue:
    """Value that an anchor names."""

    data: Any
    mark: ValueMark
    values: int  # in all of it
    depth: int  # of the nesting within it


class _DataBuilder:
    """Builds data and marks from the parser's events, by descent."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.events: Iterator[Any] = yaml.parse(text, Loader=_PARSER)
        self.anchors: dict[str, _AnchoredValue | None] = {}  # None while the anchor's own value is being built
        self.values = 0
        self.deepest = 0  # level met so far, for the depth of anchors

    def document(self) -> Document:
        next(self.events)  # the stream's start
        if isinstance(next(self.events), yaml.StreamEndEvent):
            return Document(None, self.text)
        data, mark = self.value(next(self.events), 1)
        next(self.events)  # the document's end
        following = next(self.events)
        if not isinstance(following, yaml.StreamEndEvent):
            raise self.fault(following, "a second document starts here; give one document at a time")
        return Document(data, self.text, lambda: mark)

    def value(self, event: Any, depth: int) -> tuple[Any, ValueMark]:
        if depth > DEPTH_MAX:
            raise self.fault(event, f"is nested deeper than {DEPTH_MAX} levels")
        self.count(event, 1)
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, depth)
        if event.anchor is None:
            self.deepest = max(self.deepest, depth)
            return self.built(event, depth)
        self.anchors[event.anchor] = None
        values, deepest, self.deepest = self.values, self.deepest, depth
        data, mark = self.built(event, depth)
        self.anchors[event.anchor] = _AnchoredValue(data, mark, self.values - values + 1, self.deepest - depth)
        self.deepest = max(self.deepest, deepest)
        return data, mark

    def built(self, event: Any, depth: int) -> tuple[Any, ValueMark]:
        place = _place(event)
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event), ValueMark(place)
        kind = "map" if isinstance(event, yaml.MappingStartEvent) else "seq"
        if event.tag not in (None, "!", f"{_TAG}{kind}"):
            raise self.fault(event, f"{_tag_words(event.tag)} has no meaning here")
        if kind == "map":
            data, marks = self.mapping(depth)
            return data, ValueMark(place, marks)
        items: list[Any] = []
        item_marks: list[ValueMark] = []
        while not isinstance(following := next(self.events), yaml.SequenceEndEvent):
            item, mark = self.value(following, depth + 1)
            items.append(item)
            item_marks.append(mark)
        return items, ValueMark(place, item_marks)

    def mapping(self, depth: int) -> tuple[dict[str, Any], dict[str, ValueMark]]:
        own: dict[str, Any] = {}
        marks: dict[str, ValueMark] = {}
        merged: tuple[dict[str, Any], dict[str, ValueMark]] = ({}, {})
        merged_at: TextPlace | None = None
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            place = _place(event)
            key, merges = self.key(event), bool(event.value == "<<" and not event.style and event.tag is None)
            first = merged_at if merges else marks[key].place if key in marks else None
            if first is not None:
                raise self.fault(event, f"the key {key[:100]!r} stands here and in line {first.line}; keep one of them")
            if merges:
                merged, merged_at = self.merge(depth), place
                continue
            own[key], mark = self.value(next(self.events), depth + 1)
            marks[key] = ValueMark(place, mark.inside)
        return merged[0] | own, merged[1] | marks

    def merge(self, depth: int) -> tuple[dict[str, Any], dict[str, ValueMark]]:
        """Merge `<<: *defaults` or `<<: [*a, *b]`, where the earlier wins; not YAML 1.2, but in every other tool."""
        event = next(self.events)
        merged, mark = self.value(event, depth)
        parts = merged if isinstance(merged, list) else [merged]
        inside: Any = mark.inside if isinstance(merged, list) else [mark]
        data: dict[str, Any] = {}
        marks: dict[str, ValueMark] = {}
        for part, part_mark in zip(reversed(parts), reversed(inside), strict=True):
            if not isinstance(part, dict):
                raise self.fault(event, "<< merges mappings only")
            data |= part
            marks |= part_mark.inside
        return data, marks

    def alias(self, event: Any, depth: int) -> tuple[Any, ValueMark]:
        """A copy, so that the count of values is that of the JSON which the document stands for."""
        if event.anchor not in self.anchors:
            raise self.fault(event, f"found undefined alias {event.anchor[:100]!r}")
        anchored = self.anchors[event.anchor]
        if anchored is None:
            raise self.fault(event, "an alias contains itself")
        if depth + anchored.depth > DEPTH_MAX:
            raise self.fault(event, f"is nested deeper than {DEPTH_MAX} levels")
        self.count(event, anchored.values - 1)
        self.deepest = max(self.deepest, depth + anchored.depth)
        return _copy(anchored.data), ValueMark(_place(event), anchored.mark.inside)

    def count(self, event: Any, values: int) -> None:
        self.values += values
        if self.values > VALUES_MAX:
            raise self.fault(event, f"holds more than {VALUES_MAX:,} values, aliases counted at each use")

    def key(self, event: Any) -> str:
        is_text = isinstance(event, yaml.ScalarEvent) and isinstance(self.scalar(event), str)
        if not is_text:
            name = f"the key {str(event.value)[:100]}" if isinstance(event, yaml.ScalarEvent) else "a key"
            raise self.fault(event, f"{name} must be text; put it in quotes")
        if event.anchor is not None:
            raise self.fault(event, "a key can't be an anchor")
        if wrong := check_key(event.value):
            raise self.fault(event, wrong)
        return str(event.value)

    def scalar(self, event: Any) -> Any:
        text = str(event.value)
        if wrong := check_text(text):
            raise self.fault(event, wrong)
        if event.tag is None:
            if event.style or (text and text[0] not in _MAY_BE_NO_TEXT):
                return text
            kind = next((name for name, pattern in _CORE.items() if pattern.fullmatch(text)), "str")
        else:
            kind = "str" if event.tag == "!" else event.tag.removeprefix(_TAG)
        if kind == "str":
            return text
        if kind not in _CORE or not _CORE[kind].fullmatch(text):
            raise self.fault(event, f"{_tag_words(event.tag)} {text[:100]} has no meaning here")
        if kind == "null":
            return None
        return text.lower() == "true" if kind == "bool" else self.number(event, kind, text)

    def number(self, event: Any, kind: str, text: str) -> float:
        if len(text) > _NUMBER_LENGTH_MAX:
            raise self.fault(event, "is too long for a number; quote it if it is text")
        if kind == "int" and re.fullmatch("[-+]?0[0-9]+", text):
            plain = text.lstrip("+-0") or "0"
            raise self.fault(event, f"{text[:40]} is octal to some readers: write {plain[:40]}, or quote it as text")
        if kind == "int":
            number: float = int(text, 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10)
        else:
            number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if wrong := check_number(number, text[:40]):
            raise self.fault(event, wrong)
        return number

    def fault(self, event: Any, message: str) -> DocumentError:
        place = _place(event)
        return DocumentError(message, place, line_of(self.text, place.line))


def _place(event: Any) -> TextPlace:
    return TextPlace(event.start_mark.line + 1, event.start_mark.column + 1)


def _tag_words(tag: str | None) -> str:
    return str(tag).replace(_TAG, "!!")[:100]


def _copy(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _copy(value) for key, value in data.items()}
    return [_copy(item) for item in data] if isinstance(data, list) else data
