"""What preemption costs, and whether shares are kept, on a fleet that is asked for more than it has.

    python benchmarks/fairness.py [--trace FILE] [--jobs 400] [--nodes 32] [--loads 0.8 1.0 1.2] [--seeds 1]
                                  [--commit-minutes 30 ...] [--restart-seconds 180 ...]

Replays a trace through the production admission (`core/admit.py`), event by event: one that is drawn, whose shape
follows what is published of Acme and Helios (most jobs are small and short, a few large ones take most GPU time), or
jobs of a public trace (benchmarks/traces.py), whose times of arrival are stretched to the load. A seventh is urgent.
Traces record neither commits nor restarts: how often a gang commits and how long it takes to its first step are
assumed, and where several values are given, each is tried with each. Three projects have the weights 1, 1 and 2. A gang
that was made smaller does not grow again.

Three ways to choose whom to put out: `muster` (the cheapest set, asked to commit), `newest` (those that began last,
until there is room, ended without a commit, as schedulers do that know of none), and `newest, asked` (the same, asked
to commit: what the choice alone is worth).

Figures, over all seeds: GPU-hours lost (work trained again, and restarts) and, as their `floor`, what the GPUs that
were asked for would cost if exactly as many had been put out and every commit had come; the 99th percentile of the
urgent jobs' waits; GPUs put out for each asked for; and finish-time fairness (Themis, section 3): how long a job took
from its submission, by how long it takes where its project has its share of the fleet for itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fleet_replay import POLICIES, WEIGHTS, Assumed, Job, Policy, Replay, trace

from muster.words.quotas import ProjectQuota

LIMITS = {"lost": 0.2, "wait": 1.05, "put out": 1.25, "fairness": 2.0}


def alone(jobs: list[Job], nodes: int, seed: int) -> dict[str, float]:
    """How long each job takes from its submission where its project's share of the fleet is its own."""
    found = {}
    for project, weight in WEIGHTS.items():
        share = max(1, round(nodes * weight / sum(WEIGHTS.values())))
        mine = [replace(job) for job in jobs if job.project == project]
        fitting = [job for job in mine if job.spec.gang.nodes.min <= share]
        for job in Replay(fitting, share, POLICIES[0], {}, seed).run().jobs:
            assert job.finished is not None
            found[job.uid] = job.finished - job.arrives
        for job in mine:
            if job.spec.gang.nodes.min > share:  # by itself it would never begin: as if it had the whole fleet
                found[job.uid] = job.assumed.restart_seconds + job.work / job.spec.gang.nodes.max
    return found


@dataclass
class Setting:
    """A trace, and how long its jobs take by themselves."""

    jobs: list[Job]
    nodes: int
    seed: int
    by_itself: dict[str, float]


def setting(
    jobs: int, nodes: int, load: float, seed: int, file: Path | None = None, assumed: Assumed = Assumed()
) -> Setting:
    drawn = trace(jobs, nodes, load, seed, file, assumed)
    return Setting(drawn, nodes, seed, alone(drawn, nodes, seed))


def measure(settings: list[Setting], policy: Policy) -> dict[str, float]:
    quotas = {project: ProjectQuota(weight=weight, preempts=True) for project, weight in WEIGHTS.items()}
    lost = put_out = asked = preemptions = 0.0
    fairness: list[float] = []
    waits: list[float] = []
    for each in settings:
        jobs = [replace(job) for job in each.jobs]
        found = Replay(jobs, each.nodes, policy, quotas, each.seed).run()
        lost, preemptions = lost + found.lost_gpu_seconds, preemptions + found.preemptions
        put_out, asked = put_out + found.put_out_gpus, asked + found.asked_gpus
        fairness += [((job.finished or float("inf")) - job.arrives) / each.by_itself[job.uid] for job in found.jobs]
        waits += [job.waited for job in found.jobs if job.spec.priority]
    fairness.sort()
    return {
        "preemptions": preemptions,
        "lost_gpu_hours": round(lost / 3600, 1),
        "floor_gpu_hours": round(asked * settings[0].jobs[0].assumed.restart_seconds / 3600, 1),
        "urgent_wait_p99_s": round(_percentile(sorted(waits), 0.99), 1),
        "put_out_per_asked": round(put_out / max(1, asked), 3),
        "fairness_median": round(statistics.median(fairness), 3),
        "fairness_p99": round(_percentile(fairness, 0.99), 2),
        "fairness_max": round(fairness[-1], 2),
        "fairness_over_2": round(sum(value > LIMITS["fairness"] for value in fairness) / len(fairness), 4),
    }


def _percentile(values: list[float], part: float) -> float:
    return values[min(len(values) - 1, int(len(values) * part))] if values else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 1.0, 1.2])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="how many traces are drawn, or places in the file")
    parser.add_argument("--commit-minutes", type=float, nargs="+", default=[30.0])
    parser.add_argument("--restart-seconds", type=float, nargs="+", default=[180.0])
    parser.add_argument("--trace", type=Path, help="a public trace, as benchmarks/traces.py describes it")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: dict[str, Any] = {}
    cases = [
        (
            f"commits every {minutes:g} min, restarts of {seconds:g} s, load {load:.0%}",
            Assumed(60 * minutes, seconds),
            load,
        )
        for minutes in arguments.commit_minutes
        for seconds in arguments.restart_seconds
        for load in arguments.loads
    ]
    for case, assumed, load in cases:
        print(case)
        seeds = range(arguments.seed, arguments.seed + arguments.seeds)
        settings = [setting(arguments.jobs, arguments.nodes, load, seed, arguments.trace, assumed) for seed in seeds]
        for policy in POLICIES:
            row = rows[f"{case}/{policy.name}"] = measure(settings, policy)
            print(f"  {policy.name:14}  " + "  ".join(f"{key} {value:g}" for key, value in row.items()), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    missed = [words for case, _, _ in cases for words in _missed(rows, case)]
    print("\n".join(f"MISSED: {words}" for words in missed) or "holds: all limits in every case")
    return 1 if missed else 0


def _missed(rows: dict[str, Any], case: str) -> Iterator[str]:
    """The wait is compared with those who ask for a commit too: to end gangs at once is always faster."""
    mine, newest, asked = (rows[f"{case}/{policy.name}"] for policy in POLICIES)
    checks = (
        (mine["lost_gpu_hours"], LIMITS["lost"] * newest["lost_gpu_hours"], "GPU-hours lost"),
        (mine["urgent_wait_p99_s"], LIMITS["wait"] * asked["urgent_wait_p99_s"], "s of wait (p99)"),
        (mine["put_out_per_asked"], LIMITS["put out"], "GPUs put out for each asked"),
        (mine["fairness_max"], LIMITS["fairness"], "finish-time fairness at most"),
    )
    for value, limit, what in checks:
        if value > limit:
            yield f"{case}: {what}: {value:g} > {limit:g}"


if __name__ == "__main__":
    sys.exit(main())
