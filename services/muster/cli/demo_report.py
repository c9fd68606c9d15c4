"""The demo's report: what happened to the job, what it cost, and which promises were kept."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from muster.cli import formatting
from muster.cli.demo_checks import CheckResult, DemoEvidence, detection_seconds, recovery_seconds
from muster.cli.output import answers
from muster.cli.render import (
    attempts_table,
    goodput_shares,
    show_curve,
    show_goodput,
    step_points,
    unicode_ok,
)
from muster.cli.table import TextTable


def document(evidence: DemoEvidence, results: tuple[CheckResult, ...], seconds: float) -> dict[str, Any]:
    """The report for machines."""
    evaluations = evidence.metrics["evaluations"]
    return {
        "job": {"id": evidence.job["id"], "name": evidence.job["metadata"]["name"], "phase": _phase(evidence)},
        "seconds": round(seconds, 1),
        "kill": asdict(evidence.kill) if evidence.kill else None,
        "attempts": list(evidence.attempts),
        "lostSteps": _lost_steps(evidence),
        "detectionSeconds": detection_seconds(evidence),
        "recoverySeconds": recovery_seconds(evidence),
        "goodput": goodput_shares(evidence.job["status"]),
        "evaluations": evaluations,
        "sample": evidence.sample,
        "report": evidence.report or None,
        "promises": [asdict(result) for result in results],
        "kept": not any(result.broken for result in results),
    }


def show(evidence: DemoEvidence, results: tuple[CheckResult, ...], seconds: float) -> None:
    console = answers()
    console.print(f"Report {('─' if unicode_ok(console) else '-') * 72}", style="bold")
    console.print(attempts_table(evidence.attempts), soft_wrap=True)
    console.print()
    console.print(_figures(evidence, seconds), soft_wrap=True)
    show_goodput(goodput_shares(evidence.job["status"]))
    show_curve(step_points(evidence.metrics))
    if evidence.sample.strip():
        console.print("\nThe best checkpoint writes:")
        for line in [line[:110] for line in evidence.sample.strip("\n").splitlines()][:8]:
            console.print(f"  | {line}", style="dim", soft_wrap=True)
    console.print()
    show_results(results)
    if evidence.report:
        console.print(f"\nThe run as a page, curves inside, to open or to mail: {evidence.report}", soft_wrap=True)


def show_results(results: tuple[CheckResult, ...]) -> None:
    console = answers()
    for result in results:
        mark, style = ("kept   ", "green") if result.kept else ("BROKEN ", "bold red")
        if result.skipped:
            mark, style = "skipped", "yellow"
        console.print(f"{mark}  {result.promise}: {result.because}", style=style, soft_wrap=True)


def _figures(evidence: DemoEvidence, seconds: float) -> TextTable:
    table = TextTable("", "", header=False)
    table.add_row("lost steps", f"{_lost_steps(evidence)} (trained after the last checkpoint, and trained again)")
    detected, recovered = detection_seconds(evidence), recovery_seconds(evidence)
    table.add_row("noticed after", formatting.NOTHING if detected is None else f"{detected:.2f} s")
    table.add_row(
        "recovered after", formatting.NOTHING if recovered is None else f"{recovered:.1f} s, from SIGKILL to a new step"
    )
    table.add_row("evaluation", " → ".join(formatting.loss(entry["loss"]) for entry in evidence.metrics["evaluations"]))
    table.add_row("whole demo", formatting.duration(seconds))
    return table


def _lost_steps(evidence: DemoEvidence) -> int:
    return sum(attempt["lostSteps"] for attempt in evidence.attempts)


def _phase(evidence: DemoEvidence) -> str:
    return str(evidence.job["status"]["phase"])
