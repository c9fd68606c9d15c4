"""Commands on sweeps: many jobs of one document, which differ in a few fields, and the best of them."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from muster.cli.errors import CliError, ExitStatus
from muster.cli.options import Json, Project, Server, Settings, command_prefix, connect
from muster.cli.output import answers, json_wanted, print_json, say

if TYPE_CHECKING:
    from muster.cli.options import JobsClient
    from muster.cli.table import TextTable
    from muster.client.connection import Connection

FOLLOW_SECONDS = 2.0  # between looks; trials take minutes


class _FileIsCreate(TyperGroup):
    """`muster sweep FILE` is `muster sweep create FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["create", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_FileIsCreate,
    help="Run many jobs from one document and find the best. `muster sweep FILE` creates a sweep.",
    no_args_is_help=True,
)

Sweep = Annotated[str, typer.Argument(metavar="SWEEP", help="Name or id of a sweep.")]
Follow = Annotated[
    bool, typer.Option("--follow", "-f", "--wait", "-w", help="Follow the job to its end; its result is the exit code.")
]


@app.command("create")
def create(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A job file with `sweep:` above its spec; - reads standard input.")
    ],
    name: Annotated[str | None, typer.Option("--name", help="The name to use instead of the file's.")] = None,
    project: Project = None,
    settings: Settings = None,
    follow: Follow = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Check every trial of a sweep file and create the sweep. Ctrl-C while watching doesn't stop it."""
    from muster.cli.submit import placed, prepare

    with connect(server) as client:
        api(client)
        document = prepare(file, name, settings or [], client.server.local, project, sweep=True)
        with placed(document):
            sweep = client.post("sweeps", document.data, key=str(uuid.uuid4()))
        say(f"Created {sweep['name']} ({sweep['id']}): {sweep['trials']} trials", "bold green")
        if follow:
            raise typer.Exit(_follow(client, sweep))
        if json:
            print_json(sweep)
            return
        say(f"  {command_prefix()} sweep get {sweep['name']} --follow    watch it")
        say(f"  {command_prefix()} sweep cancel {sweep['name']}          end it")


@app.command("ls")
def ls(
    project: Annotated[
        str | None, typer.Option("--project", metavar="NAME", help="Only sweeps of this project.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Show at most this many.")] = 30,
    server: Server = None,
    json: Json = False,
) -> None:
    """List sweeps, the newest first."""
    from muster.client.operations import pages

    with connect(server) as client:
        items = [line for page in api(client).walk(pages(limit, {"project": project}, "sweeps")) for line in page]
    if json:
        print_json({"items": items})
    elif not items:
        say("No sweeps.")
    else:
        answers().print(_lines(items), soft_wrap=True)


@app.command("get")
def get(sweep: Sweep, follow: Follow = False, server: Server = None, json: Json = False) -> None:
    """Show a sweep: its trials and their results, and the best checkpoint as a `model.from` to paste."""
    from muster.client.sweep_operations import get as steps

    with connect(server) as client:
        document = api(client).run(steps(sweep))
        if follow:
            raise typer.Exit(_follow(client, document))
    show(document)


@app.command("cancel")
def cancel(sweep: Sweep, server: Server = None, json: Json = False) -> None:
    """Start no more trials and cancel the running ones. Their checkpoints stay."""
    from muster.client.sweep_operations import find

    with connect(server) as client:
        sweep_id = api(client).run(find(sweep))
        document = client.post(f"sweeps/{sweep_id}:cancel")
    if json:
        print_json(document)
    say(f"{document['name']} is being cancelled: {document['live']} of its trials end")


def api(client: JobsClient) -> Connection:
    """The connection to an API: a cluster itself knows no sweeps. Raises CliError."""
    from muster.client.connection import Connection

    if isinstance(client, Connection):
        return client
    what = "a cluster knows no sweeps: they are the API's, which makes their jobs"
    raise CliError(what, ExitStatus.USAGE, "no-sweeps", next_step="leave --context out, and name the API with --server")


def _follow(client: JobsClient, sweep: dict[str, Any]) -> int:
    """Say what changes until the sweep has ended; the exit code."""
    from muster.client.sweep_operations import ENDED

    reported = ""
    while True:
        if (news := f"{sweep['phase']}: {sweep['because']}{_describe_best(sweep)}") != reported and not json_wanted():
            say(news)
        reported = news
        if sweep["phase"] in ENDED:
            show(sweep)
            return int(ExitStatus.OK if sweep["phase"] == "Succeeded" else ExitStatus.FAILED)
        time.sleep(FOLLOW_SECONDS)
        sweep = client.get(f"sweeps/{sweep['id']}")


def _describe_best(sweep: dict[str, Any]) -> str:
    if sweep["bestTrial"] is None:
        return ""
    return f"; best {sweep['metric']['name']} {sweep['bestValue']:.6g} by trial {sweep['bestTrial']}"


def show(sweep: dict[str, Any]) -> None:
    """The sweep as it is wanted: JSON, or what it is and the table of its trials."""
    if json_wanted():
        print_json(sweep)
        return
    answers().print(_details(sweep), soft_wrap=True)
    if sweep["table"]:
        answers().print("")
        answers().print(_trials(sweep), soft_wrap=True)


def _details(sweep: dict[str, Any]) -> TextTable:
    from muster.cli.table import TextTable

    table, metric, best = TextTable("", "", header=False), sweep["metric"], sweep["best"]
    table.add_row("sweep", f"{sweep['name']}  ({sweep['id']})")
    table.add_row("project", f"{sweep['project']}, of {sweep['owner']}")
    table.add_row("phase", f"{sweep['phase']}: {sweep['because']}")
    table.add_row("metric", f"{metric['name']}, the {metric['better']} the better")
    if best is not None:
        table.add_row("best", f"trial {best['trial']}: {best['value']:.6g} at step {best['valueStep']}")
        table.add_row("", ", ".join(f"{path}={value}" for path, value in best["parameters"].items()))
        if (commit := best["commit"]) is not None:
            table.add_row("its checkpoint", f"model: {{from: {{job: {commit['job']}, step: {commit['step']}}}}}")
    return table


def _trials(sweep: dict[str, Any]) -> TextTable:
    from muster.cli import formatting
    from muster.cli.table import StyledCell, TextTable

    paths = list(sweep["sweep"]["parameters"])
    table = TextTable(
        ">trial", *(f">{_short(path, paths)}" for path in paths), "phase", ">step", ">best", "job", "why it stopped"
    )
    for trial in sweep["table"]:
        style = "bold green" if trial["number"] == sweep["bestTrial"] else ""
        values = [_value(trial["parameters"].get(path)) for path in paths]
        step = formatting.NOTHING if trial["step"] is None else f"{trial['step']}/{trial['steps'] or '?'}"
        best = formatting.NOTHING if trial["value"] is None else f"{trial['value']:.6g}"
        cells = [str(trial["number"]), *values, trial["phase"], step, best, trial["job"] or formatting.NOTHING]
        table.add_row(*(StyledCell(cell, style) if style else cell for cell in cells), trial["reason"] or "")
    return table


def _short(path: str, paths: list[str]) -> str:
    """The last word of a path, if that distinguishes the parameters."""
    last = path.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in paths) == 1 else path


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _lines(items: list[dict[str, Any]]) -> TextTable:
    from muster.cli import formatting
    from muster.cli.table import TextTable

    table = TextTable("name", "phase", ">trials", ">best", "project", "created", "id")
    for sweep in items:
        best = formatting.NOTHING if sweep["bestValue"] is None else f"{sweep['bestValue']:.6g}"
        trials = f"{sweep['started']}/{sweep['trials']}"
        created = formatting.moment(sweep["createdAt"])
        table.add_row(sweep["name"], sweep["phase"], trials, best, sweep["project"], created, sweep["id"])
    return table
