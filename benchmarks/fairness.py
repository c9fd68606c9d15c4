"""What preemption costs, and whether shares are kept, on a fleet that is asked for more than it has.

    python benchmarks/fairness.py [--jobs 400] [--nodes 32] [--loads 0.8 1.0 1.2] [--seed 1] [--json FILE]

Replays a synthetic trace through the production admission (`core/admit.py`), event by event. Its shape follows what is
published of Acme and Helios: most jobs are small and short, a few large ones take most GPU time (durations log-normal,
a median of 20 minutes), a seventh is urgent. Those traces record no commits; here a gang commits every 30 minutes, and
takes three minutes to its first step. Three projects of weights 1, 1 and 2 submit alike.

Three ways to choose whom to put out: `muster` (the cheapest set, asked to commit), `newest` (those that began last,
until there is room, ended without a commit, as schedulers do that know of none), and `newest, asked` (the same, asked
to commit: what the choice alone is worth). Figures: GPU-hours lost (work trained again and restarts), the 99th
percentile of the urgent jobs' waits, GPUs put out for each asked for, and finish-time fairness (Themis): how long a job
took from its submission, by how long it would have taken in a fleet of its project's share alone.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from muster.contract.quotas import ProjectQuota
from muster.contract.spec import JobSpec, parse_job
from muster.contract.status import Attempt, CheckpointStatus, GangStatus, JobStatus, Phase
from muster.operator.core import preemption
from muster.operator.core.admit import admit
from muster.operator.core.evictions import Option, began
from muster.operator.core.fleet import Fleet, JobSummary, Node
from muster.operator.core.observed import Reservation

NOW = 1_700_000_000.0
GPUS = 8
COMMIT_SECONDS, RESTART_SECONDS = 1800.0, 180.0
ASKED_SECONDS, ENDED_SECONDS = 30.0, 5.0  # until a gang that is asked to commit, or is ended at once, is gone
COMMIT_FAILS = 0.03
WEIGHTS = {"vision": 1.0, "speech": 1.0, "text": 2.0}
SIZES = ((1, 0.58), (2, 0.16), (4, 0.13), (8, 0.09), (16, 0.04))
LIMITS = {"lost": 0.2, "wait": 1.05, "put out": 1.25, "fairness": 2.0}
ORIGINAL_SET = preemption.cheapest_set


@dataclass(frozen=True)
class Policy:
    name: str
    newest_first: bool
    asks: bool


POLICIES = (Policy("muster", False, True), Policy("newest", True, False), Policy("newest, asked", True, True))


@dataclass
class Job:
    """One of the trace, and how far it has come. Times are seconds since the trace began."""

    uid: str
    project: str
    spec: JobSpec
    arrives: float
    work: float
    """Node-seconds that are left."""
    reservation: int = 0
    nodes: tuple[str, ...] = ()
    began: float = 0.0
    queued: float = 0.0
    waited: float = 0.0
    finished: float | None = None

    def trained(self, now: float) -> float:
        """Seconds of this attempt in which it trained."""
        return max(0.0, now - self.began - RESTART_SECONDS)

    def committed(self, now: float) -> float:
        """Those of them that are committed."""
        return self.trained(now) // COMMIT_SECONDS * COMMIT_SECONDS

    def summary(self, now: float) -> JobSummary:
        status = JobStatus.model_construct(
            reservation=self.reservation, queued_at=NOW + self.queued, since=NOW + self.began
        )
        if self.nodes:
            kept = CheckpointStatus.model_construct(
                step=1, committed_at=NOW + self.began + self.committed(now), uri="", best_step=None
            )
            first = (
                Attempt.model_construct(
                    number=1, created_at=NOW + self.began, first_step_at=NOW + self.began + RESTART_SECONDS
                ),
            )
            gang = GangStatus.model_construct(
                wanted=len(self.nodes), nodes=self.nodes, pool="pool", capacity="on-demand"
            )
            update = {"phase": Phase.RUNNING, "gang": gang, "checkpoint": kept, "attempts": first}
            status = status.model_copy(update=update)
        return JobSummary(self.uid, "team", self.uid, NOW + self.arrives, False, self.spec, status, self.project)


@dataclass
class Outcome:
    lost_gpu_seconds: float = 0.0
    put_out_gpus: int = 0
    asked_gpus: int = 0
    preemptions: int = 0
    jobs: list[Job] = field(default_factory=list)


def gang_spec(nodes: int, priority: int) -> JobSpec:
    training = {
        "model": {"preset": "llama-8b"},
        "data": {"train": [{"source": "s3://data"}], "sequenceLength": 16},
        "batch": {"tokensPerStep": 16 * GPUS * 16},
        "length": {"steps": 1000},
    }
    gang = {"nodes": {"min": nodes // 2, "max": nodes} if nodes >= 8 else nodes, "gpusPerNode": GPUS}
    document = {"training": training, "gang": gang, "priority": priority}
    return parse_job({"metadata": {"name": "job"}, "spec": document}).spec


def trace(jobs: int, nodes: int, load: float, seed: int) -> list[Job]:
    """Arrivals as a Poisson stream that asks for `load` times what the fleet has."""
    dice = random.Random(seed)
    specs = {(size, urgent): gang_spec(size, 5 * urgent) for size, _ in SIZES for urgent in (0, 1)}
    drawn = []
    for _ in range(jobs):
        size = dice.choices([size for size, _ in SIZES], [share for _, share in SIZES])[0]
        seconds = min(86_400.0, dice.lognormvariate(7.1, 1.3)) * (2.0 if size >= 8 else 1.0)
        drawn.append((size, seconds, int(dice.random() < 0.15 and size < 8), dice.choice(list(WEIGHTS))))
    horizon = sum(size * seconds for size, seconds, _, _ in drawn) / (nodes * load)
    times = sorted(dice.uniform(0.0, horizon) for _ in drawn)
    return [
        Job(f"job{i:04d}", project, specs[size, urgent], at, size * seconds, queued=at)
        for i, (at, (size, seconds, urgent, project)) in enumerate(zip(times, drawn, strict=True))
    ]


class Replay:
    def __init__(self, jobs: list[Job], nodes: int, policy: Policy, quotas: dict[str, ProjectQuota], seed: int) -> None:
        self.policy, self.quotas, self.dice = policy, quotas, random.Random(seed)
        self.nodes = tuple(Node(f"n{i:03d}", "pool", gpus=GPUS, cpus=96.0, memory_bytes=2**40) for i in range(nodes))
        self.jobs = {job.uid: job for job in jobs}
        self.entries: tuple[Reservation, ...] = ()
        self.outcome = Outcome(jobs=jobs)
        self.there: set[str] = set()
        self.told: set[tuple[str, int]] = set()
        self.events: list[tuple[float, int, str, str, int]] = []
        for job in jobs:
            self.at(job.arrives, "arrive", job)

    def at(self, when: float, what: str, job: Job) -> None:
        heapq.heappush(self.events, (when, len(self.events) + len(self.told), what, job.uid, job.reservation))

    def run(self) -> Outcome:
        preemption.cheapest_set = newest_first if self.policy.newest_first else ORIGINAL_SET
        try:
            while self.events:
                now, _, what, uid, number = heapq.heappop(self.events)
                job = self.jobs[uid]
                if what == "arrive":
                    self.there.add(uid)
                elif number != job.reservation or not job.nodes:
                    continue
                elif what == "finish":
                    self.there.discard(uid)
                    job.finished, job.nodes = now, ()
                elif not self.stop(job, now):
                    continue
                while self.admit(now):
                    pass
        finally:
            preemption.cheapest_set = ORIGINAL_SET
        return self.outcome

    def stop(self, job: Job, now: float) -> bool:
        """It is gone from its nodes, unless the order was taken back."""
        if not any(
            entry.uid == job.uid and entry.number == job.reservation and entry.yields_to for entry in self.entries
        ):
            return False
        saved = self.policy.asks and self.dice.random() >= COMMIT_FAILS
        kept = job.trained(now) if saved else job.committed(now)
        spent = now - job.began
        self.outcome.lost_gpu_seconds += (spent - kept) * len(job.nodes) * GPUS
        job.work -= kept * len(job.nodes)
        job.nodes, job.reservation, job.queued = (), job.reservation + 1, now
        return True

    def admit(self, now: float) -> bool:
        """One pass; whether it should be asked again."""
        summaries = tuple(self.jobs[uid].summary(now) for uid in sorted(self.there))
        never = float("inf")
        plan = admit(
            Fleet(NOW + now, True, self.nodes, summaries, quotas=self.quotas, grow_after_seconds=never), self.entries
        )
        for made in plan.preemptions:
            self.outcome.preemptions += 1
            self.outcome.put_out_gpus += sum(eviction.gpus for eviction in made.evictions)
            self.outcome.asked_gpus += made.job.spec.gang.nodes.min * GPUS
        self.entries = plan.entries
        began_any = False
        for entry in plan.entries:
            job = self.jobs[entry.uid]
            if entry.number == job.reservation and not job.nodes:
                job.nodes, job.began = entry.nodes, now
                job.waited += now - job.queued
                self.at(now + RESTART_SECONDS + job.work / len(job.nodes), "finish", job)
                began_any = True
            elif entry.yields_to and (entry.uid, entry.number) not in self.told:
                self.told.add((entry.uid, entry.number))
                self.at(now + (ASKED_SECONDS if self.policy.asks else ENDED_SECONDS), "stop", job)
        return began_any


def newest_first(options: list[list[Option]], missing: int, gpus_max: int) -> Option | None:
    """Those that began last until there is room; then those are spared that it does not need, the oldest first."""
    stops = sorted((unit[0] for unit in options), key=lambda option: -max(began(e.job) for e in option.evictions))
    chosen: list[Option] = []
    for option in stops:
        if sum(each.workers for each in chosen) >= missing:
            break
        chosen.append(option)
    if sum(each.workers for each in chosen) < missing:
        return None
    for option in chosen[::-1]:
        if sum(each.workers for each in chosen) - option.workers >= missing:
            chosen.remove(option)
    evictions = tuple(eviction for option in chosen for eviction in option.evictions)
    return Option(evictions, missing, sum(o.cost for o in chosen), sum(o.gpus for o in chosen))


def alone(jobs: list[Job], nodes: int, seed: int) -> Iterator[tuple[str, float]]:
    """How long each job takes from its submission where its project's share of the fleet is its own."""
    for project, weight in WEIGHTS.items():
        share = max(1, round(nodes * weight / sum(WEIGHTS.values())))
        mine = [replace(job) for job in jobs if job.project == project]
        fitting = [job for job in mine if job.spec.gang.nodes.min <= share]
        for job in Replay(fitting, share, POLICIES[0], {}, seed).run().jobs:
            assert job.finished is not None
            yield job.uid, job.finished - job.arrives
        for job in mine:
            if job.spec.gang.nodes.min > share:  # by itself it would never begin: as if it had the whole fleet
                yield job.uid, RESTART_SECONDS + job.work / job.spec.gang.nodes.max


