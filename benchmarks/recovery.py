"""How long a job stands still when one of its processes is killed, and where that time goes.

    python benchmarks/recovery.py [--kills 20] [--seed 0] [--json] [--check]

A real two-worker job (gloo, FSDP) trains on this machine under a real operator process. Ranks and launchers are killed
with SIGKILL at random moments of its training. Each recovery is measured from the kill to the first new step, by the
times that operator, launcher and ranks themselves wrote down. The pause before an attempt has its usual half to one
second, but does not double when a kill comes before the next commit, as it would for a job that keeps failing.
--check: exit 1 if a promise is broken: p95 of the whole at most 15 s, of detection at most 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from muster.local.cluster import LocalCluster
from muster.operator.local import processes
from muster.operator.local.processes import WorkerKey
from muster.recipe.document import parse_job
from muster.words.names import HEARTBEAT, STEP_LOG, Env
from muster.words.signals import Heartbeat, StepRecord, TrainerPhase
from muster.words.state_folder import StateFolder
from muster.words.status import JobStatus, Phase

WORKERS = 2
TOTAL_SECONDS_MAX, DETECTION_SECONDS_MAX = 15.0, 1.0
POLL_SECONDS = 0.01
T = TypeVar("T")

# Each phase of a recovery ends at a moment that somebody wrote down; it began when the one before it ended.
PHASES = {
    "detect": "the operator has written that the attempt ended",
    "stop": "the gang is seen gone, the attempt is closed",
    "pause": "the back-off is over, the next attempt exists",
    "spawn": "all launchers run",
    "launch": "all launchers have passed the fence and started their ranks",
    "import": "all ranks have imported torch and met",
    "build": "the token store is open, the model is built and sharded",
    "load": "the commit is read",
    "first step": "the first new step is done",
}


@dataclass
class Recovery:
    victim: str
    killed_at: float
    ends: dict[str, float] = field(default_factory=dict)

    def seconds(self) -> dict[str, float]:
        found, before = {}, self.killed_at
        for phase in PHASES:
            if phase in self.ends:
                found[phase] = max(0.0, self.ends[phase] - before)
                before = max(before, self.ends[phase])
        return found

    @property
    def total(self) -> float:
        return self.ends["first step"] - self.killed_at


class Bench:
    def __init__(self, root: Path, seed: int) -> None:
        self.state = StateFolder(root)
        self.cluster = LocalCluster(self.state.cluster)
        self.dice = random.Random(seed)
        with open(root / "operator.log", "wb") as log:
            command = [sys.executable, "-m", "muster.operator", "--state", str(root), "--parent-pid", str(os.getpid())]
            self.operator = subprocess.Popen(command, stdout=log, stderr=log)
        text_beside(root).write_text(
            "".join(path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py")))
        )
        self.uid = self.cluster.create("recovery", "default", parse_job(document(root)).spec, {}).metadata.uid

    def close(self) -> None:
        self.operator.kill()
        self.operator.wait()
        while members := processes.scan(self.state):
            processes.kill_all([member.process for member in members])
            time.sleep(POLL_SECONDS)

    def status(self) -> JobStatus:
        status = self.cluster.get(self.uid).status
        if status.phase.terminal or self.operator.poll() is not None:
            log = (self.state.root / "operator.log").read_text()[-3000:]
            raise SystemExit(f"the job is {status.phase}: {status.because}; {status.last_failure}\n{log}")
        return status

    def key(self, attempt: int, worker: int) -> WorkerKey:
        return WorkerKey(self.uid, attempt, worker)

    def steps(self, attempt: int) -> list[StepRecord]:
        path = self.key(attempt, 0).folder(self.state) / STEP_LOG
        lines = path.read_text().splitlines() if path.exists() else []
        return [StepRecord.model_validate_json(line) for line in lines if line.endswith("}")]

    def heartbeat(self, attempt: int, worker: int) -> Heartbeat | None:
        try:
            path = self.key(attempt, worker).folder(self.state) / HEARTBEAT.format(rank=worker)
            return Heartbeat.model_validate_json(path.read_bytes())
        except (OSError, ValueError):
            return None

    def kill_somebody(self, attempt: int) -> Recovery:
        """A rank, or now and then a launcher."""
        worker = self.dice.randrange(WORKERS)
        launcher = self.dice.random() < 0.25
        tree = processes.members(processes.scan(self.state), self.key(attempt, worker))
        top = processes.top_of(tree)
        victims = [process for process in tree if (process == top) == launcher]
        recovery = Recovery(f"{'launcher' if launcher else 'rank'} {worker}", time.time())
        os.kill(victims[0].pid, signal.SIGKILL)
        return recovery

    def follow(self, recovery: Recovery, attempt: int) -> None:
        """Until the first step of the attempt after this one; fills in when each phase ended."""
        following = attempt + 1
        entered: dict[tuple[int, TrainerPhase], float] = {}
        started: dict[int, float] = {}

        def first_step() -> list[StepRecord]:
            self.status()
            for worker in range(WORKERS):
                if beat := self.heartbeat(following, worker):
                    started[worker] = beat.started_at
                    entered.setdefault((worker, beat.phase), beat.progressed_at)
            return self.steps(following)

        steps = until(first_step, f"the first step of attempt {following}", 120)
        status = self.status()
        attempts = {entry.number: entry for entry in status.attempts}
        changes = [change for change in self.cluster.changes(0, limit=1_000_000) if change.uid == self.uid]
        ends = recovery.ends
        ends["detect"] = next(
            change.at for change in changes
            if change.status.attempt == attempt and change.status.phase == Phase.RESTARTING
        )  # fmt: skip
        ends["stop"] = attempts[attempt].ended_at or 0.0
        ends["pause"] = attempts[following].created_at
        records = [processes.read_record(self.state, self.key(following, worker)) for worker in range(WORKERS)]
        ends["spawn"] = max(record.started_at for record in records if record)
        ends["launch"] = max(started.values())
        for phase, name in (
            (TrainerPhase.DATA, "import"),
            (TrainerPhase.LOAD, "build"),
            (TrainerPhase.STEP, "load"),
        ):
            if moments := [at for (_, seen), at in entered.items() if seen == phase]:
                ends[name] = max(moments)
        ends["first step"] = min(step.at for step in steps)

    def run(self, kills: int) -> list[Recovery]:
        recoveries = []
        until(lambda: self.steps(1), "the first step", 120)
        for number in range(kills):
            attempt = self.status().attempt
            pause_until = time.monotonic() + self.dice.uniform(0.2, 3.0)
            until(lambda moment=pause_until: time.monotonic() >= moment, "a random moment", 10)  # type: ignore[misc]
            recovery = self.kill_somebody(attempt)
            self.follow(recovery, attempt)
            recoveries.append(recovery)
            told = "  ".join(f"{name} {seconds:.2f}" for name, seconds in recovery.seconds().items())
            print(
                f"{number + 1:3}  {recovery.victim:<10}  {recovery.total:5.2f} s   {told}", file=sys.stderr, flush=True
            )
        return recoveries


def text_beside(root: Path) -> Path:
    """The training data: not in the state folder, which no job may read."""
    return root.parent / "text.txt"


def document(root: Path) -> dict[str, object]:
    return {
        "metadata": {"name": "recovery"},
        "spec": {
            "training": {
                "model": {"preset": "muster-1m"},
                "data": {"train": [{"source": str(text_beside(root))}], "sequenceLength": 128},
                "batch": {"tokensPerStep": 1024, "microBatch": 2},
                "parallel": {"shard": "fsdp"},
                "length": {"steps": 1_000_000},
            },
            "gang": {"nodes": WORKERS},
            "checkpoint": {"every": 10},
            "recovery": {
                "budgets": {"infrastructure": 10_000, "unknown": 10_000},
                "stopAfterNoProgress": 1_000,
                "backoffSecondsMax": 1.0,
            },
        },
    }


def until(question: Callable[[], T], what: str, seconds: float) -> T:
    deadline = time.monotonic() + seconds
    while not (answer := question()):
        if time.monotonic() >= deadline:
            raise SystemExit(f"waited {seconds:g} s for {what}")
        time.sleep(POLL_SECONDS)
    return answer


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least that share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)]


def table(recoveries: list[Recovery]) -> dict[str, dict[str, float]]:
    columns: dict[str, list[float]] = {}
    for recovery in recoveries:
        for name, seconds in recovery.seconds().items():
            columns.setdefault(name, []).append(seconds)
    columns["total"] = [recovery.total for recovery in recoveries]
    return {
        name: {"p50": statistics.median(values), "p95": percentile(values, 0.95), "max": max(values)}
        for name, values in columns.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--check", action="store_true", help="exit 1 if a promise is broken")
    given = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("MUSTER_")]:
        assert name not in vars(Env).values(), f"{name} is set: this must not run inside a worker"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whoever ends us early gets a clean machine too
    with tempfile.TemporaryDirectory(prefix="muster-recovery-") as folder:
        state = Path(os.path.realpath(folder)) / "state"
        state.mkdir()
        bench = Bench(state, given.seed)
        try:
            recoveries = bench.run(given.kills)
            judged = bench.status().restarts.by_cause
        finally:
            bench.close()
    rows = table(recoveries)
    kept = rows["total"]["p95"] <= TOTAL_SECONDS_MAX and rows["detect"]["p95"] <= DETECTION_SECONDS_MAX
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    if given.json:
        print(
            json.dumps(
                {
                    "machine": machine,
                    "kills": len(recoveries),
                    "seed": given.seed,
                    "kept": kept,
                    "judged": judged,
                    "phases": rows,
                }
            )
        )
    else:
        print(f"{len(recoveries)} kills on {machine}, judged {judged}; seconds from the kill to the first new step\n")
        print(f"{'':<11}{'p50':>7}{'p95':>7}{'max':>7}   ends when")
        for name in [*(phase for phase in PHASES if phase in rows), "total"]:
            row = rows[name]
            ends = PHASES.get(name, "")
            print(f"{name:<11}{row['p50']:>7.2f}{row['p95']:>7.2f}{row['max']:>7.2f}   {ends}")
    return 1 if given.check and not kept else 0


if __name__ == "__main__":
    sys.exit(main())
