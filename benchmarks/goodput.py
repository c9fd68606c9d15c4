"""How much of the wall clock is training, when something breaks every five minutes? And is `every: auto` the best?

    python benchmarks/goodput.py [--hours 24] [--seed 1] [--results FILE] [--json FILE]

ETTR is time spent on steps that were not trained again, over wall clock. The production core and runner steer a small
gang through random interruptions, and the production policy chooses the interval between checkpoints from what the
status remembers of earlier attempts, as in a worker. How long a restart takes is what `make drill-faults` measured:
--results names its file; without one, the figures of docs/scorecard.md. The result is compared with the closed formula
of benchmarks/ettr.py.

The second part searches the best interval by brute force: the same 100,000 random lives are lived with every interval
of a fine grid, for several mean times between failures, blocking times and upload times.

Exit status 1 unless ETTR >= 90 %, the formula is within 3 points, and each `auto` interval within 10 % of the best.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # to be run as a file

from benchmarks.ettr import formula
from benchmarks.fleet import Site, muster

from muster.recipe.document import JobSpec, parse_job
from muster.trainer.checkpoint.policy import SaveHistory, SavePolicy
from muster.words.job import EarlierAttempts, past_of
from muster.words.status import JobStatus

FAULT_EVERY_SECONDS = 300.0
# Of a measured recovery, what comes before the processes' start: until the gang is gone, and the mean pause.
STOP_SECONDS, PAUSE_SECONDS = 0.2, 0.75
RECOVERY_SECONDS = 8.0
BLOCK_SECONDS, UPLOAD_SECONDS, STEP_SECONDS = 0.02, 0.3, 0.1
LIVES = 100_000
# Mean seconds between failures, seconds that a save blocks training, seconds until it is committed.
CASES = (
    (300.0, 0.05, 1.0),
    (300.0, 2.0, 2.0),
    (300.0, 10.0, 10.0),
    (3_600.0, 0.6, 30.0),
    (3_600.0, 30.0, 30.0),
    (86_400.0, 0.6, 51.0),
    (86_400.0, 20.0, 60.0),
)


def small_site(recovery_seconds: float) -> Site:
    start = recovery_seconds - STOP_SECONDS - PAUSE_SECONDS
    return Site(
        nodes=2, spares=2, gpus=0, start=0.3 * start, meet=0.5 * start, load=0.2 * start, block=BLOCK_SECONDS,
        save=UPLOAD_SECONDS, step=STEP_SECONDS, not_ready=1.0, stop=STOP_SECONDS, repair=0.0,
    )  # fmt: skip


def job() -> JobSpec:
    document = {
        "training": {
            "model": {"preset": "muster-1m"},
            "data": {"train": [{"source": "s3://data"}], "sequenceLength": 128},
            "batch": {"tokensPerStep": 1024},
            "length": {"steps": 100_000_000},
        },
        "gang": {"nodes": 2},
        # A day of such faults spends any ordinary budget.
        "recovery": {
            "budgets": {"infrastructure": 100_000, "unknown": 100_000},
            "excludeNodeAfter": 100_000,
            "stopAfterNoProgress": 1_000,
        },
    }
    return parse_job({"metadata": {"name": "storm"}, "spec": document}).spec


def auto(status: JobStatus, now: float) -> float:
    """The interval in force in the middle of an attempt's expected life."""
    past = past_of(status) or EarlierAttempts()
    history = SaveHistory(
        started_at=0.0,
        blocked_seconds=(BLOCK_SECONDS,),
        upload_seconds=(UPLOAD_SECONDS,),
        failures=past.failures,
        observed_seconds=past.seconds,
        nodes=2,
    )
    return SavePolicy().interval_seconds(history)


