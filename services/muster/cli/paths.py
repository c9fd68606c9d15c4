"""Relative paths in a job file are relative to the file, as people expect; the workers start somewhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muster.cli.errors import CliError, Exit
from muster.cli.job_file import JobFile
from muster.contract.address import AddressError, parse_address


def make_absolute(file: JobFile, local: bool) -> None:
    """Make the relative paths of data sources, tokenizer, chat template and model absolute, in place.

    Raises CliError (exit 2) for a relative path where the server is not `local`, that is, on another machine.
    """
    for holder, key, path in _path_places(file.data):
        value = holder.get(key)
        if not isinstance(value, str) or not _is_relative(value):
            continue
        if not local:
            raise _unreachable(file, path, value)
        # Not resolved further: a glob is no file, and a link may be meant to change.
        holder[key] = str(file.folder / Path(value).expanduser())


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
    teacher = _mapping(_mapping(training.get("distillation")).get("teacher"))
    yield teacher, "source", "spec.training.distillation.teacher.source"
    if data.get("tokenizer") != "bytes":
        yield data, "tokenizer", "spec.training.data.tokenizer"
    yield data, "chatTemplate", "spec.training.data.chatTemplate"


def _is_relative(value: str) -> bool:
    try:
        address = parse_address(value)
    except AddressError:  # told with its place when the document is checked
        return False
    return address.scheme == "file" and not Path(address.path).is_absolute()


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _unreachable(file: JobFile, path: str, value: str) -> CliError:
    from muster.contract.base import Problem

    problem = Problem(path, f"{value!r} is relative to this file, and the server is another machine")
    return CliError(
        "a relative path does not reach the workers",
        Exit.USAGE,
        "relative-path",
        file.name,
        (file.fault(problem),),
        "put the data where the workers can read it, and name it by s3://…, file:///… or builtin://…",
    )
