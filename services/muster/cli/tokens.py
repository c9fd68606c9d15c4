"""Commands on tokens: who may ask the API, and for what. They need a token with the scope admin themselves."""

from __future__ import annotations

import uuid
from enum import StrEnum
from typing import Annotated, Any

import typer

from muster.cli import formatting
from muster.cli.errors import CliError
from muster.cli.options import Json, Server, connect
from muster.cli.output import answers, print_json, say
from muster.cli.table import Table

app = typer.Typer(help="Make, list and revoke the tokens that open the API (scope admin).", no_args_is_help=True)


class Scope(StrEnum):
    """Each includes those before it."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Whose it is, or what it is for; for the list.")],
    scope: Annotated[Scope, typer.Option("--scope", help="Each includes those before it.")] = Scope.WRITE,
    days: Annotated[
        int | None, typer.Option("--days", min=1, max=3650, help="Refused after so many days; left out: never.")
    ] = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Make a token. It is shown once, on standard output, and stored nowhere."""
    wanted = {"name": name, "scopes": [scope.value]} | ({"expiresInDays": days} if days else {})
    with connect(server) as client:
        made = client.post("tokens", wanted, repeat=False)
    if json:
        print_json(made)
        return
    typer.echo(made["token"])
    until = f" until {formatting.moment(made['expiresAt'])}" if made["expiresAt"] else ""
    say(f"{name} may {scope.value}{until}; id {made['id']}. The token is shown this once.", "bold green")
    say("  Its holder puts it into ~/.config/muster/token (chmod 600), or into MUSTER_TOKEN.")


@app.command("ls")
def ls(server: Server = None, json: Json = False) -> None:
    """List the tokens that are not revoked; never the tokens themselves."""
    with connect(server) as client:
        found = client.get("tokens")
    if json:
        print_json(found)
        return
    table = Table("ID", "NAME", "SCOPE", "CREATED", "EXPIRES", "LAST USED")
    for token in found["items"]:
        expires = formatting.moment(token["expiresAt"]) if token["expiresAt"] else "never"
        scopes = ",".join(token["scopes"])
        used = formatting.moment(token["lastUsedAt"])
        table.add_row(token["id"], token["name"], scopes, formatting.moment(token["createdAt"]), expires, used)
    answers().print(table, soft_wrap=True)


@app.command("revoke")
def revoke(
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="Id of the token, or its name if only one has it.")],
    server: Server = None,
    json: Json = False,
) -> None:
    """Revoke a token: from this moment on it is refused."""
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
    ids = [found["id"] for found in client.get("tokens")["items"] if found["name"] == token]
    if len(ids) != 1:
        what = f"there is no token named {token!r}" if not ids else f"{len(ids)} tokens are named {token!r}"
        raise CliError(what, code="token_not_found", next_step="`muster tokens ls` lists them with their ids")
    return str(ids[0])
