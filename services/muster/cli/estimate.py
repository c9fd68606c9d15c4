"""`muster estimate`: what a job would need, take and cost: asked of a server, or worked out here without one."""

from __future__ import annotations

import os
from typing import Any

from muster.cli import formatting
from muster.cli.errors import CliError, ExitStatus
from muster.cli.job_file import JobFile, explaining
from muster.cli.options import JobsClient
from muster.cli.output import answers, say
from muster.cli.submit import placed
from muster.cli.table import StyledCell, TextTable
from muster.plan.memory import USABLE
from muster.plan.plan_words import describe_speed, estimate_facts


def ask(client: JobsClient, file: JobFile) -> dict[str, Any]:
    """The server's answer, which knows what its jobs did."""
    with placed(file):
        answer: dict[str, Any] = client.post("jobs:estimate", file.data)
    return answer


def work_out(file: JobFile) -> dict[str, Any]:
    """The same arithmetic on this machine: no server's records, this person's own access to storage."""
    from muster.documents.prices import load_prices
    from muster.plan.estimate import NO_ESTIMATE
    from muster.recipe.document import parse_job
    from muster.storage.errors import StorageError
    from muster.storage.estimating import estimate_with_storage
    from muster.words.base import DocumentProblem, InvalidDocument, UserError, dump

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        spec = parse_job(file.data).spec
        return dump(estimate_with_storage(spec, load_prices(), machine_bytes=memory))
    except InvalidDocument as invalid:
        faults = tuple(file.fault(problem) for problem in invalid.problems)
        what = f"the job is not valid: {invalid.problems[0]}"
        raise CliError(what, ExitStatus.USAGE, "invalid_job", file.name, faults, explaining(faults)) from None
    except UserError as error:
        place = "spec.program" if str(error) == NO_ESTIMATE else "spec.training.model"
        fault = file.fault(DocumentProblem(place, str(error)))
        raise CliError(str(error), ExitStatus.USAGE, "invalid_job", file.name, (fault,)) from None
    except StorageError as error:
        raise CliError(str(error), code="model_unreadable") from None


def show(estimate: dict[str, Any]) -> None:
    """Tables for people."""
    console = answers()
    console.print(_facts(estimate), soft_wrap=True)
    console.print()
    console.print(_memory(estimate), soft_wrap=True)
    if estimate.get("options"):
        console.print()
        console.print(_gangs(estimate), soft_wrap=True)
    _show_findings(estimate)


def show_briefly(estimate: dict[str, Any]) -> None:
    """Show model, length, time and checkpoints, and what is wrong or not known."""
    answers().print(_facts(estimate), soft_wrap=True)
    _show_findings(estimate)


def _show_findings(estimate: dict[str, Any]) -> None:
    for change in estimate.get("changes", ()):
        say(f"would fit with {change}", "yellow")
    if estimate.get("fits") is False or (estimate.get("advice") and not estimate.get("changes")):
        say(f"does not fit: {estimate['advice']}", "bold red")
    for fault in estimate.get("faults", ()):
        say(f"would fail at its start: {fault['path']}: {fault['message']}", "bold red")
    for warning in estimate.get("warnings", ()):
        say(f"warning: {warning['path']}: {warning['message']}", "yellow")
    for gap in estimate.get("gaps", ()):
        say(f"not known: {gap}", "dim")


def _facts(estimate: dict[str, Any]) -> TextTable:
    table = TextTable("", "", header=False)
    for name, words in estimate_facts(estimate):
        table.add_row(name, words)
    return table


def _memory(estimate: dict[str, Any]) -> TextTable:
    """Return a table of a rank's bytes by part, with a column for each sharding that the job may take."""
    shardings = estimate["memory"]
    table = TextTable("memory of a rank", *(f">{_marked(each, estimate)}" for each in shardings))
    for part in shardings[0]["parts"]:
        if any(each["parts"][part] for each in shardings):
            table.add_row(f"  {part}", *(formatting.size(each["parts"][part]) for each in shardings))
    table.add_row("  in all", *(StyledCell(formatting.size(each["total"]), _style(each)) for each in shardings))
    if any(each.get("host") for each in shardings):
        table.add_row("  beside it in the host's memory", *(formatting.size(each.get("host", 0)) for each in shardings))
    if capacity := shardings[0].get("capacity"):
        table.add_row("  may have", *(f"{formatting.size(capacity * USABLE)}" for _ in shardings))
    return table


def _marked(each: dict[str, Any], estimate: dict[str, Any]) -> str:
    return f"{each['shard']} (taken)" if each["shard"] == estimate.get("shard") else str(each["shard"])


def _style(each: dict[str, Any]) -> str:
    return {True: "green", False: "bold red"}.get(each.get("fits"), "")  # type: ignore[arg-type]


def _gangs(estimate: dict[str, Any]) -> TextTable:
    table = TextTable("gangs that fit", "gpus", "shard", ">memory", ">per hour", ">price", "speed")
    for option in estimate["options"]:
        gpus = f"{option['nodes']} × {option['gpusPerNode']} {option['gpu']}"
        speed, price = option.get("speed"), option.get("price")
        table.add_row(
            option["instanceType"],
            gpus,
            option["memory"]["shard"],
            formatting.size(option["memory"]["total"]),
            f"{option['hourly']:,.2f} {estimate['currency']}",
            formatting.NOTHING if price is None else f"{price:,.2f}",
            f"{describe_speed(speed)} ({speed['basis']})" if speed else formatting.NOTHING,
        )
    return table
