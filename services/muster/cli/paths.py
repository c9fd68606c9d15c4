"""Relative paths in a job file are relative to the file, as people expect; the workers start somewhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from muster.cli.errors import CliError, ExitStatus
from muster.cli.job_file import JobFile
from muster.client.documents import RelativePath, missing_repository, relative_paths, unreachable_path
from muster.client.errors import InvalidRequest

Send = Callable[[dict[Path, str]], dict[Path, str]]
"""Uploads files, each for its purpose, and gives the id of each."""


def make_absolute(file: JobFile, local: bool, send: Send | None = None) -> None:
    """Make the relative paths of data sources, tokenizer, chat template and model absolute, in place. Where the server
    is not `local`, that is, on another machine, files are uploaded by `send` instead, and named by their ids.

    Raises CliError (exit 2) for a model that is named as on the hub and is no folder here, and for a relative path that
    can't reach such a server: without `send`, and for what is no single file or is a model.
    """
    places = list(relative_paths(file.data))
    for place in places:
        if (missing := missing_repository(place, file.folder)) is not None:
            raise _with_lines(file, missing)
    if local:
        for place in places:
            place.make_absolute(file.folder)
        return
    purposes: dict[Path, str] = {}
    for place in places:
        path, purpose = _path_of(file, place), place.purpose
        if send is None or purpose is None or not path.is_file():
            raise _with_lines(file, unreachable_path(place))
        purposes.setdefault(path, purpose)
    if send is None or not purposes:
        return
    ids = send(purposes)
    for place in places:
        place.holder[place.key] = ids[_path_of(file, place)]


def _path_of(file: JobFile, place: RelativePath) -> Path:
    return file.folder / Path(place.value).expanduser()


def _with_lines(file: JobFile, error: InvalidRequest) -> CliError:
    faults = tuple(file.fault(problem) for problem in error.problems)
    return CliError(error.what, ExitStatus.USAGE, error.code, file.name, faults, error.next_step)
