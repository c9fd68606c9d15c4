"""Commands on a project's webhooks, which receive messages about its events."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from muster.cli import formatting
from muster.cli.errors import ExitStatus, usage
from muster.cli.options import Json, Project, Server, connect, project_of
from muster.cli.output import answers, print_json, say
from muster.cli.table import TextTable
from muster.words.webhook_kinds import WebhookKind, WebhookPreset

app = typer.Typer(help="Webhooks: notify other programs, or Slack, of events in a project.", no_args_is_help=True)

DEFAULT_PRESET = "standard"
Name = Annotated[str, typer.Argument(metavar="NAME", help="The webhook's name: lower-case letters, digits and dashes.")]
Kinds = Annotated[
    list[WebhookKind] | None,
    typer.Option("--on", help="An event to send; may be repeated. Default: all events (`set`: unchanged)."),
]
Preset = Annotated[
    str | None,
    typer.Option("--preset", help="slack, openai, or standard: the form of Standard Webhooks, and the default."),
]
WaitMinutes = Annotated[
    float | None,
    typer.Option("--wait-minutes", min=1, help="Minutes before a waiting job sends `job.waits_long` (60)."),
]


@app.command("add")
def add(
    name: Name,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where messages are sent by POST: https://…")],
    kinds: Kinds = None,
    preset: Preset = None,
    wait_minutes: WaitMinutes = None,
    project: Project = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Create a webhook. Its signing secret is shown once, on standard output.

    For maintainers. Try it with `muster webhooks test NAME`.
    """
    body = {"name": name, "url": url, **_subscription(kinds, preset, wait_minutes)}
    with connect(server) as client:
        made = client.post(f"projects/{project_of(client, project)}/webhooks", body, repeat=False)
    _show_secret(made, json, f"webhook {name} is told from now on; its secret is shown this once")


@app.command("ls")
def ls(project: Project = None, server: Server = None, json: Json = False) -> None:
    """List a project's webhooks. Never their secrets. For maintainers."""
    with connect(server) as client:
        webhooks = client.get(f"projects/{project_of(client, project)}/webhooks")
    if json:
        print_json(webhooks)
        return
    table = TextTable("NAME", "URL", "FORM", "TOLD OF", "ON", "SET BY", "SET")
    for webhook in webhooks["items"]:
        table.add_row(
            webhook["name"],
            webhook["url"],
            webhook["preset"] or DEFAULT_PRESET,
            ",".join(webhook["kinds"]),
            "yes" if webhook["enabled"] else "no",
            webhook["changedBy"],
            formatting.moment(webhook["changedAt"]),
        )
    answers().print(table, soft_wrap=True)


