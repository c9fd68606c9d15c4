"""A job as a program gives it (a mapping, text, a file, a model of the contract) as the document that is sent."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from muster.client.errors import InvalidRequest, MusterError
from muster.documents.document import Document, DocumentError
from muster.documents.reader import read, read_file
from muster.recipe.document import Submission, TrainingJob
from muster.words.address import AddressError, parse_address
from muster.words.base import DocumentProblem, dump
from muster.words.names import FILE_ID, Label
from muster.words.program import ARCHIVES

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_ENDINGS = (".json", ".model", ".tiktoken", ".jinja", ".txt")

JobSource: TypeAlias = Mapping[str, Any] | str | os.PathLike[str] | TrainingJob | Submission
"""A job: a mapping, YAML or JSON text (with a line break in it), the path of a file, or a model of the contract."""


@dataclass(frozen=True)
class JobDocument:
    """`data` is sent; `document` is the text that it was read from, if any, and `name` is the file's."""

    data: dict[str, Any]
    document: Document = field(default_factory=lambda: Document(None))
    name: str = ""

    def located(self, error: MusterError) -> MusterError:
        """The error with line and column of each place that it names."""
        error.problems = tuple(self.document.located(problem) for problem in error.problems)
        if self.name and error.problems:
            error.details = {**error.details, "file": self.name}
        return error


def job_document(
    job: JobSource, name: str | None = None, project: str | None = None, local: bool = True
) -> JobDocument:
    """The document, under another `name` or in a `project` where these are given.

    Relative paths are made absolute: those of a file by its folder, all others by the working directory. Raises
    InvalidRequest for text that can't be read, and for a relative path where the server is not `local`.
    """
    document, folder = _read(job)
    metadata = document.data.setdefault("metadata", {})
    if isinstance(metadata, dict):  # else the server says what is wrong with it
        metadata |= {"name": name} if name is not None else {}
        labels = metadata.setdefault("labels", {}) if project is not None else None
        if isinstance(labels, dict):
            labels[Label.PROJECT] = project
    for place in relative_paths(document.data):
        if (missing := missing_repository(place, folder)) is not None:
            raise document.located(missing)
        if not local:
            raise document.located(unreachable_path(place))
        place.make_absolute(folder)
    if (source := source_folder(document.data)) is not None:
        source.make_absolute(folder)  # it is uploaded in any case
    return document


def project_of(document: dict[str, Any]) -> str | None:
    """Return the project that the job's label names."""
    named = _mapping(_mapping(document.get("metadata")).get("labels")).get(Label.PROJECT)
    return named if isinstance(named, str) else None


def _read(job: JobSource) -> tuple[JobDocument, Path]:
    if isinstance(job, TrainingJob | Submission):
        return JobDocument(_document_of(job)), Path.cwd()
    if isinstance(job, Mapping):
        return JobDocument(copy.deepcopy(dict(job))), Path.cwd()
    name, folder = "", Path.cwd()
    try:
        if isinstance(job, str) and ("\n" in job or job.lstrip().startswith("{")):
            document = read(job.encode(), "yaml")
        elif isinstance(job, str | os.PathLike):
            path = Path(job).expanduser()
            name, folder = str(path), path.absolute().parent
            document = read_file(path)
        else:
            raise InvalidRequest(
                f"a job is a mapping, text, a path or a model, not {type(job).__name__}", "bad-document"
            )
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        next_step = "a text that holds the job itself has line breaks"
        raise InvalidRequest(f"can't read {name}: {reason}", "bad-document", next_step=next_step) from None
    except DocumentError as error:
        raise InvalidRequest(f"{name or 'the job'}, {error}", "bad-document") from None
    if not isinstance(document.data, dict):
        next_step = "a job has `metadata` and `spec`; see examples/"
        raise InvalidRequest(f"{name or 'the job'} is not a mapping of keys to values", "bad-document", (), next_step)
    return JobDocument(document.data, document, name), folder


def _document_of(job: TrainingJob | Submission) -> dict[str, Any]:
    if isinstance(job, Submission):
        metadata = {"name": job.name, "namespace": job.namespace, "labels": job.labels}
    else:
        metadata = {"name": job.metadata.name, "namespace": job.metadata.namespace, "labels": job.metadata.labels}
    return {"metadata": {key: value for key, value in metadata.items() if value}, "spec": dump(job.spec)}