def measure(jobs: list[Job], nodes: int, policy: Policy, by_itself: dict[str, float], seed: int) -> dict[str, float]:
    quotas = {project: ProjectQuota(weight=weight, preempts=True) for project, weight in WEIGHTS.items()}
    found = Replay([replace(job) for job in jobs], nodes, policy, quotas, seed).run()
    rho = [(job.finished or float("inf")) - job.arrives for job in found.jobs]
    fairness = sorted(took / by_itself[job.uid] for took, job in zip(rho, found.jobs, strict=True))
    waits = sorted(job.waited for job in found.jobs if job.spec.priority)
    return {
        "preemptions": found.preemptions,
        "lost_gpu_hours": round(found.lost_gpu_seconds / 3600, 1),
        "urgent_wait_p99_s": round(_percentile(waits, 0.99), 1),
        "put_out_per_asked": round(found.put_out_gpus / max(1, found.asked_gpus), 3),
        "fairness_median": round(statistics.median(fairness), 3),
        "fairness_p99": round(_percentile(fairness, 0.99), 2),
        "fairness_max": round(fairness[-1], 2),
    }


def _percentile(values: list[float], part: float) -> float:
    return values[min(len(values) - 1, int(len(values) * part))] if values else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 1.0, 1.2])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: dict[str, Any] = {}
    for load in arguments.loads:
        jobs = trace(arguments.jobs, arguments.nodes, load, arguments.seed)
        by_itself = dict(alone(jobs, arguments.nodes, arguments.seed))
        for policy in POLICIES:
            row = rows[f"{load:.0%}/{policy.name}"] = measure(jobs, arguments.nodes, policy, by_itself, arguments.seed)
            print(
                f"load {load:4.0%}  {policy.name:14}  " + "  ".join(f"{key} {value:g}" for key, value in row.items()),
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    missed = [words for load in arguments.loads for words in _missed(rows, f"{load:.0%}")]
    print("\n".join(f"MISSED: {words}" for words in missed) or "holds: all limits at every load")
    return 1 if missed else 0


def _missed(rows: dict[str, Any], load: str) -> Iterator[str]:
    """The wait is compared with those who ask for a commit too: to end gangs at once is always faster."""
    mine, newest, asked = (rows[f"{load}/{policy.name}"] for policy in POLICIES)
    checks = (
        (mine["lost_gpu_hours"], LIMITS["lost"] * newest["lost_gpu_hours"], "GPU-hours lost"),
        (mine["urgent_wait_p99_s"], LIMITS["wait"] * asked["urgent_wait_p99_s"], "s of wait (p99)"),
        (mine["put_out_per_asked"], LIMITS["put out"], "GPUs put out for each asked"),
        (mine["fairness_max"], LIMITS["fairness"], "finish-time fairness at most"),
    )
    for value, limit, what in checks:
        if value > limit:
            yield f"load {load}: {what}: {value:g} > {limit:g}"


if __name__ == "__main__":
    sys.exit(main())
