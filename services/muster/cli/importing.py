"""`muster import`: the job of another launcher's document or command line, with what could not be carried over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.errors import CliError, ExitStatus, usage
from muster.cli.options import Json
from muster.cli.output import print_json, say

if TYPE_CHECKING:
    from muster.cli.foreign.jobs import ImportedJob
    from muster.words.base import DocumentProblem


def import_(
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="PyTorchJob, Kubeflow TrainJob or SkyPilot task; - reads standard input."),
    ] = None,
    torchrun: Annotated[
        str | None, typer.Option("--torchrun", metavar="LINE", help="A command line in place of a file.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file. Default: standard output.")
    ] = None,
    json: Json = False,
) -> None:
    """Write the job file of a PyTorchJob, Kubeflow TrainJob, SkyPilot task or torchrun command line.

    Names what could not be carried over, on standard error and at the file's beginning. Exit code 1 if the file has to
    be changed before it can be submitted.
    """
    from muster.documents.yaml_text import write_yaml

    if (file is None) == (torchrun is None):
        raise usage("give a file or --torchrun", 'muster import --torchrun "torchrun --nproc-per-node 8 train.py"')
    imported = _imported(file, torchrun)
    faults = _faults(imported)
    document = imported.document
    if json:
        print_json({"document": document, "left": imported.left, "problems": [str(fault) for fault in faults]})
    else:
        notes = [
            *(f"note: {sentence}" for sentence in imported.left),
            *(f"mend: {each}" for each in faults),
        ]
        for note in notes:
            say(note, "red" if note.startswith("mend") else "yellow")
        text = "".join(f"# {note}\n" for note in notes) + write_yaml(document)
        if output is None:
            typer.echo(text, nl=False)
        else:
            try:
                with output.open("x") as opened:
                    opened.write(text)
            except FileExistsError:
                raise usage(f"{output} is there already", "name another file, or remove it") from None
            say(f"Written to {output}; `muster submit {output} --dry-run` checks it.")
    if faults:
        raise typer.Exit(ExitStatus.FAILED)


def _imported(file: str | None, torchrun: str | None) -> ImportedJob:
    from muster.cli.foreign.jobs import NotReadable, import_document, import_torchrun
    from muster.cli.job_file import read_job_file

    name = "the command line" if file in (None, "-") else str(file)
    try:
        return import_document(read_job_file(file).data) if file is not None else import_torchrun(torchrun or "")
    except NotReadable as error:
        raise CliError(
            f"{name} {error}", ExitStatus.USAGE, "not-readable", next_step="docs/programs.md lists them"
        ) from None


def _faults(imported: ImportedJob) -> tuple[DocumentProblem, ...]:
    from muster.recipe.document import parse_job
    from muster.words.base import InvalidDocument

    try:
        parse_job(imported.document)
    except InvalidDocument as invalid:
        return invalid.problems
    return ()
