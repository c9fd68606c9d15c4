"""Commands on files: data that is uploaded once and named by jobs, `file-…`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muster.cli.errors import CliError, ExitStatus
from muster.cli.options import Json, Project, Server, connect
from muster.cli.output import answers, json_wanted, print_json, say

if TYPE_CHECKING:
    from muster.cli.options import JobsClient
    from muster.client.connection import Connection

app = typer.Typer(help="Upload data once and refer to it in jobs as file-….", no_args_is_help=True)

Ids = Annotated[list[str], typer.Argument(metavar="FILE-ID…", help="Ids of files.")]
Id = Annotated[str, typer.Argument(metavar="FILE-ID", help="Id of a file.")]
PAGE_FILES = 500


@app.command("upload")
def upload(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Files of this machine.")],
    purpose: Annotated[
        str,
        typer.Option(
            "--purpose",
            help="fine-tune or evals: data, which is checked; source: a program's folder as tar.gz; "
            "user_data: anything else.",
        ),
    ] = "fine-tune",
    project: Project = None,
    expires: Annotated[
        float | None, typer.Option("--expires-hours", min=0.001, help="Delete the file this long after it is ready.")
    ] = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Upload files to the server and wait until they are checked. Workers read them from its storage.

    An interrupted upload resumes. Exit code 1 if the data is unusable, with its first bad line.
    """
    from muster.cli.uploading import send_file

    with connect(server) as client:
        sent = []
        for path in paths:
            lifetime = expires * 3600 if expires is not None else None
            sent.append(send_file(api(client), path, purpose, project, lifetime))
            if not json_wanted():
                typer.echo(sent[-1]["id"])
    if json:
        print_json(sent[0] if len(sent) == 1 else {"items": sent})
    if any(file["status"] == "failed" for file in sent):
        raise typer.Exit(ExitStatus.FAILED)


@app.command("ls")
def ls(
    project: Annotated[
        str | None, typer.Option("--project", metavar="NAME", help="Only files of this project.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Show at most this many.")] = 30,
    server: Server = None,
    json: Json = False,
) -> None:
    """List files, newest first, including uploads in progress."""
    with connect(server) as client:
        items: list[dict[str, Any]] = []
        cursor = None
        while len(items) < limit:
            page = client.get("files", project=project, limit=min(PAGE_FILES, limit - len(items)), cursor=cursor)
            items += page["items"]
            cursor = page["nextCursor"]
            if cursor is None:
                break
    if json:
        print_json({"items": items, "more": cursor is not None})
    elif not items:
        say("No files.")
    else:
        answers().print(_table(items), soft_wrap=True)


@app.command("get")
def get(
    file: Id,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Download to this path.")] = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Show a file: contents, check result and problems. With --output, download it."""
    from muster.cli.uploading import fetch_file

    with connect(server) as client:
        info = client.get(f"files/{file}")
        if output is not None:
            fetch_file(api(client), info, output)
    if json:
        print_json(info)
    elif output is None:
        answers().print(_details(info), soft_wrap=True)


@app.command("rm")
def rm(files: Ids, server: Server = None, json: Json = False) -> None:
    """Delete files and abandoned uploads. Refused while an unfinished job uses the file."""
    with connect(server) as client:
        for each in files:
            client.delete(f"files/{each}")
            say(f"{each} is deleted")
    if json:
        print_json({"deleted": files})


def api(client: JobsClient) -> Connection:
    """The connection to an API: a cluster itself keeps no files. Raises CliError."""
    from muster.client.connection import Connection

    if isinstance(client, Connection):
        return client
    what = "a cluster keeps no files: they are the API's"
    raise CliError(what, ExitStatus.USAGE, "no-files", next_step="leave --context out, and name the API with --server")


def _table(items: list[dict[str, Any]]) -> Any:
    from muster.cli import formatting
    from muster.cli.table import TextTable

    table = TextTable("id", "name", "purpose", "status", ">size", ">samples", "project")
    for file in items:
        samples = f"{file['samples']:,}" if file["samples"] is not None else formatting.NOTHING
        status = file["status"]
        if status == "uploading":
            status = f"uploading {100 * file['received'] // max(1, file['bytes'])}%"
        table.add_row(
            file["id"], file["name"], file["purpose"], status, formatting.size(file["bytes"]), samples, file["project"]
        )
    return table


def _details(file: dict[str, Any]) -> Any:
    from muster.cli import formatting
    from muster.cli.table import TextTable
    from muster.cli.uploading import contents_of

    table = TextTable("", "", header=False)
    table.add_row("file", f"{file['id']}  {file['name']}")
    table.add_row("status", file["status"] + (f": {file['fault']}" if file["fault"] else ""))
    table.add_row("for", f"{file['purpose']}, project {file['project']}, of {file['owner']}")
    table.add_row("size", f"{formatting.size(file['bytes'])} ({file['bytes']:,} bytes)")
    if file["samples"] is not None:
        table.add_row("holds", contents_of(file))
    if file["unchecked"]:
        table.add_row("not read through", file["unchecked"])
    if file["sha256"]:
        table.add_row("sha256", file["sha256"])
    if file["expiresAt"]:
        table.add_row("expires", file["expiresAt"])
    return table
