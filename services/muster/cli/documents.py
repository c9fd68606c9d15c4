"""A job document from a YAML or JSON file: YAML 1.2's core schema, no duplicate keys, and the place of every value.

PyYAML follows YAML 1.1, where `1e-4` is text, `off` is false and `010` is eight. People who write job files expect
none of that, so the scalars here are those of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema).
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.cli.errors import CliError, Exit, Fault
from muster.contract.base import Problem

if TYPE_CHECKING:
    import yaml

BYTES_MAX = 1_000_000
VALUES_MAX = 50_000  # after aliases are followed: a small file can name billions

_TAG = "tag:yaml.org,2002:"
_CORE = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": re.compile(
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
}


@dataclass(frozen=True)
class Place:
    """Line and column, from 1."""

    line: int
    column: int


@dataclass
class Document:
    """data: JSON types only. name: the file's, for messages. places: path (`spec.training`) → where its key stands."""

    data: dict[str, Any]
    name: str
    text: str = ""
    folder: Path = field(default_factory=Path)
    places: dict[str, Place] = field(default_factory=dict)

    def fault(self, problem: Problem) -> Fault:
        """The problem with its line, or the line of the nearest key around it."""
        path = problem.path
        while path and path not in self.places:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        place = self.places.get(path)
        if place is None:
            return Fault(problem)
        return Fault(problem, place.line, place.column, _line(self.text, place.line))


def read_document(source: str) -> Document:
    """Read a file, or standard input for `-`. Raises CliError (exit 2) that names line and column."""
    name, text, folder = _read(source)
    places: dict[str, Place] = {}
    if source.endswith(".json"):
        data = _parse_json(text, name)
    else:
        data, places = _parse_yaml(text, name)
    if not isinstance(data, dict):
        kind = "is empty" if data is None else "is not a mapping of keys to values"
        raise _bad(
            name, f"{name} {kind}", "a job file starts with `apiVersion`, `kind`, `metadata` and `spec`; see examples/"
        )
    _check_values(data, name)
    return Document(data, name, text, folder, places)


def set_value(document: Document, assignment: str) -> None:
    """Apply `--set path.to.key=value`; the value is YAML. `spec.` may be left out. Raises CliError."""
    path, found, text = assignment.partition("=")
    if not found or not path:
        raise _bad("--set", f"--set wants PATH=VALUE, not {assignment!r}", "--set training.length.steps=100")
    value, _ = _parse_yaml(text, f"--set {path}")
    parts: list[str | int] = [int(p) if p.isdigit() else p for p in re.findall(r"[^.\[\]]+", path)]
    if parts[0] not in ("spec", "metadata", "apiVersion", "kind"):
        parts.insert(0, "spec")
    here: Any = document.data
    for index, part in enumerate(parts[:-1]):
        here = _step_into(here, part, parts[index + 1], path)
    _assign(here, parts[-1], value, path)


def _step_into(here: Any, part: str | int, following: str | int, path: str) -> Any:
    if isinstance(here, dict) and isinstance(part, str):
        if here.get(part) is None:
            here[part] = [] if isinstance(following, int) else {}
        return here[part]
    if isinstance(here, list) and isinstance(part, int) and part < len(here):
        return here[part]
    raise _bad("--set", f"--set {path}: there is no {part!r} to go into", "")


def _assign(here: Any, part: str | int, value: Any, path: str) -> None:
    in_mapping = isinstance(here, dict) and isinstance(part, str)
    in_list = isinstance(here, list) and isinstance(part, int) and part < len(here)
    if not (in_mapping or in_list):
        raise _bad("--set", f"--set {path}: there is no {part!r} to set", "")
    here[part] = value


def _read(source: str) -> tuple[str, str, Path]:
    name = "standard input" if source == "-" else source
    try:
        raw = sys.stdin.buffer.read(BYTES_MAX + 1) if source == "-" else _bytes_of(Path(source))
    except OSError as error:
        raise _bad(name, f"can't read {name}: {(error.strerror or str(error)).lower()}", "") from None
    if len(raw) > BYTES_MAX:
        raise _bad(name, f"{name} is larger than {BYTES_MAX:,} bytes, so it is not a job file", "")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _bad(name, f"{name} is not UTF-8 text (byte {error.start})", "") from None
    return name, text, Path.cwd() if source == "-" else Path(source).absolute().parent


def _bytes_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(BYTES_MAX + 1)


def _parse_json(text: str, name: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in items]
        for key in keys:
            if keys.count(key) > 1:
                raise _bad(name, f"{name}: the key {key!r} stands twice in one mapping", "keep one of them")
        return dict(items)

    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise _bad_at(name, text, Place(error.lineno, error.colno), error.msg) from None
    except RecursionError:
        raise _bad(name, f"{name} is nested too deeply", "") from None


