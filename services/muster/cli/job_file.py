"""A job's document from a file or standard input, changed by `--set`, with the line of every fault."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.cli.errors import CliError, DocumentFault, ExitStatus
from muster.documents.document import BYTES_MAX, Document, DocumentError
from muster.documents.reader import read
from muster.words.base import UNKNOWN_KEY, DocumentProblem


@dataclass
class JobFile:
    """A job's document, read from a file. `data` will be sent, changed by --set and --name; `name` is the file's, for
    messages, and `folder` where it lies."""

    data: dict[str, Any]
    name: str
    document: Document = field(default_factory=lambda: Document(None))
    folder: Path = field(default_factory=Path)
    settings: dict[str, str] = field(default_factory=dict)  # what --set changed: path to its assignment

    def fault(self, problem: DocumentProblem) -> DocumentFault:
        """The problem with the --set that it comes from, or with its line, or the line of the nearest key around it."""
        if (setting := self._setting_of(problem.path)) is not None:
            return DocumentFault(problem, setting=setting)
        place = self.document.place_of(problem.path)
        if place is None:
            return DocumentFault(problem)
        return DocumentFault(problem, place.line, place.column, self.document.excerpt(place.line))

    def _setting_of(self, path: str) -> str | None:
        """The last --set of the value at `path`, of one around it, or of one inside it that the file has not."""
        for changed, assignment in reversed(self.settings.items()):
            around = path == changed or path.startswith((f"{changed}.", f"{changed}["))
            inside = changed.startswith((f"{path}.", f"{path}[")) and path and not self._in_file(path)
            if around or inside:
                return assignment
        return None

    def _in_file(self, path: str) -> bool:
        """Return whether the file itself has a value at exactly this path."""
        parent = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.document.place_of(path) != self.document.place_of(parent)


# Keys of which a job has exactly one. Whoever sets one on the command line means it in place of the file's.
_ONE_OF: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("spec", "training", "length"): ("steps", "tokens", "epochs"),
    ("spec", "training", "model"): ("preset", "architecture", "from", "source"),
}


def in_place_of_others(patch: dict[str, Any]) -> dict[str, Any]:
    """Return a merge patch on a spec with null for what each key of `_ONE_OF` in it stands in the place of."""
    for (_, *path), rivals in _ONE_OF.items():
        here: Any = patch
        for part in path:
            here = here.get(part) if isinstance(here, dict) else None
        if isinstance(here, dict) and any(here.get(key) is not None for key in rivals):
            here.update({key: None for key in rivals if key not in here})
    return patch


def read_job_file(source: str) -> JobFile:
    """Read a file, or standard input for `-`. Raises CliError (exit 2) that names line and column."""
    name = "standard input" if source == "-" else source
    document = _read(name, _bytes_of(source, name), "json" if source.endswith(".json") else "yaml")
    if not isinstance(document.data, dict):
        kind = "is empty" if document.data is None else "is not a mapping of keys to values"
        next_step = "a job file starts with `apiVersion`, `kind`, `metadata` and `spec`; see examples/"
        raise _bad(name, f"{name} {kind}", next_step)
    folder = Path.cwd() if source == "-" else Path(source).absolute().parent
    return JobFile(document.data, name, document, folder)


def set_value(file: JobFile, assignment: str) -> None:
    """Apply `--set path.to.key=value`; the value is YAML. `spec.` may be left out. Raises CliError."""
    path, equals, text = assignment.partition("=")
    if not equals or not path:
        raise _bad("--set", f"--set wants PATH=VALUE, not {assignment!r}", "--set training.length.steps=100")
    value = _read(f"--set {path}", text.encode(errors="surrogateescape"), "yaml").data
    parts: list[str | int] = [int(p) if p.isdigit() else p for p in re.findall(r"[^.\[\]]+", path)]
    if parts[0] not in ("spec", "metadata", "apiVersion", "kind", "sweep"):
        parts.insert(0, "spec")
    here: Any = file.data
    for index, part in enumerate(parts[:-1]):
        here = _step_into(here, part, parts[index + 1], path)
    _assign(here, parts[-1], value, path)
    _leave_out_rivals(here, parts)
    full = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    file.settings.pop(full, None)
    file.settings[full] = f"--set {assignment}"


def _leave_out_rivals(here: Any, parts: list[str | int]) -> None:
    """Take out what a file says in place of the key that was set, where a job has exactly one of several."""
    for place, rivals in _ONE_OF.items():
        if tuple(parts[:-1]) == place and parts[-1] in rivals:
            for rival in rivals:
                if rival != parts[-1] and rival in here:
                    del here[rival]


def explaining(faults: Sequence[DocumentFault]) -> str:
    """Return the next step after faults of a document: where the keys are listed that are known there, if one is not;
    else nothing."""
    unknown = next((fault.problem.path for fault in faults if fault.problem.message.startswith(UNKNOWN_KEY)), "")
    section = re.sub(r"\[\d+\]", "", unknown.rpartition(".")[0])
    return f"`muster explain {section.removeprefix('spec.')}` lists the keys of that section" if section else ""


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


def _bytes_of(source: str, name: str) -> bytes:
    try:
        if source == "-":
            return sys.stdin.buffer.read(BYTES_MAX + 1)
        with Path(source).open("rb") as file:
            return file.read(BYTES_MAX + 1)
    except OSError as error:
        raise _bad(name, f"can't read {name}: {(error.strerror or str(error)).lower()}", "") from None


def _read(name: str, raw: bytes, form: Any) -> Document:
    try:
        return read(raw, form)
    except DocumentError as error:
        place = error.place
        if place is None:
            raise _bad(name, f"{name} {error.message}", "") from None
        fault = DocumentFault(DocumentProblem("", error.message), place.line, place.column, error.excerpt)
        what = f"{name}, {error}"
        raise CliError(what, ExitStatus.USAGE, "bad-document", name, (fault,)) from None


def _bad(name: str, what: str, next_step: str) -> CliError:
    return CliError(what=what, exit_code=ExitStatus.USAGE, code="bad-document", file=name, next_step=next_step)
