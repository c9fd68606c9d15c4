"""Commands on a project's secrets. A value comes from standard input or a file, never from the command line, where
other users of the machine and the shell's history would see it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from muster.cli import formatting
from muster.cli.errors import usage
from muster.cli.options import Json, Project, Server, connect, project_of
from muster.cli.output import answers, print_json, say
from muster.cli.table import TextTable

app = typer.Typer(help="Secrets: values that a project's jobs read and that are never shown.", no_args_is_help=True)

KEY = "value"
Name = Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits and dashes.")]


@app.command("set")
def set_secret(
    name: Name,
    key: Annotated[str, typer.Option("--key", help="Name of the entry, for a value from standard input.")] = KEY,
    from_file: Annotated[
        list[str] | None,
        typer.Option(
            "--from-file", metavar="[KEY=]PATH", help="Read a value from a file instead; repeat it for several entries."
        ),
    ] = None,
    project: Project = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Set a secret, from standard input or files: `muster secrets set hf-token < token`. For maintainers.

    All entries are replaced. One trailing newline of a value is removed. A job reads it with
    `runtime.env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hf-token, key: value}}}]`, or all of its entries by
    `runtime.envFrom: [{secretRef: {name: hf-token}}]`.
    """
    data = dict(_from_file(each) for each in from_file) if from_file else {key: _from_input(name)}
    with connect(server) as client:
        made = client.put(f"projects/{project_of(client, project)}/secrets/{name}", {"data": data})
    if json:
        print_json(made)
    say(f"secret {name} is set ({', '.join(made['keys'])}); workers that start from now on get it", "bold green")


@app.command("ls")
def ls(project: Project = None, server: Server = None, json: Json = False) -> None:
    """List a project's secrets: names, entries, who set them and when. Values are never shown."""
    with connect(server) as client:
        secrets = client.get(f"projects/{project_of(client, project)}/secrets")
    if json:
        print_json(secrets)
        return
    table = TextTable("NAME", "ENTRIES", "SET BY", "SET")
    for secret in secrets["items"]:
        at = formatting.moment(secret["changedAt"])
        table.add_row(secret["name"], ",".join(secret["keys"]), secret["changedBy"], at)
    answers().print(table, soft_wrap=True)


@app.command("rm")
def rm(name: Name, project: Project = None, server: Server = None, json: Json = False) -> None:
    """Delete a secret. Jobs that use it can't start any more; running jobs keep its value. For maintainers."""
    with connect(server) as client:
        client.delete(f"projects/{project_of(client, project)}/secrets/{name}")
    if json:
        print_json({"name": name, "deleted": True})
    say(f"secret {name} is gone")


def _from_input(name: str) -> str:
    if sys.stdin.isatty():
        return str(typer.prompt(f"Value of {name}", hide_input=True, err=True))
    return _text(sys.stdin.buffer.read(), "standard input")


def _from_file(given: str) -> tuple[str, str]:
    key, equals, path = given.partition("=")
    file = Path(path if equals else given)
    try:
        return key if equals else file.name, _text(file.read_bytes(), str(file))
    except OSError as error:
        raise usage(f"can't read {file}: {(error.strerror or str(error)).lower()}", code="no-file") from None


def _text(content: bytes, where: str) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise usage(f"{where} is no text in UTF-8, as a variable must be", code="bad-secret") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise usage(f"{where} is empty, and a secret needs a value", "muster secrets set NAME < FILE", "bad-secret")
    return text