def _parse_yaml(text: str, name: str) -> tuple[Any, dict[str, Place]]:
    import yaml

    try:
        documents = list(yaml.compose_all(text, Loader=_loader()))
        if len(documents) > 1:
            place = _place(documents[1].start_mark)
            raise _bad_at(name, text, place, "a second document starts here; submit takes one job per file")
        if not documents:
            return None, {}
        places: dict[str, Place] = {}
        return _Builder(name, text, places).value(documents[0], ""), places
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = error.problem or error.context or "is not YAML"
        if error.context and error.context != message:
            message = f"{message} ({error.context})"
        raise _bad_at(name, text, _place(mark) if mark else Place(1, 1), message) from None
    except yaml.YAMLError as error:
        raise _bad(name, f"{name} is not YAML: {error}", "") from None
    except RecursionError:
        raise _bad(name, f"{name} is nested too deeply", "") from None


class _Builder:
    """Values from YAML nodes. Each alias is built anew, so that the count of values is that of the JSON to send."""

    def __init__(self, name: str, text: str, places: dict[str, Place]) -> None:
        self.name, self.text, self.places = name, text, places
        self.open: set[int] = set()
        self.values = 0

    def value(self, node: yaml.Node, path: str) -> Any:
        import yaml

        self.values += 1
        if self.values > VALUES_MAX:
            raise self.bad(node, f"holds more than {VALUES_MAX:,} values; does an alias multiply itself?")
        if id(node) in self.open:
            raise self.bad(node, "an alias contains itself")
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.item(item, f"{path}[{index}]") for index, item in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            return self.mapping(node, path)
        finally:
            self.open.discard(id(node))

    def item(self, node: yaml.Node, path: str) -> Any:
        self.places.setdefault(path, _place(node.start_mark))
        return self.value(node, path)

    def mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self.key(key_node)
            if key in lines:
                raise self.bad(key_node, f"the key {key!r} stands here and in line {lines[key]}; keep one of them")
            lines[key] = _place(key_node.start_mark).line
            if key == "<<" and not key_node.style:
                merged = self.merge(value_node, path) | merged
                continue
            at = f"{path}.{key}" if path else key
            self.places[at] = _place(key_node.start_mark)
            own[key] = self.value(value_node, at)
        return merged | own

    def merge(self, node: yaml.Node, path: str) -> dict[str, Any]:
        """`<<: *defaults` or `<<: [*a, *b]`, where the earlier wins; not YAML 1.2, but in every other tool."""
        found = self.value(node, path)
        parts = found if isinstance(found, list) else [found]
        if not all(isinstance(part, dict) for part in parts):
            raise self.bad(node, "<< merges mappings only")
        return {key: value for part in reversed(parts) for key, value in part.items()}

    def key(self, node: yaml.Node) -> str:
        import yaml

        if not isinstance(node, yaml.ScalarNode) or not node.value:
            raise self.bad(node, "a key must be text")
        return str(node.value)

    def scalar(self, node: yaml.ScalarNode) -> Any:
        text, tag = str(node.value), node.tag.removeprefix(_TAG)
        if tag == "str":
            return text
        if tag not in _CORE or not _CORE[tag].fullmatch(text):
            raise self.bad(node, f"{node.tag.replace(_TAG, '!!')} {text} has no meaning here")
        if tag == "null":
            return None
        if tag == "bool":
            return text.lower() == "true"
        return self.integer(node, text) if tag == "int" else self.number(node, text)

    def integer(self, node: yaml.ScalarNode, text: str) -> int:
        if len(text) > 40:
            raise self.bad(node, "is too long for a number; quote it if it is text")
        return int(text, 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10)

    def number(self, node: yaml.ScalarNode, text: str) -> float:
        number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if not math.isfinite(number):
            raise self.bad(node, f"{text} is not a number that a job can carry")
        return number

    def bad(self, node: yaml.Node, message: str) -> CliError:
        return _bad_at(self.name, self.text, _place(node.start_mark), message)


@functools.cache
def _loader() -> type[yaml.SafeLoader]:
    """PyYAML's parser with the scalars of YAML 1.2 in place of its own."""
    import yaml

    class CoreLoader(yaml.SafeLoader):
        pass

    CoreLoader.yaml_implicit_resolvers = {}
    for tag, pattern in _CORE.items():
        CoreLoader.add_implicit_resolver(_TAG + tag, re.compile(rf"(?:{pattern.pattern})\Z"), None)
    return CoreLoader


def _check_values(data: Any, name: str) -> None:
    """JSON files may hold NaN and Infinity, which no server takes."""
    stack = [data]
    while stack:
        value = stack.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise _bad(name, f"{name}: {value} is not a number that a job can carry", "")
        stack += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _place(mark: Any) -> Place:
    return Place(mark.line + 1, mark.column + 1)


def _line(text: str, line: int) -> str:
    lines = text.splitlines()
    return lines[line - 1] if 0 < line <= len(lines) else ""


def _bad(name: str, what: str, next_step: str) -> CliError:
    return CliError(what=what, exit_code=Exit.USAGE, code="bad-document", file=name, next_step=next_step)


def _bad_at(name: str, text: str, place: Place, message: str) -> CliError:
    fault = Fault(Problem("", message), place.line, place.column, _line(text, place.line))
    return CliError(
        what=f"{name}, line {place.line}, column {place.column}: {message}",
        exit_code=Exit.USAGE,
        code="bad-document",
        file=name,
        faults=(fault,),
    )
