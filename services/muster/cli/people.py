"""Commands on people: who one is, who there is, and who may do everything."""

from __future__ import annotations

from typing import Annotated

import typer

from muster.cli import formatting
from muster.cli.options import Json, Server, connect
from muster.cli.output import answers, print_json, say
from muster.cli.table import TextTable

app = typer.Typer(help="People and service accounts (for admins).", no_args_is_help=True)


def whoami(server: Server = None, json: Json = False) -> None:
    """Show whom the current token belongs to, and its role in each project."""
    with connect(server) as client:
        me = client.get("me")
    if json:
        print_json(me)
        return
    where = f"in project {me['project']}" if me["project"] else "in every project"
    typer.echo(f"{me['person']}, by a token for {', '.join(me['scopes'])} {where}")
    if me["admin"]:
        typer.echo("  admin")
    for project, role in sorted(me["roles"].items()):
        typer.echo(f"  {role} of {project}")


@app.command("ls")
def ls(server: Server = None, json: Json = False) -> None:
    """List people and service accounts."""
    with connect(server) as client:
        people = client.get("people")
    if json:
        print_json(people)
        return
    table = TextTable("NAME", "KIND", "ADMIN", "DISABLED", "SINCE")
    for person in people["items"]:
        yes = {True: "yes", False: ""}
        at = formatting.moment(person["createdAt"])
        table.add_row(person["name"], person["kind"], yes[person["admin"]], yes[person["disabled"]], at)
    answers().print(table, soft_wrap=True)


@app.command("set")
def set_person(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits, '.', '_' and '-'.")],
    service: Annotated[bool, typer.Option("--service", help="This is a service account.")] = False,
    admin: Annotated[bool, typer.Option("--admin", help="Administrator: may do everything in every project.")] = False,
    disabled: Annotated[bool, typer.Option("--disabled", help="Disable all of their tokens.")] = False,
    subject: Annotated[
        str | None, typer.Option("--subject", help="Their subject at the identity provider. Default: unchanged.")
    ] = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Create or change a person or service account. Options that you leave out are set to false."""
    body: dict[str, object] = {"kind": "service" if service else "person", "admin": admin, "disabled": disabled}
    body |= {"subject": subject} if subject else {}
    with connect(server) as client:
        made = client.put(f"people/{name}", body)
    if json:
        print_json(made)
    say(f"{name} is as it was asked for", "bold green")
