"""`muster queue` and `muster nodes`: who waits and why, who holds what, and how the nodes are."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from muster.cli import formatting
from muster.cli.options import Json, Server, connect
from muster.cli.output import answers, print_json, say
from muster.cli.table import StyledCell, TextTable
from muster.words.times import epoch_seconds


def queue(
    project: Annotated[str | None, typer.Option("--project", metavar="NAME", help="Only this project.")] = None,
    server: Server = None,
    json: Json = False,
) -> None:
    """Show the queue in order: which jobs wait, how long and why, and which jobs hold nodes."""
    with connect(server) as client:
        queues = client.get("queues")
    queues["items"] = [each for each in queues["items"] if project in (None, each["project"])]
    if json:
        print_json(queues)
        return
    table = TextTable("#", "PROJECT", "JOB", "OWNER", ">GPUS", "WAITS", ">STARTS IN", "WHY")
    lines = [(job, each["project"]) for each in queues["items"] for job in each["waiting"]]
    for job, name in sorted(lines, key=lambda line: line[0]["position"]):
        waits, gpus = _since(job["since"]), _gpus(job)
        starts = formatting.duration(job.get("startsInSeconds"))
        table.add_row(str(job["position"]), name, job["name"], job["owner"], gpus, waits, starts, job["because"])
    answers().print(table, soft_wrap=True)
    holders = TextTable("HELD BY", "JOB", "OWNER", ">GPUS", "FOR", ">ENDS IN", "PHASE")
    for each in queues["items"]:
        for job in each["holding"]:
            since, left = _since(job["since"]), formatting.duration(job.get("etaSeconds"))
            holders.add_row(each["project"], job["name"], job["owner"], _gpus(job), since, left, job["phase"])
    typer.echo("")
    answers().print(holders, soft_wrap=True)
    for each in queues["items"]:
        say(f"{each['project']}: {_describe_holdings(each)}", "dim")
    say(f"{formatting.plural(queues['queued'], 'job')} in the queue of all projects", "dim")


def nodes(server: Server = None, json: Json = False) -> None:
    """List the nodes: pool, capacity, free GPUs, the jobs that hold them, and problems."""
    with connect(server) as client:
        fleet = client.get("nodes")
    if json:
        print_json(fleet)
        return
    table = TextTable("NODE", "POOL", "CAPACITY", "TYPE", ">GPUS", ">FREE", "HELD BY", "STATE")
    for node in fleet["items"]:
        state = _state(node)
        holders = [f"{each['project']}/{each['job']}" if each["job"] else each["project"] for each in node["heldBy"]]
        others = [f"pods of others ({node['othersGpus']} GPUs)"] if node["othersGpus"] else []
        table.add_row(
            node["name"],
            node["pool"],
            node["capacity"],
            node["instanceType"],
            str(node["gpus"]),
            str(node["freeGpus"]),
            ", ".join([*holders, *others]),
            StyledCell(state, "yellow" if node["unfit"] else ""),
        )
    answers().print(table, soft_wrap=True)
    if fleet["note"]:
        say(fleet["note"], "yellow")
    if fleet["asOf"]:
        say(f"as of {formatting.moment(fleet['asOf'])}", "dim")


def _state(node: dict[str, Any]) -> str:
    parts = [node["unfit"]] if node["unfit"] else []
    parts += [each["message"] for each in node["notices"] if each["message"] != node["unfit"]]
    for each in node["avoidedBy"]:
        who = each["job"] or each["project"]
        why = f": {each['why']}" if each["why"] else ""
        parts.append(f"avoided by {who} until {formatting.moment(each['until'])}{why}")
    return "; ".join(parts) or "ready"


def _gpus(job: dict[str, Any]) -> str:
    return str(job["gpus"]) if job["gpus"] else formatting.plural(job["nodes"], "node")


def _describe_holdings(project: dict[str, Any]) -> str:
    """Describe the holdings, as in `holds 56 of 64 GPUs in 3 gangs; 1 waiting`."""
    quota = project["quota"]
    gpus = _of(project["gpus"], quota.get("gpus"), "GPU")
    gangs = _of(project["gangs"], quota.get("gangs"), "gang")
    if quota.get("processes") is not None:
        gangs += f" with {project['processes']} of {quota['processes']} processes"
    return f"holds {gpus} in {gangs}; {len(project['waiting'])} waiting"


def _of(count: int, limit: int | None, noun: str) -> str:
    return formatting.plural(count, noun) if limit is None else f"{count} of {formatting.plural(limit, noun)}"


def _since(moment: str) -> str:
    return formatting.duration(time.time() - epoch_seconds(moment))