@dataclass(frozen=True)
class RelativePath:
    """A relative path `value` at `holder[key]`; `path` is its place in the document."""

    holder: dict[str, Any]
    key: str
    path: str
    value: str

    @property
    def purpose(self) -> str | None:
        """Return the purpose with which the path's file may be uploaded; None for a model, which is no single file."""
        if self.path.startswith("spec.training.data.train"):
            return "fine-tune"
        if self.path.startswith("spec.training.evaluation"):
            return "evals"
        return "user_data" if self.path.startswith("spec.training.data.") else None

    def make_absolute(self, folder: Path) -> None:
        # Not resolved further: a glob is no file, and a link may be meant to change.
        self.holder[self.key] = str(folder / Path(self.value).expanduser())


def relative_paths(document: dict[str, Any]) -> Iterator[RelativePath]:
    """The relative paths of data sources, tokenizer, chat template and model."""
    for holder, key, path in _path_places(document):
        value = holder.get(key)
        if isinstance(value, str) and _is_relative(value):
            yield RelativePath(holder, key, path, value)


def source_folder(document: dict[str, Any]) -> RelativePath | None:
    """The folder of this machine that a program's source is, or None: an uploaded file's id and the address of an
    archive are none."""
    program = _mapping(_mapping(document.get("spec")).get("program"))
    value = program.get("source")
    if not isinstance(value, str) or FILE_ID.fullmatch(value):
        return None
    try:
        address = parse_address(value)
    except AddressError:  # told with its place when the document is checked
        return None
    if address.scheme != "file" or (address.is_absolute and address.path.endswith(ARCHIVES)):
        return None
    return RelativePath(program, "source", "spec.program.source", address.path)


def missing_repository(place: RelativePath, folder: Path) -> InvalidRequest | None:
    """Return the error for a model or a tokenizer that is named as on the Hugging Face hub, `owner/name`, where there
    is no such folder; None for any other path."""
    if not place.path.endswith((".model.source", ".teacher.source", ".rewardModel.source", ".tokenizer")):
        return None
    if not _REPOSITORY.fullmatch(place.value) or Path(place.value).suffix in _FILE_ENDINGS:
        return None
    if (folder / place.value).exists():
        return None
    problem = DocumentProblem(place.path, f"there is no folder {place.value} next to this file")
    next_step = f"for the repository of the Hugging Face hub write hf://{place.value}"
    return InvalidRequest(f"{place.value} is no folder", "no-such-folder", (problem,), next_step)


def unreachable_path(place: RelativePath) -> InvalidRequest:
    """Return the message for a server on another machine."""
    problem = DocumentProblem(
        place.path, f"{place.value!r} is relative to this file, and the server is another machine"
    )
    next_step = (
        "`muster submit` uploads single files, and `muster files upload` gives an id that jobs name; or put the data "
        "where the workers can read it, and name it by s3://…, file:///… or builtin://…"
    )
    return InvalidRequest("a relative path does not reach the workers", "relative-path", (problem,), next_step)


def _path_places(document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """(mapping, key, path) of each place that may hold a path. Nothing is checked yet, so anything may be there."""
    training = _mapping(_mapping(document.get("spec")).get("training"))
    data, evaluation = _mapping(training.get("data")), _mapping(training.get("evaluation"))
    lists = [
        (data.get("train"), "spec.training.data.train"),
        (evaluation.get("data"), "spec.training.evaluation.data"),
        *(
            (_mapping(each).get("data"), f"spec.training.evaluation.sets.{name}.data")
            for name, each in _mapping(evaluation.get("sets")).items()
        ),
    ]
    for sources, path in lists:
        for index, source in enumerate(sources if isinstance(sources, list) else ()):
            yield _mapping(source), "source", f"{path}[{index}].source"
    yield _mapping(training.get("model")), "source", "spec.training.model.source"
    for of, name in (("distillation", "teacher"), ("grpo", "rewardModel")):
        second = _mapping(_mapping(training.get(of)).get(name))
        yield second, "source", f"spec.training.{of}.{name}.source"
    if data.get("tokenizer") != "bytes":
        yield data, "tokenizer", "spec.training.data.tokenizer"
    yield data, "chatTemplate", "spec.training.data.chatTemplate"


def _is_relative(value: str) -> bool:
    if FILE_ID.fullmatch(value):  # of an uploaded file
        return False
    try:
        address = parse_address(value)
    except AddressError:  # told with its place when the document is checked
        return False
    return address.scheme == "file" and not Path(address.path).is_absolute()


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
