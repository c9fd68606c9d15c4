"""The outcomes of all faults, as lines, as JSON and as a page."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.drills.faults.scorecard import CAUSES, machine, seconds, table, today
from tests.drills.programs.kinds import KINDS
from tests.drills.programs.runs import HUNG_SECONDS, SAVED_EVERY, STEPS

HEAD = """# Scorecard: faults injected into a program of a user's own

Written by the drill itself, but for the figures of other commands at its end.

    make drill-programs

{when}, {machine}. Each line is one kind of fault, done once to `examples/programs/plain.py`, untouched: two ranks
of DistributedDataParallel on the CPU, {steps} steps of 50 ms, saved to a file every {every}. Muster runs them as two
workers of one operator; torchrun and dlrover-run as one node, with `--max-restarts=3` and one folder, from which the
program resumes by itself.

- **cause**: assigned by the operator. `none`: no attempt may end.
- **detected**: from the fault to the operator's record that the attempt is over. Hangs are bounded by
  `hang: {{stepSeconds: {hung}}}`; without that Muster waits for 30 minutes, torchrun for gloo's 30 minutes.
- **next step**: from the fault to the first step of the restarted program. **lost**: steps that were taken twice. A
  checkpoint is published a second or two after it was saved, which is many steps of 50 ms; torchrun's ranks find what
  was saved last on the disk of the one node, which they would lose with that node.
- **right**: the cause is the injected one, the job ended as it ought to, with the very weights of a run without a
  fault, and no process outlived it.
"""

# Figures of other commands, which no run of this drill has: they stand at the page's end, and stay when it is written.
OTHER_FIGURES = "## Other commands"


@dataclass
class Outcome:
    """One fault of Muster's. Seconds are from the fault. `deviations` is empty where all is as it ought to be."""

    kind: str
    description: str
    injected: str
    assigned: str = "none"
    detected: float | None = None
    recovered: float | None = None
    lost_steps: int = 0
    attempts: int = 0
    phase: str = ""
    message: str = ""
    deviations: list[str] = field(default_factory=list)


@dataclass
class LauncherOutcome:
    """The same fault under another launcher, and how that ended."""

    launcher: str
    kind: str
    recovered: float | None
    lost_steps: int
    ended: str


@dataclass
class HealthyRun:
    """A long run without a fault."""

    minutes: float
    steps: int
    load: float
    """Load of the machine, averaged over the run."""
    alarms: list[str]


