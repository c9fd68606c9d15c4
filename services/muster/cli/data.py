"""`muster data`: what a model will see of its data, before anything is paid for. The trainer's own code looks at it."""

from __future__ import annotations

import json as documents
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.cli.errors import CliError, ExitStatus, usage
from muster.cli.options import Json, Server, Settings, connect
from muster.cli.output import answers, print_json
from muster.cli.trainer_tool import run_tool
from muster.words.names import FILE_ID

if TYPE_CHECKING:
    from muster.cli.job_file import JobFile

app = typer.Typer(help="Inspect training data as the model will see it.", no_args_is_help=True)

READING_SECONDS = 1.0  # between two questions of how far the server is
JOB_BYTES_MAX = 1 << 20  # of a .json that may be a job's document
TOOL = "muster.trainer.train.inspection"

Target = Annotated[
    str,
    typer.Argument(metavar="FILE|JOB.yaml|JOB", help="Data (file, folder, glob, address), a job file, or a job."),
]
DataTarget = Annotated[
    str, typer.Argument(metavar="FILE|JOB.yaml", help="Data (file, folder, glob, address), or a job file.")
]
Model = Annotated[
    str | None, typer.Option("--model", help="For data: take tokenizer and chat template from this model's folder.")
]
TokenizerAddress = Annotated[
    str | None, typer.Option("--tokenizer", help="For data: `bytes` (default), or a tokenizer.json.")
]
Template = Annotated[str | None, typer.Option("--chat-template", help="For data: a Jinja file.")]
TemplateName = Annotated[
    str | None, typer.Option("--chat-template-name", help="For data: name of one of the tokenizer's templates.")
]
Evaluation = Annotated[
    list[str] | None,
    typer.Option(
        "--evaluation", metavar="FILE", help="For data: held-out data. Overlaps with the training data are reported."
    ),
]
Length = Annotated[int, typer.Option("--sequence-length", min=1, help="For data: tokens per sample.")]
DataFormat = Annotated[str, typer.Option("--format", help="For data: format, if it can't be detected.")]
Columns = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="OURS=THEIRS,…",
        help="For data: names of columns that differ from the format's: prompt=question,completion=answer.",
    ),
]
Field = Annotated[str, typer.Option("--field", help="For data: column that holds the text, for format jsonl.")]


@app.command("inspect")
def inspect(
    target: Target,
    samples: Annotated[int, typer.Option("--samples", "-n", min=0, help="Number of samples to show.")] = 2,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="Mark text that is trained on with ⟦ ⟧ instead of colour.")
    ] = False,
    model: Model = None,
    tokenizer: TokenizerAddress = None,
    chat_template: Template = None,
    chat_template_name: TemplateName = None,
    evaluation: Evaluation = None,
    sequence_length: Length = 2048,
    format: DataFormat = "auto",
    field: Field = "text",
    columns: Columns = None,
    settings: Settings = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Show counts, lengths, omitted records with reasons, and samples as the model sees them.

    The data are prepared as a job would prepare them; $MUSTER_CACHE_DIR caches the result. Green text is trained on.
    For a job, it shows the report and first samples that its first rank wrote. For a job file that names uploaded
    files, it shows what the server finds.
    """
    if evaluation and (_is_job(target) or _is_job_file(target)):
        raise _beside_a_job()
    if _is_job(target):
        return _show_kept(target, server, json, samples, no_color)
    if _is_job_file(target) and (file := _of_uploads(target, settings)) is not None:
        return _ask(file, server, json, samples, no_color)
    more = ["--samples", str(samples), *(["--no-color"] if no_color else [])]
    named = _named(model, tokenizer, chat_template, chat_template_name, evaluation or [])
    _run(target, settings, more, [*named, *_read_as(sequence_length, format, field, columns)])


@app.command("validate")
def validate(
    target: DataTarget,
    model: Model = None,
    tokenizer: TokenizerAddress = None,
    chat_template: Template = None,
    chat_template_name: TemplateName = None,
    evaluation: Evaluation = None,
    sequence_length: Length = 2048,
    format: DataFormat = "auto",
    field: Field = "text",
    columns: Columns = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Read all data as a job would. Exit code 0 if it is usable; 2 if not, with the file and line."""
    if evaluation and _is_job_file(target):
        raise _beside_a_job()
    named = _named(model, tokenizer, chat_template, chat_template_name, evaluation or [])
    _run(target, settings, [], [*named, *_read_as(sequence_length, format, field, columns)])


