"""What is left of a one-worker job's speed when other jobs train on the same cores?

    python benchmarks/shared_cores.py [--jobs 3] [--rounds 3] [--seconds 20] [--preset muster-1m] [--json FILE]

Each job is one launcher with one rank, as the operator starts it, with as many threads as there are cores. Rounds of
three sides in turn: a job alone; all jobs with threads that wait busily, as OpenMP's do by default (libgomp spins for
300,000 rounds); all jobs as the launcher sets them up, with threads that sleep while they wait (decision 0055). Counted
are the tokens of the steps that ended while all jobs of a side trained; compared are medians over the rounds.

Exit status 1 unless a job beside the others makes at least 0.7 of its equal part of what it makes alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from muster.words.names import STEP_LOG
from muster.words.signals import StepRecord

BUSY = {"GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"}  # what the two runtimes do where nobody says otherwise
WARM_UP_STEPS = 3
START_SECONDS_MAX = 600.0
FAIR_SHARE_MIN = 0.7


def main() -> int:
    given = _arguments()
    sides: dict[str, tuple[int, dict[str, str]]] = {
        "alone": (1, {}),
        "beside others, waiting busily": (given.jobs, BUSY),
        "beside others, waiting asleep": (given.jobs, {}),
    }
    rates: dict[str, list[float]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="muster-shared-cores-") as folder:
        corpus = Path(folder) / "corpus.txt"
        dice = random.Random(1)
        corpus.write_text(" ".join("".join(dice.choices("abcdefgh", k=dice.randint(2, 9))) for _ in range(200_000)))
        for number in range(given.rounds):
            for side, (jobs, environment) in sides.items():
                root = Path(folder) / f"{number}-{side.replace(' ', '-')}"
                rates[side] += tokens_per_second(root, corpus, jobs, environment, given)
                print(f"round {number + 1}, {side}: {rates[side][-1]:,.0f} tokens/s and job", flush=True)
    alone, busy, asleep = (statistics.median(rates[side]) for side in sides)
    for side, values in rates.items():
        print(f"{side:>30}: {statistics.median(values):10,.0f} tokens/s and job (of {len(values)} jobs)")
    share = asleep * given.jobs / alone
    print(f"asleep / busily: {asleep / busy:.1f}; {given.jobs} jobs asleep / one alone: {share:.2f}")
    if given.json:
        Path(given.json).write_text(json.dumps({"rates": rates, "ratio": asleep / busy, "share": share}) + "\n")
    return int(share < FAIR_SHARE_MIN)


def tokens_per_second(
    root: Path, corpus: Path, jobs: int, environment: dict[str, str], given: argparse.Namespace
) -> list[float]:
    """By job, over `seconds` in which all of them trained."""
    launchers = [_start(root / f"job-{number}", corpus, environment, given) for number in range(jobs)]
    logs = [root / f"job-{number}" / STEP_LOG for number in range(jobs)]
    try:
        deadline = time.monotonic() + START_SECONDS_MAX
        while any(len(_steps(log)) < WARM_UP_STEPS for log in logs):
            if time.monotonic() > deadline or any(launcher.poll() is not None for launcher in launchers):
                raise SystemExit(f"the jobs did not come to their third step; see {root}")
            time.sleep(0.2)
        began = time.time()
        time.sleep(given.seconds)
        # From the end of a step to the end of another: a slow job may have ended few in the window, but at least one.
        return [_rate(log, began, launcher) for log, launcher in zip(logs, launchers, strict=True)]
    finally:
        for launcher in launchers:
            launcher.send_signal(signal.SIGTERM)
        for launcher in launchers:
            launcher.wait()


def _rate(log: Path, began: float, launcher: subprocess.Popen[bytes]) -> float:
    steps = _steps(log)
    while not any(step.at > began for step in steps):
        if launcher.poll() is not None:
            raise SystemExit(f"a job ended; see {log.parent}")
        time.sleep(0.5)
        steps = _steps(log)
    first = max(step.at for step in steps if step.at <= began)
    tokens = sum(step.tokens for step in steps if step.at > began)
    return tokens / (steps[-1].at - first)


def _steps(log: Path) -> list[StepRecord]:
    if not log.exists():
        return []
    lines = log.read_text().splitlines(keepends=True)
    return [StepRecord.model_validate_json(line) for line in lines if line.endswith("\n")]


def _start(
    folder: Path, corpus: Path, environment: dict[str, str], given: argparse.Namespace
) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True)
    training = {
        "model": {"preset": given.preset},
        "data": {"train": [{"source": str(corpus)}], "sequenceLength": given.sequence_length},
        "batch": {"tokensPerStep": 8 * given.sequence_length, "microBatch": 8},
        "length": {"steps": 1_000_000},
    }
    orders = {
        "MUSTER_JOB_UID": folder.name,
        "MUSTER_CONFIG": json.dumps({"training": training, "checkpoint": {"every": 1_000_000}}),
        "MUSTER_CHECKPOINT_URI": f"file://{folder}/checkpoints",
        "MUSTER_WORKER_DIR": str(folder),
        "MUSTER_CACHE_DIR": str(corpus.parent / "cache"),
        "MUSTER_DEVICE": "cpu",
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "1",
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KMP_", "GOMP_"))}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "muster.trainer.launch"],
            env={**inherited, **orders, **environment},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--preset", default="muster-1m")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
