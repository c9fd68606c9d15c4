"""`muster submit`: read the file, let the server check it and show the plan, then submit it once and only once."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from muster.cli import formatting
from muster.cli.errors import CliError, Exit, cli_error
from muster.cli.job_file import JobFile, read_job_file, set_value
from muster.cli.options import command_prefix
from muster.cli.output import answers, json_wanted, print_json, say
from muster.cli.paths import make_absolute
from muster.cli.table import Table
from muster.client.errors import MusterError
from muster.contract.names import Label

if TYPE_CHECKING:
    from muster.cli.options import JobsClient


def prepare(source: str, name: str | None, settings: list[str], local: bool, project: str | None = None) -> JobFile:
    """The document to send: read, with --set, --name and --project applied and relative paths made absolute."""
    file = read_job_file(source)
    for assignment in settings:
        set_value(file, assignment)
    if name is not None:
        metadata = file.data.setdefault("metadata", {})
        if isinstance(metadata, dict):
            metadata["name"] = name
    if project is not None:
        metadata = file.data.setdefault("metadata", {})
        labels = metadata.setdefault("labels", {}) if isinstance(metadata, dict) else None
        if isinstance(labels, dict):  # else the server says what is wrong with it
            labels[Label.PROJECT] = project
    make_absolute(file, local)
    return file


def ask_for_plan(client: JobsClient, file: JobFile) -> dict[str, Any]:
    """The server's dry run. Raises CliError with the line of every fault, also for what a submission would refuse."""
    with placed(file):
        plan = client.plan(file.data)
    if not plan["accepted"]:
        raise _refused(plan, file)
    return plan


def send(client: JobsClient, file: JobFile) -> dict[str, Any]:
    with placed(file):
        return client.submit(file.data)


def show_plan(plan: dict[str, Any]) -> None:
    job, spec = plan["job"], plan["job"]["spec"]
    training, gang, batch = spec["training"], spec["gang"], spec["training"]["batch"]
    table = Table("", "", header=False)
    table.add_row("job", f"{job['name']}  ({job['namespace']})")
    if job.get("project") not in (None, "default"):
        table.add_row("project", job["project"])
    table.add_row("training", f"{training['task']} {_format_model(training['model'], plan.get('parameters'))}")
    table.add_row("data", "\n".join(source["source"] for source in training["data"]["train"]))
    table.add_row("gang", _format_gang(gang, plan))
    table.add_row("batch", _format_batch(batch, plan))
    table.add_row(
        "length", ", ".join(formatting.plural(value, unit[:-1]) for unit, value in training["length"].items() if value)
    )
    table.add_row("precision", f"{training['precision']}, shard: {training['parallel']['shard']}")
    checkpoint = spec["checkpoint"]
    table.add_row("checkpoints", f"{checkpoint.get('uri') or 'the platform chooses'} (every: {checkpoint['every']})")
    if (admission := plan.get("admission")) is not None:
        table.add_row("queue", _format_admission(admission))
    answers().print(table, soft_wrap=True)
    for warning in plan["warnings"]:
        say(f"warning: {warning['path']}: {warning['message']}", "yellow")


def confirmed(question: str = "Submit?", by_default: bool = True) -> bool:
    """Ask on a terminal; anything else has already said what it wants by calling us. Enter means `by_default`."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    say(f"{question} {'[Y/n]' if by_default else '[y/N]'} ", "bold", end="")
    return sys.stdin.readline().strip().lower() in ("y", "yes", *([""] if by_default else []))


def announce(job: dict[str, Any]) -> None:
    name = job["metadata"]["name"]
    if json_wanted():
        print_json(job)
    say(f"Submitted {name} ({job['id']})", "bold green")
    say(f"  {command_prefix()} get {name} --follow    watch it")
    say(f"  {command_prefix()} logs {name} -f         what the workers write")
    say(f"  {command_prefix()} why {name}             why it is where it is")


@contextlib.contextmanager
def placed(file: JobFile) -> Iterator[None]:
    """Adds file and lines to the faults that the server names by path."""
    try:
        yield
    except MusterError as raised:
        error = cli_error(raised)
        error.faults = tuple(file.fault(fault.problem) for fault in error.faults)
        error.file = file.name if error.faults else error.file
        raise error from None


def _refused(plan: dict[str, Any], file: JobFile) -> CliError:
    from muster.contract.base import Problem

    faults = tuple(file.fault(Problem(r.get("path") or "", r["message"])) for r in plan["refusals"])
    code = plan["refusals"][0]["code"] if plan["refusals"] else "refused"
    next_step = "`--name` submits it under another name" if code == "name_taken" else ""
    return CliError(f"the server would refuse {plan['job']['name']}", Exit.FAILED, code, file.name, faults, next_step)


def _format_admission(admission: dict[str, Any]) -> str:
    """What the queue would do with the job, and a line for each gang that would make room for it."""
    verdict = {"unknown": "can't be foreseen"}.get(admission["verdict"], admission["verdict"])
    lines = [f"{verdict}: {admission['because']}"]
    if admission["allowedBy"]:
        lines.append(f"allowed by {admission['allowedBy']}")
    return "\n".join((*lines, *map(_format_eviction, admission["evictions"])))


def _format_eviction(eviction: dict[str, Any]) -> str:
    who = f"{eviction['project']}/{eviction['job']}" if eviction["job"] else f"a gang of {eviction['project']}"
    goes_on = f"goes on with {formatting.plural(eviction['nodesKept'], 'node')}"
    becomes = goes_on if eviction["nodesKept"] else "queues again"
    hours = [eviction[key] / 3600 for key in ("restartGpuSeconds", "uncommittedGpuSeconds")]
    cost = f"its restart costs {hours[0]:.2g} GPU-hours, a commit that fails {hours[1]:.2g} more"
    gives = f"gives up {formatting.plural(eviction['gpus'], 'GPU')} and {becomes}"
    return f"{who}, {eviction['because']}, {gives}; {cost}"


def _format_model(model: dict[str, Any], parameters: int | None) -> str:
    source = model.get("preset") or model.get("source") or ("own shape" if model.get("architecture") else "")
    if origin := model.get("from"):
        source = f"from {origin.get('job') or origin.get('uri')} (step {origin.get('step')})"
    return f"{source}, {formatting.amount(parameters)} parameters" if parameters else source


def _format_gang(gang: dict[str, Any], plan: dict[str, Any]) -> str:
    low, high = plan["worldSize"]["min"], plan["worldSize"]["max"]
    nodes = gang["nodes"]
    workers = formatting.plural(nodes["max"], "worker")
    workers = workers if nodes["min"] == nodes["max"] else f"{nodes['min']} to {workers}"
    ranks = f"{low}" if low == high else f"{low} to {high}"
    what = "GPU" if gang["gpusPerNode"] else "CPU process"
    return f"{workers} × {formatting.plural(plan['ranksPerNode'], what)} = world size {ranks}"


def _format_batch(batch: dict[str, Any], plan: dict[str, Any]) -> str:
    steps = ", ".join(
        f"{formatting.plural(a['microSteps'], 'micro-step')} on {formatting.plural(a['ranks'], 'rank')}"
        for a in plan["accumulation"]
    )
    return (
        f"{batch['tokensPerStep']:,} tokens = {formatting.plural(plan['samplesPerStep'], 'sample')} per step; {steps}"
    )