def _named(
    model: str | None,
    tokenizer: str | None,
    chat_template: str | None,
    chat_template_name: str | None,
    evaluation: list[str],
) -> list[str]:
    if model is not None and "://" not in model:
        model = str(Path(model).expanduser().absolute())  # the tool takes addresses, and no relative path is one
    given = {
        "--model": model,
        "--tokenizer": tokenizer,
        "--chat-template": chat_template,
        "--chat-template-name": chat_template_name,
    }
    options = [*((option, value) for option, value in given.items() if value is not None)]
    options += [("--evaluation", address) for address in evaluation]
    return [word for option in options for word in option]


def _read_as(sequence_length: int, format: str, field: str, columns: str | None) -> list[str]:
    """Raises CliError (exit 2) for columns that are no pairs."""
    named = ["--sequence-length", str(sequence_length), "--format", format, "--field", field]
    if columns is None:
        return named
    if not all(all(pair.partition("=")) for pair in columns.split(",")):
        raise usage(f"--columns is made of pairs, not {columns!r}", "--columns prompt=question,completion=answer")
    return [*named, "--columns", columns]


def _run(target: str, settings: list[str] | None, more: list[str], of_file: list[str]) -> None:
    if not _is_job_file(target):
        if settings:
            raise usage("--set changes a job's file, and this is data", "give --format, --model and their like")
        return run_tool("data", TOOL, target, *of_file, *more)
    from muster.cli import submit

    file = submit.prepare(target, None, settings or [], local=True)
    run_tool("data", TOOL, "--job", *more, given=documents.dumps(_training(file)))


def _beside_a_job() -> CliError:
    return usage("--evaluation stands beside data, and a job names its own", "leave it out, or name the data alone")


def _is_job_file(target: str) -> bool:
    """Return whether the file is a job document and not data: by its name, or for `.json` by its content."""
    if target == "-" or target.endswith((".yaml", ".yml")):
        return True
    path = Path(target)
    if not target.endswith(".json") or not path.is_file() or path.stat().st_size > JOB_BYTES_MAX:
        return False
    try:
        document = documents.loads(path.read_bytes())
    except ValueError:  # lines of JSON, or damaged: what it is the trainer's reader tells
        return False
    return isinstance(document, dict) and document.get("kind") == "TrainingJob"


def _is_job(target: str) -> bool:
    """Return whether the text is a job's name or id: it doesn't look like a path, and no such file exists."""
    return not set(target) & set("/.*:~") and target != "-" and not Path(target).exists()


def _training(file: JobFile) -> dict[str, Any]:
    """The training configuration of a job's document. Raises CliError with the line of every fault."""
    from muster.recipe.document import parse_job
    from muster.words.base import DocumentProblem, InvalidDocument, dump
    from muster.words.program import NO_DATA_TO_INSPECT

    try:
        spec = parse_job(file.data).spec
        if spec.training is None:
            raise InvalidDocument((DocumentProblem("spec.program", NO_DATA_TO_INSPECT),))
        return dump(spec.training)
    except InvalidDocument as invalid:
        faults = tuple(file.fault(problem) for problem in invalid.problems)
        what = f"the job is not valid: {invalid.problems[0]}"
        raise CliError(what, ExitStatus.USAGE, "invalid_job", file.name, faults) from None


def _show_kept(name: str, server: str | None, json: bool, samples: int, no_color: bool) -> None:
    with connect(server) as client:
        document = client.get(f"jobs/{client.job_id(name)}/data")
    _show(document, json, samples, no_color)


def _of_uploads(target: str, settings: list[str] | None) -> JobFile | None:
    """The job's document, where it names uploaded files, which are the server's to read."""
    from muster.cli import submit

    file = submit.prepare(target, None, settings or [], local=True)
    return file if any(FILE_ID.fullmatch(text) for text in _texts(file.data)) else None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _ask(file: JobFile, server: str | None, json: bool, samples: int, no_color: bool) -> None:
    from muster.cli.submit import placed

    with connect(server) as client, placed(file):
        while (answer := client.post("jobs:inspect", file.data))["state"] == "reading":
            time.sleep(READING_SECONDS)
    _show(answer["report"], json, samples, no_color)


def _show(document: dict[str, Any], json: bool, samples: int, no_color: bool) -> None:
    from muster.words.data_report import DataReport, report_lines
    from muster.words.shown_samples import sample_text

    if json:
        return print_json(document)
    report = DataReport.model_validate(document)
    colour = sys.stdout.isatty() and not no_color and not os.environ.get("NO_COLOR")
    answers().print("\n".join(report_lines(report)), soft_wrap=True)
    for number, sample in enumerate(report.shown[:samples]):
        typer.echo(f"\n{sample_text(number, sample, colour, sample.cut)}")
