"""Commands on tokens: who may ask the API, and for what. They need a token with the scope admin."""

from __future__ import annotations

import uuid
from enum import StrEnum
from typing import Annotated, Any

import typer

from muster.cli import formatting
from muster.cli.errors import CliError
from muster.cli.options import Json, Server, connect
from muster.cli.output import answers, print_json, say
from muster.cli.table import TextTable

app = typer.Typer(help="Create, list, rotate and revoke API tokens.", no_args_is_help=True)


class Scope(StrEnum):
    """Each includes those before it."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="A name for the list: who uses it, or for what.")],
    scope: Annotated[Scope, typer.Option("--scope", help="Each includes those before it.")] = Scope.WRITE,
    days: Annotated[
        int | None, typer.Option("--days", min=1, max=3650, help="Expires after this many days; default: never.")
    ] = None,
    person: Annotated[
        str | None, typer.Option("--person", metavar="NAME", help="The person it belongs to; default: you.")
    ] = None,
    project: Annotated[
        str | None,
        typer.Option("--project", metavar="NAME", help="The only project that it gives access to. Default: yours."),
    ] = None,
    all_projects: Annotated[
        bool, typer.Option("--all-projects", help="Give access to every project of its person.")
    ] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Create a token. It is shown once, on standard output, and stored nowhere."""
    body: dict[str, Any] = {"name": name, "scopes": [scope.value]} | ({"expiresInDays": days} if days else {})
    body |= ({"person": person} if person else {}) | ({"project": project} if project else {})
    body |= {"allProjects": True} if all_projects else {}
    with connect(server) as client:
        made = client.post("tokens", body, repeat=False)
    if json:
        print_json(made)
        return
    typer.echo(made["token"])
    until = f" until {formatting.moment(made['expiresAt'])}" if made["expiresAt"] else ""
    say(f"{name} may {scope.value}{until}; id {made['id']}. The token is shown this once.", "bold green")
    say("  Its holder puts it into ~/.config/muster/token (chmod 600), or into MUSTER_TOKEN.")


@app.command("ls")
def ls(server: Server = None, json: Json = False) -> None:
    """List active tokens. The tokens themselves are never shown."""
    with connect(server) as client:
        tokens = client.get("tokens")
    if json:
        print_json(tokens)
        return
    table = TextTable("ID", "NAME", "PERSON", "PROJECT", "SCOPE", "CREATED", "EXPIRES", "LAST USED")
    for token in tokens["items"]:
        expires = formatting.moment(token["expiresAt"]) if token["expiresAt"] else "never"
        scopes = ",".join(token["scopes"])
        used = formatting.moment(token["lastUsedAt"])
        whose, where = token.get("person", ""), token.get("project") or "all"
        table.add_row(
            token["id"], token["name"], whose, where, scopes, formatting.moment(token["createdAt"]), expires, used
        )
    answers().print(table, soft_wrap=True)


@app.command("rotate")
def rotate(
    token: Annotated[
        str | None, typer.Argument(metavar="TOKEN", help="Id or name of the token. Default: the one in use.")
    ] = None,
    overlap_hours: Annotated[
        int, typer.Option("--overlap-hours", min=0, max=720, help="Keep the old token valid for this long.")
    ] = 0,
    server: Server = None,
    json: Json = False,
) -> None:
    """Replace a token with a new one of the same scope and end, and revoke the old one.

    The new token is shown once, as by `create`.
    """
    with connect(server) as client:
        token_id = _token_id(client, token) if token else client.get("me")["token"]
        made = client.post(f"tokens/{token_id}:rotate", {"overlapHours": overlap_hours}, repeat=False)
    if json:
        print_json(made)
        return
    typer.echo(made["token"])
    old = f"is taken for {overlap_hours} h more" if overlap_hours else "is refused from now on"
    say(f"{made['name']} has a new token, shown this once; the old one {old}", "bold green")


@app.command("revoke")
def revoke(
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="Id of the token, or its name if only one has it.")],
    server: Server = None,
    json: Json = False,
) -> None:
    """Revoke a token, effective immediately."""
    with connect(server) as client:
        token_id = _token_id(client, token)
        client.delete(f"tokens/{token_id}")
    if json:
        print_json({"id": token_id, "revoked": True})
    say(f"{token} is revoked")


def _token_id(client: Any, token: str) -> str:
    try:
        return str(uuid.UUID(token))
    except ValueError:
        pass
    ids = [each["id"] for each in client.get("tokens")["items"] if each["name"] == token]
    if len(ids) != 1:
        what = f"there is no token named {token!r}" if not ids else f"{len(ids)} tokens are named {token!r}"
        raise CliError(what, code="token_not_found", next_step="`muster tokens ls` lists them with their ids")
    return str(ids[0])