def storm(hours: float, seed: int, recovery_seconds: float) -> dict[str, Any]:
    """The production core through a Poisson storm of crashes."""
    rng, end = random.Random(seed), hours * 3600.0
    moments, t = [], 0.0
    while (t := t + rng.expovariate(1 / FAULT_EVERY_SECONDS)) < end:
        moments.append((t, "a process is killed", "crash"))
    chosen: list[float] = []

    def interval(status: JobStatus, now: float) -> float:
        chosen.append(auto(status, now))
        return chosen[-1]

    site = small_site(recovery_seconds)
    found = muster(site, job(), interval, rng, list(moments), end)
    # The formula's mean time between failures is training time; here faults also fall into recoveries, and are moot.
    expected = formula(FAULT_EVERY_SECONDS, recovery_seconds, chosen[-1], BLOCK_SECONDS, UPLOAD_SECONDS)
    return {**found, "formula": expected, "interval": chosen[-1], "first_interval": chosen[0], "faults": len(moments)}


def best_by_brute_force(between: float, block: float, upload: float, rng: np.random.Generator) -> tuple[float, float]:
    """(the best interval from save to save, its share of useful time), with the same lives for every interval."""
    lives = rng.exponential(between, LIVES)
    guess = np.sqrt(2 * between * block)
    grid = np.geomspace(max(guess / 5, 1e-2), guess * 5, 400)
    grid = grid[grid + block >= upload]

    def useful(training: float) -> float:
        # The n-th save begins when n × training is done, blocks, and counts `upload` (at least the block) later.
        landed = np.floor((lives - max(upload, block) + block) / (training + block))
        return float(np.maximum(landed, 0).sum() * training / lives.sum())

    shares = np.array([useful(training) for training in grid])
    # The top is flat and the lives are random: a parabola through what is near the top finds its middle.
    near = shares >= shares.max() - 0.05 * (shares.max() - shares.min())
    a, b, _ = np.polyfit(np.log(grid[near]), shares[near], 2)
    return float(np.exp(-b / (2 * a)) + block), float(shares.max())


def intervals(seed: int) -> list[dict[str, float]]:
    rng = np.random.default_rng(seed)
    rows = []
    for between, block, upload in CASES:
        best, share = best_by_brute_force(between, block, upload, rng)
        # What a worker knows after fifty failures; the bounds are for what the formula does not know.
        history = SaveHistory(
            started_at=0.0, blocked_seconds=(block,), upload_seconds=(upload,), failures=50,
            observed_seconds=50 * between,
        )  # fmt: skip
        chosen = SavePolicy(interval_seconds_min=0.0, interval_seconds_max=1e9).interval_seconds(history)
        rows.append({"between": between, "block": block, "upload": upload, "best": best, "auto": chosen, "ettr": share})
    return rows


def measured_recovery(path: Path | None) -> float:
    """The mean of the drill's recoveries, or what docs/scorecard.md says."""
    if path is None:
        return RECOVERY_SECONDS
    found = [entry["recovered"] for entry in json.loads(path.read_text())["outcomes"] if entry["recovered"]]
    return float(sum(found) / len(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="what `make drill-faults ARGS='--results FILE'` wrote")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    recovery = measured_recovery(given.results)
    found = storm(given.hours, given.seed, recovery)
    rows = intervals(given.seed)
    print(f"one fault in {FAULT_EVERY_SECONDS:.0f} s for {given.hours:g} h, recovery {recovery:.1f} s: ", end="")
    print(f"{found['faults']} faults, {found['attempts']} attempts, interval {found['interval']:.1f} s in the end")
    print(f"ETTR {found['ettr']:.2%}, account {found['ettr_by_account']:.2%}, by the formula {found['formula']:.2%}")
    print("\nseconds between failures   blocks   uploads      best      auto   auto/best")
    for row in rows:
        print(
            f"{row['between']:>24.0f} {row['block']:>8.2f} {row['upload']:>9.1f} {row['best']:>9.1f}"
            f" {row['auto']:>9.1f} {row['auto'] / row['best']:>11.3f}"
        )
    near = all(abs(row["auto"] / row["best"] - 1) <= 0.1 for row in rows)
    good = found["ettr"] >= 0.9 and abs(found["ettr"] - found["formula"]) <= 0.03 and near
    print("holds" if good else "DOES NOT HOLD")
    if given.json:
        given.json.write_text(json.dumps({"storm": found, "intervals": rows}, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