class Results:
    """Outcomes, kept in `path` where one is given, so that a long drill can be run in parts. A kind that is done again
    replaces what was there of it."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.outcomes: dict[str, Outcome] = {}
        self.elsewhere: dict[str, LauncherOutcome] = {}
        self.healthy: dict[str, HealthyRun] = {}
        if path is not None and path.exists():
            document = json.loads(path.read_text())
            self.outcomes = {name: Outcome(**entry) for name, entry in document["outcomes"].items()}
            self.elsewhere = {name: LauncherOutcome(**entry) for name, entry in document["elsewhere"].items()}
            self.healthy = {name: HealthyRun(**entry) for name, entry in document.get("healthy", {}).items()}

    def add(self, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes[outcome.kind] = outcome
            self._write()
        words = "; ".join(outcome.deviations) or "as it ought to be"
        print(
            f"{outcome.kind:<16} {outcome.injected:>14} -> {outcome.assigned:<14} detected {seconds(outcome.detected)}"
            f"  next step {seconds(outcome.recovered)}  lost {outcome.lost_steps:>3}  {outcome.phase:<9}  {words}\n"
            f"{'':<16} {outcome.message.splitlines()[0][:160] if outcome.message else ''}",
            flush=True,
        )

    def add_elsewhere(self, other: LauncherOutcome) -> None:
        with self._lock:
            self.elsewhere[f"{other.launcher} {other.kind}"] = other
            self._write()
        print(
            f"{other.kind:<16} {other.launcher:>14}    next step {seconds(other.recovered)}  lost {other.lost_steps:>3}"
            f"  {other.ended}",
            flush=True,
        )

    def add_healthy(self, run: HealthyRun) -> None:
        with self._lock:
            self.healthy["run"] = run
            self._write()
        print(f"healthy: {run}", flush=True)

    def _write(self) -> None:
        if self._path is not None:
            parts: dict[str, Mapping[str, Outcome | LauncherOutcome | HealthyRun]] = {
                "outcomes": self.outcomes,
                "elsewhere": self.elsewhere,
                "healthy": self.healthy,
            }
            document = {part: {name: asdict(each) for name, each in kept.items()} for part, kept in parts.items()}
            self._path.write_text(json.dumps(document, indent=1))

    @property
    def good(self) -> bool:
        wrong = any(outcome.deviations for outcome in self.outcomes.values())
        return not wrong and not any(run.alarms for run in self.healthy.values())

    def figures(self) -> str:
        done = self.outcomes.values()
        right = sum(outcome.assigned == outcome.injected for outcome in done)
        wrong = sum(bool(outcome.deviations) for outcome in done)
        back = sorted(outcome.recovered for outcome in done if outcome.recovered is not None)
        middle = f"{back[len(back) // 2]:.1f} s, at most {back[-1]:.1f} s" if back else "–"
        healthy = "".join(
            f" A run without a fault, {run.minutes:.0f} minutes and {run.steps} steps at a load of {run.load:.0f}: "
            f"{len(run.alarms)} false alarms."
            for run in self.healthy.values()
        )
        return (
            f"{len(done)} kinds of faults, {right} with the cause that was injected, {wrong} not as they ought to be. "
            f"Fault to the next step: median {middle}.{healthy}"
        )

    def page(self, note: str = "") -> str:
        head = HEAD.format(when=today(), machine=machine(), steps=STEPS, every=SAVED_EVERY, hung=HUNG_SECONDS)
        titles = ("fault", "what is done", "injected", "assigned", "detected", "next step", "lost", "ended", "right")
        rows = [_row(self.outcomes[kind.name]) for kind in KINDS if kind.name in self.outcomes]
        parts = [head, note, "## Faults", table(titles, rows), self.figures(), "## Beside other launchers"]
        parts += [self._beside(), "## Cause assigned against cause injected", self._confusion()]
        if wrong := [o for o in self.outcomes.values() if o.deviations]:
            parts += [
                "## Not as it ought to be",
                "\n".join(f"- `{o.kind}`: {'; '.join(o.deviations)}" for o in wrong),
            ]
        return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"

    def _beside(self) -> str:
        launchers = list(dict.fromkeys(other.launcher for other in self.elsewhere.values()))
        rows = []
        for kind in KINDS:
            others = [self.elsewhere.get(f"{launcher} {kind.name}") for launcher in launchers]
            if kind.name not in self.outcomes or not any(others):
                continue
            mine = self.outcomes[kind.name]
            cells = [_cell(mine.recovered, mine.lost_steps, mine.phase.lower())]
            cells += [_cell(o.recovered, o.lost_steps, o.ended) if o else "–" for o in others]
            rows.append((f"`{kind.name}`", *cells))
        titles = ("fault", "Muster", *launchers)
        return "Seconds from the fault to the next step, steps taken twice, and the end.\n\n" + table(titles, rows)

    def _confusion(self) -> str:
        pairs = [(outcome.injected, outcome.assigned) for outcome in self.outcomes.values()]
        rows = [cause for cause in CAUSES if any(injected == cause for injected, _ in pairs)]
        columns = [cause for cause in CAUSES if cause in rows or any(assigned == cause for _, assigned in pairs)]
        cells = [(f"**{row}**", *(str(pairs.count((row, column)) or "·") for column in columns)) for row in rows]
        return table(("injected \\\\ assigned", *columns), cells)


def other_figures(page: str) -> str:
    """Return the end of a page that is not the drill's; empty where it has none."""
    _, heading, rest = page.partition(f"\n{OTHER_FIGURES}\n")
    return heading + rest if heading else ""


def _row(outcome: Outcome) -> tuple[str, ...]:
    return (
        f"`{outcome.kind}`",
        outcome.description,
        outcome.injected,
        outcome.assigned,
        f"{outcome.detected:.2f} s" if outcome.detected is not None else "–",
        f"{outcome.recovered:.1f} s" if outcome.recovered is not None else "–",
        str(outcome.lost_steps),
        outcome.phase or "?",
        "no" if outcome.deviations else "yes",
    )


def _cell(recovered: float | None, lost_steps: int, ended: str) -> str:
    return f"{recovered:.1f} s, {lost_steps} lost, {ended}" if recovered is not None else ended