@app.command("set")
def set_webhook(
    name: Name,
    url: Annotated[str | None, typer.Option("--url", help="New address.")] = None,
    kinds: Kinds = None,
    preset: Preset = None,
    wait_minutes: WaitMinutes = None,
    on: Annotated[bool | None, typer.Option("--enable/--disable", help="Turn deliveries on or off.")] = None,
    project: Project = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Change a webhook. Options that you leave out are unchanged. For maintainers."""
    body = _subscription(kinds, preset, wait_minutes) | ({"url": url} if url else {})
    body |= {"enabled": on} if on is not None else {}
    if not body:
        raise usage("nothing is to be changed", f"muster webhooks set {name} --disable", "nothing-to-change")
    with connect(server) as client:
        made = client.patch(f"projects/{project_of(client, project)}/webhooks/{name}", body)
    if json:
        print_json(made)
    say(f"webhook {name} is as it was asked for", "bold green")


@app.command("rm")
def rm(name: Name, project: Project = None, server: Server = None, json: Json = False) -> None:
    """Delete a webhook and its history. Pending messages are dropped. For maintainers."""
    with connect(server) as client:
        client.delete(f"projects/{project_of(client, project)}/webhooks/{name}")
    if json:
        print_json({"name": name, "deleted": True})
    say(f"webhook {name} is gone")


@app.command("test")
def send_test(name: Name, project: Project = None, server: Server = None, json: Json = False) -> None:
    """Send a test message and print the response. Exit code 1 if it was not accepted. For maintainers."""
    with connect(server) as client:
        path = f"projects/{project_of(client, project)}/webhooks/{name}:test"
        message = client.post(path, repeat=False)
    if json:
        print_json(message)
    last = message["attempts"][-1] if message["attempts"] else {"error": "it was not sent", "seconds": 0.0}
    if message["status"] == "delivered":
        say(f"{name} answered {last['status']} after {last['seconds']:.2f} s", "bold green")
        return
    say(f"{name} was not told: {last['error']}", "bold red")
    raise typer.Exit(int(ExitStatus.FAILED))


@app.command("rotate")
def rotate(
    name: Name,
    overlap_hours: Annotated[
        int, typer.Option("--overlap-hours", min=0, max=720, help="Also sign with the old secret for this long.")
    ] = 24,
    project: Project = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Give a webhook a new secret, which is shown once, on standard output. For maintainers."""
    with connect(server) as client:
        path = f"projects/{project_of(client, project)}/webhooks/{name}:rotate"
        made = client.post(path, {"overlapHours": overlap_hours}, repeat=False)
    old = f"signs for {overlap_hours} h more" if overlap_hours else "signs no more"
    _show_secret(made, json, f"webhook {name} has a new secret, shown this once; the old one {old}")


@app.command("deliveries")
def deliveries(
    name: Name,
    status: Annotated[
        str | None, typer.Option("--status", help="Only those that are waiting, delivered or failed.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=200, help="Show at most this many deliveries.")] = 50,
    project: Project = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """List a webhook's deliveries of the last 30 days and their responses, newest first. For maintainers."""
    with connect(server) as client:
        path = f"projects/{project_of(client, project)}/webhooks/{name}/deliveries"
        page = client.get(path, limit=limit, status=status)
    if json:
        print_json(page)
        return
    table = TextTable("ID", "KIND", "STATUS", "CREATED", "ATTEMPTS", "LAST ANSWER", "NEXT")
    for message in page["items"]:
        table.add_row(
            message["id"],
            message["kind"],
            message["status"],
            formatting.moment(message["createdAt"]),
            str(len(message["attempts"])),
            _answer(message["attempts"][-1]) if message["attempts"] else "",
            formatting.moment(message["nextAt"]) if message["nextAt"] else "",
        )
    answers().print(table, soft_wrap=True)


@app.command("replay")
def replay(
    name: Name,
    message: Annotated[str, typer.Argument(metavar="ID", help="The message's id, as `deliveries` lists it.")],
    project: Project = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Send a message again, whatever its status; its id stays the same. For maintainers."""
    with connect(server) as client:
        path = f"projects/{project_of(client, project)}/webhooks/{name}/deliveries/{message}:replay"
        answer = client.post(path)
    if json:
        print_json(answer)
    say(f"{message} is sent again; `muster webhooks deliveries {name}` shows what comes of it")


def _subscription(kinds: list[WebhookKind] | None, preset: str | None, wait_minutes: float | None) -> dict[str, Any]:
    presets = (DEFAULT_PRESET, *WebhookPreset)
    if preset is not None and preset not in presets:
        raise usage(f"--preset is one of {', '.join(presets)}, not {preset!r}", code="bad-preset")
    body: dict[str, Any] = {"kinds": [str(kind) for kind in kinds]} if kinds else {}
    body |= {"preset": None if preset == DEFAULT_PRESET else preset} if preset else {}
    return body | ({"waitSeconds": wait_minutes * 60.0} if wait_minutes is not None else {})


def _show_secret(made: dict[str, Any], json: bool, words: str) -> None:
    if json:
        print_json(made)
        return
    typer.echo(made["secret"])
    say(words, "bold green")


def _answer(attempt: dict[str, Any]) -> str:
    return str(attempt["error"] or f"{attempt['status']} after {attempt['seconds']:.2f} s")
