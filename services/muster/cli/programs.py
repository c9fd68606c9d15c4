"""Commands on programs of one's own: run, import, shell, port-forward."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.cli.errors import ExitStatus, usage
from muster.cli.jobs import Hold
from muster.cli.options import Json, Project, Server, Settings, connect
from muster.cli.output import print_json, say

if TYPE_CHECKING:
    from muster.cli.foreign.torchrun import ProgramCommand
    from muster.cli.job_file import JobFile
    from muster.cli.options import JobsClient

_SUFFIX_BYTES = 2
_NAME_LENGTH = 40


def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND…", help="The command, after `--`: -- python train.py …")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="GPUs of each worker; 0: CPUs.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Number of workers.")] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="Ranks of each worker, where it has no GPUs.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the job. Default: the script's, with a few letters.")
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", help="Image of the workers, in a cluster. Default: the platform's.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--source", help="Folder that is uploaded. Default: the working directory.")
    ] = None,
    once_per_worker: Annotated[
        bool, typer.Option("--once-per-worker", help="Start the command once per worker, not once per rank.")
    ] = False,
    project: Project = None,
    settings: Settings = None,
    hold: Hold = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Submit, and don't follow the log.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan without submitting.")] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Run a command on the platform with this folder's code, and follow its log: muster run --gpus 8 -- python train.py

    The folder is uploaded once for the same content, without what .gitignore names. torchrun is not needed: each GPU
    has a rank with torchrun's variables. Ctrl-C leaves the job alone. The job's result is the exit code.
    """
    from muster.cli import submit as story
    from muster.cli.holding import hold_gang
    from muster.cli.job_file import set_value
    from muster.cli.source import packed_source

    if (command is None) == (hold is None):
        raise usage("give a command after `--`, or --hold TIME", "muster run --gpus 1 -- python train.py")
    document = _document(_command(command or ["sleep"]), gpus, nodes, processes, name, image, once_per_worker)
    document.data["spec"]["program"]["source"] = str((source or Path.cwd()).absolute())
    for assignment in settings or []:
        set_value(document, assignment)
    if project is not None:
        from muster.words.names import Label

        document.data["metadata"]["labels"] = {str(Label.PROJECT): project}
    if hold is not None:
        hold_gang(document, hold)
    with connect(server) as client:
        with packed_source(document, client) as packed:
            plan = story.request_plan(client, document)
            if dry_run and json:
                print_json(plan)
            elif dry_run:
                story.show_plan(plan)
            else:
                story.show_warnings(plan)
            if packed is not None:
                packed.show()
            if dry_run:
                return
            if packed is not None:
                packed.upload(client, project)
            job = story.send(client, document)
        if detach or json or hold is not None:
            story.announce(job)
            return
        ended = _follow(client, job, several=nodes not in (None, 1))
    if ended["status"]["phase"] != "Succeeded":
        _show_end(ended)
        raise typer.Exit(ExitStatus.FAILED)


def _follow(client: JobsClient, job: dict[str, Any], several: bool) -> dict[str, Any]:
    """Follow the log of a job until it has ended, and return the job then. Ctrl-C leaves the job alone."""
    from muster.cli.follow import follow_log

    name, job_id = job["metadata"]["name"], job["id"]
    say(f"Submitted {name} ({job_id}); Ctrl-C leaves it running", "bold green")
    try:
        follow_log(client, job_id, {"worker": "all" if several else "0"}, several)
    except KeyboardInterrupt:
        say(f"\nDetached; {name} continues. `muster logs {name} -f` follows it again.")
        raise typer.Exit(ExitStatus.INTERRUPTED) from None
    ended: dict[str, Any] = client.get(f"jobs/{job_id}")
    return ended


def _show_end(job: dict[str, Any]) -> None:
    from muster.cli.render import show_failure

    status = job["status"]
    say(f"{job['metadata']['name']}: {status['phase']}: {status['because']}", "red")
    if failure := status.get("lastFailure"):
        show_failure(failure)


def _command(words: list[str]) -> ProgramCommand:
    from muster.cli.foreign.torchrun import read_words

    try:
        command = read_words(words)
    except ValueError as error:
        raise usage(str(error), "muster run -- torchrun --nproc-per-node 2 train.py") from None
    for sentence in command.left:
        say(f"warning: {sentence}", "yellow")
    return command


def _document(
    command: ProgramCommand,
    gpus: int | None,
    nodes: int | None,
    processes: int | None,
    name: str | None,
    image: str | None,
    once_per_worker: bool,
) -> JobFile:
    """The document of a command. What its own torchrun says of nodes and ranks holds where no option does."""
    from muster.cli.job_file import JobFile

    gang: dict[str, Any] = {"nodes": nodes or _nodes_of(command), "gpusPerNode": gpus or 0}
    ranks = processes or command.ranks
    if not gpus and ranks is not None:
        gang["processesPerNode"] = ranks
    elif gpus and ranks not in (None, gpus):
        raise usage(f"{ranks} ranks of a worker with {gpus} GPUs", "give as many GPUs as ranks, or leave ranks out")
    program = command.program | ({"launcher": "none"} if once_per_worker else {})
    spec: dict[str, Any] = {"program": program, "gang": gang} | ({"runtime": {"image": image}} if image else {})
    return JobFile({"metadata": {"name": name or _name(command.words)}, "spec": spec}, "the command line")


def _nodes_of(command: ProgramCommand) -> Any:
    if isinstance(command.nodes, tuple):
        return {"min": command.nodes[0], "max": command.nodes[1]}
    return command.nodes or 1


def _name(words: tuple[str, ...]) -> str:
    """A name that is most likely free: the script's, with a few random letters."""
    script = next((word for word in words if word.endswith(".py")), words[-1] if words[0] == "-m" else words[0])
    stem = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")[:_NAME_LENGTH].strip("-")
    stem = stem if stem[:1].isalpha() else f"run-{stem}".strip("-")
    return f"{stem}-{secrets.token_hex(_SUFFIX_BYTES)}"
