"""Commands on checkpoints. The trainer's tool, run as a process, reads the bytes: this module knows no tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.cli.errors import CliError, ExitStatus, usage
from muster.cli.formatting import size
from muster.cli.options import Json, Server, connect
from muster.cli.output import answers, print_json, say
from muster.cli.trainer_tool import run_tool

if TYPE_CHECKING:
    from muster.cli.options import JobsClient

LOOKED_AT_MAX = 20  # jobs of one name
STEPS_NAMED_MAX = 12

app = typer.Typer(help="List and manage a job's checkpoints.", no_args_is_help=True)

Where = Annotated[
    str,
    typer.Argument(metavar="JOB|FOLDER", help="Name or id of a job, or a job's checkpoint folder (file://…, s3://…)."),
]
Step = Annotated[int, typer.Argument(min=0, help="Step of the checkpoint.")]
MaybeStep = Annotated[int | None, typer.Argument(min=0, help="Step of the checkpoint.")]


@app.command("ls")
def ls(where: Where, server: Server = None, json: Json = False) -> None:
    """List a job's checkpoints, oldest first."""
    from muster.cli.render import checkpoints_table

    if is_folder(where):
        return run_tool("checkpoint", "muster.trainer.checkpoint", "ls", where)
    with connect(server) as client:
        document = client.get(f"jobs/{client.job_id(where)}/checkpoints")
    if json:
        print_json(document)
    elif not document["items"]:
        say(document.get("reason") or "No checkpoint yet.")
    else:
        answers().print(checkpoints_table(document), soft_wrap=True)
        say(f"in {document['uri']}", "dim")


@app.command("inspect")
def inspect(where: Where, step: MaybeStep = None, server: Server = None, json: Json = False) -> None:
    """Show the contents of one checkpoint. Default: the newest."""
    from muster.cli.render import show_commit

    if is_folder(where):
        return _run("inspect", where, step, server)
    with connect(server) as client:
        document = client.get(f"jobs/{client.job_id(where)}/checkpoints/{'last' if step is None else step}")
    print_json(document) if json else show_commit(document)


@app.command("verify")
def verify(where: Where, step: MaybeStep = None, server: Server = None, json: Json = False) -> None:
    """Read every byte of one checkpoint, or of all of them, and compare checksums."""
    _run("verify", where, step, server)


@app.command("pin")
def pin(where: Where, step: Step, server: Server = None, json: Json = False) -> None:
    """Keep a checkpoint regardless of the retention policy."""
    _mark("pin", where, step, server, json)


@app.command("unpin")
def unpin(where: Where, step: Step, server: Server = None, json: Json = False) -> None:
    """Unpin a checkpoint."""
    _mark("unpin", where, step, server, json)


