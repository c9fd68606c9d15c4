"""`muster usage`: what a project used, as a table, JSON or CSV."""

from __future__ import annotations

import csv as csv_text
import sys
from typing import Annotated, Any

import typer

from muster.cli import formatting
from muster.cli.options import JobsClient, Json, Project, Server, connect
from muster.cli.output import answers, print_json, say
from muster.cli.table import TextTable


def usage(
    project: Project = None,
    month: Annotated[
        str | None, typer.Option("--month", metavar="YYYY-MM", help="Month, in UTC. Default: this month.")
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV: one line per job and month.")] = False,
    server: Server = None,
    json: Json = False,
) -> None:
    """Show a project's usage in a month: GPU-hours, cost, savings from spot, and losses from failures."""
    from muster.plan.usage import COLUMNS

    with connect(server) as client:
        name = project or home(client)
        report = client.get(f"projects/{name}/usage", month=month)
    if json:
        print_json(report)
    elif csv:
        writer = csv_text.writer(sys.stdout, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([{**line, "project": name}[column] for column in COLUMNS] for line in report["lines"])
    else:
        _print(report)


def home(client: JobsClient) -> str:
    """The project that is the token's, else the person's only one, else the one that is always there."""
    me = client.get("me")
    roles = list(me["roles"])
    return str(me["project"] or (roles[0] if len(roles) == 1 and not me["admin"] else "default"))


def _print(report: dict[str, Any]) -> None:
    table = TextTable(
        "PERSON", "JOB", ">GPU-H", ">CPU-H", ">LOST GPU-H", f">COST {report['currency']}", ">SAVED", ">LOST"
    )
    for line in sorted(report["lines"], key=lambda line: (line["person"], -line["cost"], -line["nodeHours"])):
        table.add_row(line["person"], line["name"], *_cells(line))
    for person in report["people"]:
        table.add_row(person["person"], "all", *_cells(person))
    table.add_row(report["project"], "all", *_cells(report["total"]))
    answers().print(table, soft_wrap=True)
    until = formatting.moment(min(report["until"], report["asOf"]))
    say(f"from {formatting.moment(report['since'])} to {until}", "dim")
    for note in report["notes"]:
        say(note, "dim")


def _cells(amounts: dict[str, Any]) -> tuple[str, ...]:
    cost = f"{amounts['cost']:,.2f}" + (" + unpriced" if amounts["unpricedHours"] else "")
    hours = [_hours(amounts[name]) for name in ("gpuHours", "cpuHours", "lostGpuHours")]
    return (*hours, cost, f"{amounts['saved']:,.2f}", f"{amounts['lostCost']:,.2f}")


def _hours(count: float) -> str:
    """Format hours: those of a job of minutes are no row of zeros."""
    return f"{count:,.1f}" if count >= 0.1 or not count else f"{count:.1g}"
