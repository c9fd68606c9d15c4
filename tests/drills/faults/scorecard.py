"""The outcomes of all faults, as lines, as JSON and as a page."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from pathlib import Path

from tests.drills.faults.kinds import KINDS
from tests.drills.faults.outcome import LEDGER_ERROR_MAX, Outcome

from muster.words.signals import Cause

RECOVERY_SECONDS_MAX = 15.0
CAUSES = ("none", *(str(cause) for cause in Cause))
HEAD = """# Scorecard: faults injected into a real platform

Written by the drill itself; not edited by hand.

    {command}

{when}, {machine}. Each line is one kind of fault, done {rounds} to jobs of two nodes
on a `muster up` of its own (API, operator, launchers, ranks) that train {steps} steps each and save every {every}.
Faults within a rank come from `tests/drills/faults/hooks`, which no production code knows of.

- **cause**: assigned by the operator; of the first attempt. `none`: no attempt may end.
- **detected**: from the fault to the operator's record that the attempt is over, or, where it goes on, to the condition
  that says what is wrong. **recovered**: from the fault to the first step of the next attempt; in brackets, for faults
  that end no attempt, the longest time without a step.
- **lost**: steps that were trained twice. **books**: how far the goodput account is off the job's wall clock, at most.
- **right**: the cause is the injected one, the job ended as it ought to, every step was trained, with the very losses
  of a job to which nothing was done (where the fault changes no number), the books are within {books:.1%}, and no
  process outlived the job.
"""


class Results:
    """path: JSON to which outcomes are added, so that a long drill can be run in parts."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.outcomes: list[Outcome] = []
        if path is not None and path.exists():
            self.outcomes = [Outcome(**entry) for entry in json.loads(path.read_text())["outcomes"]]

    def add(self, outcome: Outcome) -> None:
        print(line(outcome), flush=True)
        self.outcomes.append(outcome)
        if self._path is not None:
            self._path.write_text(json.dumps({"outcomes": [o.document() for o in self.outcomes]}, indent=1))

    @property
    def good(self) -> bool:
        return all(outcome.good for outcome in self.outcomes)

    def figures(self) -> str:
        kinds = {outcome.kind for outcome in self.outcomes}
        wrong = sum(not outcome.good for outcome in self.outcomes)
        calm = [outcome for outcome in self.outcomes if outcome.injected == "none"]
        alarms = sum(outcome.assigned != "none" for outcome in calm)
        back = [o.recovered for o in self.outcomes if o.recovered is not None]
        both = [(o.recovered, o.detected) for o in self.outcomes]
        after = [recovered - found for recovered, found in both if recovered is not None and found is not None]
        killed = [o.detected for o in self.outcomes if o.kind.startswith("kill") and o.detected is not None]
        books = max((outcome.ledger_error for outcome in self.outcomes), default=0.0)
        counts = f"{len(self.outcomes)} faults of {len(kinds)} kinds, {wrong} not as they ought to be"
        false = f"{alarms} false alarms in {len(calm)} that end no attempt"
        speed = f"median {median(back):.1f} s, p95 {p95(back):.1f} s, at most {max(back, default=0.0):.1f} s"
        return (
            f"{counts}; {false}. Detection of SIGKILL: p95 {p95(killed):.2f} s. Fault to first new step: {speed}; "
            f"from its detection on: p95 {p95(after):.1f} s. Books: at most {books:.2%} off."
        )

    def page(self, command: str, steps: int, every: int, note: str = "") -> str:
        found = {outcome.kind for outcome in self.outcomes}
        kinds = [kind.name for kind in KINDS if kind.name in found]
        times = {sum(o.kind == kind for o in self.outcomes) for kind in kinds}
        often = " or ".join(str(number) for number in sorted(times))
        head = HEAD.format(
            command=command, when=today(), machine=machine(), steps=steps, every=every, books=LEDGER_ERROR_MAX,
            rounds="once" if often == "1" else f"{often} times",
        )  # fmt: skip
        rows = [self._row([o for o in self.outcomes if o.kind == kind]) for kind in kinds]
        titles = ("fault", "what is done", "cause", "detected", "recovered", "lost", "ended", "books", "right")
        parts = [
            head,
            note,
            "## Faults",
            table(titles, rows),
            self.figures(),
            "## Cause assigned against cause injected",
        ]
        parts += [confusion(self.outcomes)]
        if wrong := [f"- `{o.kind}`: {'; '.join(o.faults_found)}" for o in self.outcomes if not o.good]:
            parts += ["## Not as it ought to be", "\n".join(dict.fromkeys(wrong))]
        return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"

    def _row(self, outcomes: list[Outcome]) -> tuple[str, ...]:
        first = outcomes[0]
        back = [o.recovered for o in outcomes if o.recovered is not None]
        found = [o.detected for o in outcomes if o.detected is not None]
        went_on = first.attempts == 1 and first.phase == "Succeeded"
        pauses = f"({median([o.pause for o in outcomes]):.1f} s)" if went_on else "–"
        steps = [o.noticed_after for o in outcomes if o.noticed_after is not None]
        return (
            f"`{first.kind}`",
            first.says,
            ", ".join(sorted({o.assigned for o in outcomes})),
            (spread(found, 2) or "–") + (f" (at most {max(steps)} steps)" if steps else ""),
            spread(back, 1) or pauses,
            f"{max(o.lost_steps for o in outcomes)}",
            ", ".join(sorted({o.phase or "?" for o in outcomes})),
            f"{max(o.ledger_error for o in outcomes):.2%}",
            f"{sum(o.good for o in outcomes)} of {len(outcomes)}",
        )


def line(outcome: Outcome) -> str:
    words = "; ".join(outcome.faults_found) or "as it ought to be"
    return (
        f"{outcome.kind:<16} {outcome.injected:>14} -> {outcome.assigned:<14} detected {seconds(outcome.detected)}"
        f"  recovered {seconds(outcome.recovered)}  pause {seconds(outcome.pause)}  lost {outcome.lost_steps:>3}"
        f"  {outcome.phase:<9}  books {outcome.ledger_error:.2%}  {words}"
    )


def seconds(value: float | None) -> str:
    return f"{value:6.2f}" if value is not None else "     -"


def spread(values: list[float], digits: int) -> str:
    """Median and maximum."""
    if not values:
        return ""
    middle, most = f"{median(values):.{digits}f}", f"{max(values):.{digits}f}"
    return f"{middle} s" if len(values) == 1 else f"{middle} s, at most {most} s"


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def p95(values: list[float]) -> float:
    """The smallest value that at least 95 % of the values do not exceed."""
    return sorted(values)[max(0, -(-95 * len(values) // 100) - 1)] if values else 0.0


def confusion(outcomes: list[Outcome]) -> str:
    """Rows: injected; columns: assigned; only those that occur."""
    counts = Counter((outcome.injected, outcome.assigned) for outcome in outcomes)
    rows = [cause for cause in CAUSES if any(injected == cause for injected, _ in counts)]
    columns = [cause for cause in CAUSES if cause in rows or any(assigned == cause for _, assigned in counts)]
    cells = [(f"**{row}**", *(str(counts[row, column] or "·") for column in columns)) for row in rows]
    return table(("injected \\\\ assigned", *columns), cells)


def table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def machine() -> str:
    return f"{os.cpu_count()} cores, Python {platform.python_version()}"


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