@app.command("rm")
def rm(
    where: Where,
    step: Step,
    force: Annotated[
        bool, typer.Option("--force", help="Delete it even if it is the newest, pinned or being read.")
    ] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Delete a checkpoint."""
    _run("rm", where, step, server, *(["--force"] if force else []))


def export(
    where: Where,
    to: Annotated[Path, typer.Option("--to", help="Folder to create.")],
    step: Annotated[str, typer.Option("--step", help="best, last or a number.")] = "best",
    dtype: Annotated[str, typer.Option("--dtype", help="keep or bf16.")] = "keep",
    form: Annotated[str, typer.Option("--format", help="transformers (or hf), or peft.")] = "transformers",
    ema: Annotated[
        bool, typer.Option("--ema", help="Export the moving average of the weights (EMA), if the job kept one.")
    ] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Export a checkpoint as a Hugging Face transformers model, or its adapter as a peft one.

    A server on another machine makes the model and sends it. Run the same command again to resume an interrupted
    download.

    --format transformers writes the whole model with the adapter merged into it. --format peft writes the adapter,
    together with its base model unless that is a folder or a hub repository.
    """
    form = "transformers" if form == "hf" else form
    if not is_folder(where) and (exported := _fetched(where, to, step, server, format=form, dtype=dtype, ema=ema)):
        print_json(exported) if json else say(f"{to}: {size(exported['total'])}, step {exported['step']} of {where}")
        return
    command = ["--checkpoint", folder_of(where, server, step), "--to", str(to), "--step", step, "--dtype", dtype]
    run_tool("checkpoint", "muster.trainer.convert.export", *command, "--format", form, *(["--ema"] if ema else []))


def _fetched(where: str, to: Path, step: str, server: str | None, **form: Any) -> dict[str, Any] | None:
    """The model that a server on another machine has made and sent; None where it is to be made here."""
    from muster.cli.uploading import fetch_export
    from muster.client.connection import Connection
    from muster.client.errors import MusterError

    with connect(server) as client:
        if client.server.local or not isinstance(client, Connection):
            return None
        job_id = client.job_id(where)
        _refuse_without_commit(client, where, job_id)
        try:
            return fetch_export(client, job_id, step, to, **form)
        except MusterError as error:
            if error.code != "export_unavailable":
                raise
            say(f"{error.what} It is made here.", "yellow")
            return None


def _mark(verb: str, where: str, step: int, server: str | None, json: bool) -> None:
    if is_folder(where):
        return _run(verb, where, step, server)
    with connect(server) as client:
        document = client.post(f"jobs/{client.job_id(where)}/checkpoints/{step}:{verb}")
    if json:
        print_json(document)
    else:
        state = "pinned" if document["pinned"] else "not pinned"
        say(f"Step {step} is {state}{'' if document['changed'] else ', as before'}.")


def _run(action: str, where: str, step: int | None, server: str | None, *more: str) -> None:
    run_tool(
        "checkpoint",
        "muster.trainer.checkpoint",
        action,
        folder_of(where, server),
        *([str(step)] if step is not None else []),
        *more,
    )


def must_be_committed(client: JobsClient, job_id: str, name: str, step: int) -> None:
    """Raise CliError for a step of which the job has no checkpoint, naming those that there are."""
    steps = [item["step"] for item in client.get(f"jobs/{job_id}/checkpoints")["items"]]
    if step in steps:
        return
    there = ", ".join(map(str, steps[-STEPS_NAMED_MAX:]))
    more = f"the newest of {len(steps)}: " if len(steps) > STEPS_NAMED_MAX else ""
    raise CliError(
        f"{name} has no checkpoint of step {step}",
        ExitStatus.FAILED,
        "no-such-step",
        next_step=f"it has checkpoints of the steps {more}{there}; --step best takes the best" if steps else "",
    )


def _refuse_without_commit(client: JobsClient, name: str, job_id: str) -> None:
    """A name means the newest job of that name. An older one with commits is offered by its id, never taken instead."""
    from muster.words.text import plural

    if client.get(f"jobs/{job_id}")["status"].get("checkpoint"):
        return
    older = [
        job
        for page in client.job_pages(LOOKED_AT_MAX, name=name)
        for job in page
        if job["id"] != job_id and job["checkpointStep"] is not None
    ]
    if not older:
        return  # the folder itself may still hold one that the operator has not told of yet
    ids = ", ".join(f"{job['id']} (step {job['checkpointStep']})" for job in older[:3])
    raise CliError(
        f"{name} means the newest job of that name ({job_id}), which has no checkpoint yet",
        code="no-checkpoints",
        next_step=f"name the job by its id: {plural(len(older), 'older job')} of that name with checkpoints: {ids}",
    )


def is_folder(where: str) -> bool:
    return "/" in where or where.startswith((".", "~"))


def folder_of(where: str, server: str | None, step: str = "") -> str:
    """The checkpoint folder of a job, or the folder that is named itself. Raises CliError where there is none, and for
    the number of a `step` of which the job has no checkpoint."""
    if is_folder(where):
        return where
    from muster.words.address import parse_address  # pydantic is not for --help to wait for

    with connect(server) as client:
        job_id = client.job_id(where)
        folder = client.get(f"jobs/{job_id}/checkpoints")["uri"]
        _refuse_without_commit(client, where, job_id)
        if not folder:
            raise CliError(f"{where} has no checkpoint folder yet", code="no-checkpoints")
        if step.isdecimal():
            must_be_committed(client, job_id, where, int(step))
        if parse_address(folder).scheme == "file" and not client.server.local:
            raise usage(
                f"the checkpoints of {where} are in {folder}, a folder of the server's machine", "run this there"
            )
    return str(folder)
