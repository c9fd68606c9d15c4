"""`muster audit`: who changed what, as a table, JSON lines or CSV."""

from __future__ import annotations

import csv
import json as json_text
import sys
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer

from muster.cli import formatting
from muster.cli.options import JobsClient, Json, Server, connect
from muster.cli.output import answers, print_json, stop_if_unread
from muster.cli.table import TextTable

PAGE_LINES = 1000  # the most that the API gives at once
COLUMNS = ("id", "at", "person", "token", "address", "action", "subject", "project", "before", "after")


class AuditFormat(StrEnum):
    """Output format."""

    TABLE = "table"
    JSONL = "jsonl"
    CSV = "csv"


def audit(
    person: Annotated[str | None, typer.Option("--person", metavar="NAME", help="Only actions of this person.")] = None,
    project: Annotated[str | None, typer.Option("--project", metavar="NAME", help="Only this project.")] = None,
    action: Annotated[
        str | None, typer.Option("--action", metavar="WORD", help="Only this action, such as token.made.")
    ] = None,
    subject: Annotated[str | None, typer.Option("--subject", metavar="ID", help="Only actions on this object.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Show at most this many entries.")] = None,
    form: Annotated[
        AuditFormat,
        typer.Option("--format", help="Output format. jsonl and csv print every entry unless --limit is given."),
    ] = AuditFormat.TABLE,
    server: Server = None,
    json: Json = False,
) -> None:
    """List who changed what and from where, with the values before and after. For admins and maintainers."""
    filters = {"person": person, "project": project, "action": action, "subject": subject}
    most = limit or (50 if form == AuditFormat.TABLE else None)
    with connect(server) as client:
        lines = _lines(client, most, filters)
        if json:
            print_json({"items": list(lines)})
        elif form == AuditFormat.JSONL:
            for line in lines:
                typer.echo(json_text.dumps(line, separators=(",", ":")))
                stop_if_unread()
        elif form == AuditFormat.CSV:
            _print_csv(lines)
        else:
            _print_table(lines)


def _lines(client: JobsClient, most: int | None, filters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cursor, left = None, most
    while left is None or left > 0:
        page = client.get("audit", limit=min(left or PAGE_LINES, PAGE_LINES), cursor=cursor, **filters)
        yield from page["items"]
        left = None if left is None else left - len(page["items"])
        cursor = page["nextCursor"]
        if not cursor:
            return


def _print_csv(lines: Iterator[dict[str, Any]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for line in lines:
        writer.writerow(_cell(line[column]) for column in COLUMNS)
        stop_if_unread()


def _cell(value: Any) -> Any:
    """Return the value as text. Text that a spreadsheet would take for a formula begins with an apostrophe."""
    if isinstance(value, dict):
        return json_text.dumps(value, separators=(",", ":"))
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value


def _print_table(lines: Iterator[dict[str, Any]]) -> None:
    table = TextTable("AT", "PERSON", "FROM", "ACTION", "SUBJECT", "PROJECT", "CHANGE")
    for line in lines:
        change = " → ".join(_describe_change(line[key]) for key in ("before", "after") if line[key])
        at = formatting.moment(line["at"])
        who, where, project = line["person"], line["address"], line["project"] or ""
        table.add_row(at, who, where, line["action"], line["subject"], project, change)
    answers().print(table, soft_wrap=True)


def _describe_change(change: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in change.items() if value is not None)
