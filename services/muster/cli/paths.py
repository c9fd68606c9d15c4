"""Relative paths in a job file are relative to the file, as people expect; the workers start somewhere else."""

from __future__ import annotations

from muster.cli.errors import CliError, Exit
from muster.cli.job_file import JobFile
from muster.client.documents import relative_paths, unreachable_path


def make_absolute(file: JobFile, local: bool) -> None:
    """Make the relative paths of data sources, tokenizer, chat template and model absolute, in place.

    Raises CliError (exit 2) for a relative path where the server is not `local`, that is, on another machine.
    """
    for place in relative_paths(file.data):
        if not local:
            error = unreachable_path(place)
            faults = tuple(file.fault(problem) for problem in error.problems)
            raise CliError(error.what, Exit.USAGE, error.code, file.name, faults, error.next_step)
        place.make_absolute(file.folder)
