"""make drill-faults: every kind of fault on a real platform, one job each, and what became of it.

    python -m tests.drills.faults.drill [--rounds 1] [--only KIND,KIND] [--results FILE] [--write docs/scorecard.md]

A job without a fault comes first: every later job trains the same, so its losses, step by step, must be the same too.
--results: a JSON file to which this run's outcomes are added. --write: the scorecard, of all that the file holds (with
--rounds 0 nothing is run).
Exit status 1 when anything is not as it ought to be.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from tests.drills.faults.house import COMMIT_EVERY, STEPS, Job, Platform, platform
from tests.drills.faults.kinds import KINDS, Kind
from tests.drills.faults.outcome import Outcome, judge, not_done
from tests.drills.faults.scorecard import Results
from tests.drills.faults.store import Store
from tests.drills.faults.watchers import PROMETHEUS
from tests.polling import eventually

from muster.words.status import JobStatus, Phase


class Drill:
    """reference: by step, the losses of a job to which nothing was done."""

    def __init__(self, house: Platform, s3: Store) -> None:
        self.house, self.s3 = house, s3
        self.reference: dict[int, float] = {}
        self.jobs = 0

    def train_unharmed(self) -> None:
        job = self.submit("unharmed")
        status = job.ends()
        if status.phase != Phase.SUCCEEDED or status.attempt != 1:
            raise RuntimeError(
                f"without a fault the job is {status.phase} in attempt {status.attempt}: {status.because}"
            )
        self.reference = job.losses()

    def run(self, kind: Kind) -> Outcome:
        changes = dict(kind.changes)
        if kind.on_s3:
            changes["checkpoint"] = {"every": COMMIT_EVERY, "uri": self.s3.uri}
        job = self.submit(kind.name, **changes)
        try:
            job.trains_at(kind.struck_at, COMMIT_EVERY)
            at = kind.strike(job, self.s3)
            return judge(kind, job, at, self.wait(job, kind), self.reference)
        except (AssertionError, RuntimeError, psutil.Error) as error:  # the drill goes on with the next kind
            return not_done(kind, f"{type(error).__name__}: {error}")
        finally:
            if not job.status().phase.terminal:
                job.cancel()
            self.house.heal()

    def wait(self, job: Job, kind: Kind) -> JobStatus:
        """For its end; not for long while nobody notices a fault that should end the attempt."""
        if kind.cause is None or kind.finding:
            return job.ends()

        def noticed() -> bool:
            status = job.status()
            return status.phase.terminal or status.attempt > 1 or status.phase in (Phase.RESTARTING, Phase.STOPPING)

        try:
            eventually(noticed, "anybody to notice", kind.patience)
        except AssertionError:
            return job.status()
        return job.ends()

    def submit(self, name: str, **changes: object) -> Job:
        self.jobs += 1
        return self.house.submit(f"{name}-{self.jobs}", **changes)


def run(kinds: Sequence[Kind], rounds: int, results: Results) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="muster-faults-") as folder:
        root = Path(folder)
        with contextlib.ExitStack() as stack:
            s3 = Store(root / "s3")
            stack.callback(s3.stop)
            if any(kind.on_s3 for kind in kinds):
                s3.start()
            drill = Drill(stack.enter_context(platform(root / "state", s3.environment)), s3)
            drill.train_unharmed()
            print(
                f"{'unharmed':<16} trained {len(drill.reference)} steps, {time.monotonic() - began:.0f} s", flush=True
            )
            for _ in range(rounds):
                for kind in kinds:
                    results.add(drill.run(kind))


def main(words: Sequence[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--only", default="", help="kinds, with commas between")
    arguments.add_argument("--results", type=Path)
    arguments.add_argument("--write", type=Path)
    arguments.add_argument("--note", default="", help="a sentence for the page, such as what else the machine did")
    chosen = arguments.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whoever ends us early gets a clean machine too
    kinds = KINDS if PROMETHEUS else [kind for kind in KINDS if kind.name != "prometheus-gone"]
    if not PROMETHEUS:
        print("prometheus-gone: left out, no prometheus is installed here")
    named = [name for name in chosen.only.split(",") if name]
    unknown = set(named) - {kind.name for kind in KINDS}
    if unknown:
        arguments.error(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(k.name for k in KINDS)}")
    results = Results(chosen.results)
    if chosen.rounds:
        run([kind for kind in kinds if not named or kind.name in named], chosen.rounds, results)
    print(results.figures())
    if chosen.write:
        words = " ".join(["make drill-faults", *([f"ARGS='--rounds {chosen.rounds}'"] if chosen.rounds > 1 else [])])
        chosen.write.write_text(results.page(words, STEPS, COMMIT_EVERY, chosen.note))
    return 0 if results.good else 1


if __name__ == "__main__":
    sys.exit(main())
