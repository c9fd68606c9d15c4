"""make sim SEEDS=20000: many worlds on all cores. A failing one prints its history and is kept in seeds.txt.

python tests/sim/run.py --seeds 2000 [--first 0]      those seeds, and all that ever failed
python tests/sim/run.py --seed 1733                   one world, told from beginning to end
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.sim.swarm import RunResult, run_seed

SEEDS = Path(__file__).with_name("seeds.txt")
HISTORY_LINES = 45
FAILURES_SHOWN = 3
JOB = re.compile(r"\b(?:job|rival|late|small|large)\d*")


def kept_seeds() -> list[int]:
    """Seeds that failed once."""
    lines = SEEDS.read_text().splitlines() if SEEDS.exists() else []
    return [int(line.split()[0]) for line in lines if line.strip() and not line.startswith("#")]


def tell(result: RunResult, whole: bool = False) -> str:
    """The failure and what led to it, short enough to read."""
    traced = run_seed(result.seed, trace=True) if not result.history else result
    lines = traced.history if whole else _relevant(traced)
    hidden = len(traced.history) - len(lines)
    head = [f"seed {result.seed}: {result.failure or 'no promise broken'}"]
    return "\n".join(
        [*head, *([f"  … {hidden} earlier or unrelated lines"] if hidden else []), *(f"  {x}" for x in lines)]
    )


def _relevant(result: RunResult) -> list[str]:
    """The last lines that are about the job that the failure names, or about no job at all (machines, operators)."""
    named = JOB.search(result.failure)
    if named is None:
        return list(result.history[-HISTORY_LINES:])
    kept = [line for line in result.history if not JOB.search(line) or named[0] in JOB.findall(line)]
    return kept[-HISTORY_LINES:]


def run(seeds: list[int], processes: int) -> Iterator[RunResult]:
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one, with its whole history")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        result = run_seed(arguments.seed, trace=True)
        print(tell(result, whole=True))
        return 1 if result.failure else 0
    seeds = list(dict.fromkeys([*kept_seeds(), *range(arguments.first, arguments.first + arguments.seeds)]))
    began = time.monotonic()
    failed, totals, passes = [], Counter[str](), 0
    for done, result in enumerate(run(seeds, arguments.processes), 1):
        totals.update(result.counts)
        passes += result.passes
        if result.failure:
            failed.append(result)
            if len(failed) <= FAILURES_SHOWN:
                print(tell(result), flush=True)
        if done % 500 == 0:
            print(
                f"{done} of {len(seeds)} worlds after {time.monotonic() - began:.0f} s, {len(failed)} failed",
                flush=True,
            )
    _keep(failed)
    seconds = time.monotonic() - began
    ends = ", ".join(f"{count} {phase}" for phase, count in totals.items() if count and phase != "attempts")
    print(
        f"{len(seeds)} worlds, {len(failed)} failed, in {seconds:.0f} s on {arguments.processes} processes; "
        f"{passes} passes, {totals['attempts']} attempts; jobs: {ends}"
    )
    return 1 if failed else 0


def _keep(failed: list[RunResult]) -> None:
    known = set(kept_seeds())
    with SEEDS.open("a") as file:
        for result in sorted(failed, key=lambda result: result.seed):
            if result.seed not in known:
                file.write(f"{result.seed}  {result.failure.split(':')[0]}\n")


if __name__ == "__main__":
    sys.exit(main())
