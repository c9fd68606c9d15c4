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
import heapq
import json
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import traces
from benchmarks.traces import GPUS

from muster.contract.quotas import ProjectQuota
from muster.contract.spec import JobSpec, parse_job
from muster.contract.status import Attempt, CheckpointStatus, GangStatus, GoodputAccount, JobStatus, Phase
from muster.operator.core import preemption, victims
from muster.operator.core.admit import BACKFILL_SECONDS, admit
from muster.operator.core.evictions import Option, began
from muster.operator.core.fleet import Fleet, JobSummary, Node
from muster.operator.core.observed import Reservation

NOW = 1_700_000_000.0
ASKED_SECONDS, ENDED_SECONDS = 30.0, 5.0  # until a gang that is asked to commit, or is ended at once, is gone
COMMIT_FAILS = 0.03
WEIGHTS = {"vision": 1.0, "speech": 1.0, "text": 2.0}
LIMITS = {"lost": 0.2, "wait": 1.05, "put out": 1.25, "fairness": 2.0}
ORIGINAL_SET = preemption.cheapest_set


@dataclass(frozen=True)
class Assumed:
    """What traces do not record."""

    commit_seconds: float = 1800.0
    """Between two commits of a gang."""
    restart_seconds: float = 180.0
    """Until its first step."""


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
    assumed: Assumed = Assumed()
    reservation: int = 0
    nodes: tuple[str, ...] = ()
    began: float = 0.0
    queued: float = 0.0
    waited: float = 0.0
    served: float = 0.0
    """Seconds on nodes, in attempts that have ended."""
    finished: float | None = None
    code: str = "Created"
    """What it waits for, as it was last told."""
    _summary: tuple[object, JobSummary] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def gpus(self) -> int:
        """Of each node."""
        return self.spec.gang.gpus_per_node

    def trained(self, now: float) -> float:
        """Seconds of this attempt in which it trained."""
        return max(0.0, now - self.began - self.assumed.restart_seconds)

    def committed(self, now: float) -> float:
        """Those of them that are committed."""
        return self.trained(now) // self.assumed.commit_seconds * self.assumed.commit_seconds

    def summary(self, now: float) -> JobSummary:
        key = (self.reservation, self.nodes, self.code, self.committed(now))
        if self._summary is None or self._summary[0] != key:
            self._summary = key, self._summarize(now)
        return self._summary[1]

    def _summarize(self, now: float) -> JobSummary:
        status = JobStatus.model_construct(
            code=self.code,
            reservation=self.reservation,
            ledger=self._account(),
            queued_at=NOW + self.queued,
            since=NOW + self.began,
        )
        if self.nodes:
            kept = CheckpointStatus.model_construct(
                step=1, committed_at=NOW + self.began + self.committed(now), uri="", best_step=None
            )
            before = Attempt.model_construct(number=1, outcome="preempted", created_at=0.0, first_step_at=None)
            newest = Attempt.model_construct(
                number=1, created_at=NOW + self.began, first_step_at=NOW + self.began + self.assumed.restart_seconds
            )
            gang = GangStatus.model_construct(
                wanted=len(self.nodes), nodes=self.nodes, pool="pool", capacity="on-demand"
            )
            update = {
                "phase": Phase.RUNNING,
                "gang": gang,
                "checkpoint": kept,
                "attempts": (*[before] * self.reservation, newest),
            }
            status = status.model_copy(update=update)
        return JobSummary(self.uid, "team", self.uid, NOW + self.arrives, False, self.spec, status, self.project)

    def _account(self) -> GoodputAccount:
        """Where it has nodes, it has had them since it began."""
        return GoodputAccount.model_construct(
            seconds={"productive": self.served}, since=NOW + (self.began if self.nodes else self.queued)
        )


@dataclass
class Outcome:
    lost_gpu_seconds: float = 0.0
    put_out_gpus: int = 0
    asked_gpus: int = 0
    preemptions: int = 0
    jobs: list[Job] = field(default_factory=list)


def gang_spec(nodes: int, priority: int, gpus: int = GPUS) -> JobSpec:
    """From eight nodes on it goes on with half of them; its batch can be divided over both."""
    training = {
        "model": {"preset": "llama-8b"},
        "data": {"train": [{"source": "s3://data"}], "sequenceLength": 16},
        "batch": {"tokensPerStep": 16 * gpus * nodes * max(1, nodes // 2)},
        "length": {"steps": 1000},
    }
    gang = {"nodes": {"min": nodes // 2, "max": nodes} if nodes >= 8 else nodes, "gpusPerNode": gpus}
    document = {"training": training, "gang": gang, "priority": priority}
    return parse_job({"metadata": {"name": "job"}, "spec": document}).spec


def trace(
    jobs: int, nodes: int, load: float, seed: int, file: Path | None = None, assumed: Assumed = Assumed()
) -> list[Job]:
    """Jobs whose arrivals are stretched so that together they ask for `load` times what the fleet has meanwhile."""
    dice = random.Random(seed)
    asked = traces.read(file, jobs, nodes // 2, dice, WEIGHTS) if file else traces.drawn(jobs, dice, list(WEIGHTS))
    gpu_seconds = sum(each.nodes * each.gpus * each.seconds for each in asked)
    first, last = (asked[0].at, asked[-1].at) if file else (0.0, 1.0)
    stretch = gpu_seconds / (nodes * GPUS * load) / max(1e-9, last - first)
    kinds = {(each.nodes, each.gpus, each.urgent) for each in asked}
    specs = {(size, gpus, urgent): gang_spec(size, 5 * urgent, gpus) for size, gpus, urgent in kinds}
    found = []
    for i, each in enumerate(asked):
        spec, at = specs[each.nodes, each.gpus, each.urgent], (each.at - first) * stretch
        found.append(Job(f"job{i:05d}", each.project, spec, at, each.nodes * each.seconds, assumed, queued=at))
    return found


class Replay:
    def __init__(self, jobs: list[Job], nodes: int, policy: Policy, quotas: dict[str, ProjectQuota], seed: int) -> None:
        self.policy, self.quotas, self.dice = policy, quotas, random.Random(seed)
        self.nodes = tuple(Node(f"n{i:03d}", "pool", gpus=GPUS, cpus=96.0, memory_bytes=2**40) for i in range(nodes))
        self.jobs = {job.uid: job for job in jobs}
        self.entries: tuple[Reservation, ...] = ()
        self.outcome = Outcome(jobs=jobs)
        self.there: set[str] = set()
        self.gone_at: dict[tuple[str, int], float] = {}
        """Of each gang that is asked to make room, by its uid and reservation."""
        self.events: list[tuple[float, int, str, str, int]] = []
        self.order = 0
        for job in jobs:
            self.at(job.arrives, "arrive", job)
            self.look(job, job.arrives + BACKFILL_SECONDS)

    def at(self, when: float, what: str, job: Job) -> None:
        self.order += 1
        heapq.heappush(self.events, (when, self.order, what, job.uid, job.reservation))

    def look(self, job: Job, when: float) -> None:
        """The operator passes every few seconds; here it does where time alone may have changed what it decides: when a
        gang begins to starve, and when one has run for so long that one of its own priority may put it out.
        """
        self.at(when + 1.0, "look", job)

    def run(self) -> Outcome:
        preemption.cheapest_set = newest_first if self.policy.newest_first else ORIGINAL_SET
        try:
            while self.events:
                now, _, what, uid, number = heapq.heappop(self.events)
                job = self.jobs[uid]
                if what == "arrive":
                    self.there.add(uid)
                elif what == "look":
                    if uid not in self.there or all(self.jobs[other].nodes for other in self.there):
                        continue
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
        if now < self.gone_at.get((job.uid, job.reservation), float("inf")):
            return False
        saved = self.policy.asks and self.dice.random() >= COMMIT_FAILS
        kept = job.trained(now) if saved else job.committed(now)
        spent = now - job.began
        self.outcome.lost_gpu_seconds += (spent - kept) * len(job.nodes) * job.gpus
        job.work -= kept * len(job.nodes)
        job.served += spent
        job.nodes, job.reservation, job.queued = (), job.reservation + 1, now
        self.look(job, now + BACKFILL_SECONDS)
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
            self.outcome.asked_gpus += made.job.spec.gang.nodes.min * made.job.spec.gang.gpus_per_node
        for uid, wait in plan.waits.items():
            self.jobs[uid].code = wait.code
        self.entries = plan.entries
        began_any = False
        for entry in plan.entries:
            job = self.jobs[entry.uid]
            if entry.number == job.reservation and not job.nodes:
                job.nodes, job.began, job.code = entry.nodes, now, "Training"
                job.waited += now - job.queued
                restart = job.assumed.restart_seconds
                self.at(now + restart + job.work / len(job.nodes), "finish", job)
                self.look(job, now + victims.RESTARTS_BEFORE * restart)
                self.look(job, now + victims.FIRST_SECONDS - job.served)
                began_any = True
        asked = {(entry.uid, entry.number): self.jobs[entry.uid] for entry in plan.entries if entry.yields_to}
        for key in self.gone_at.keys() - asked.keys():  # the order was taken back
            del self.gone_at[key]
        for key in sorted(asked.keys() - self.gone_at.keys()):
            self.gone_at[key] = now + (ASKED_SECONDS if self.policy.asks else ENDED_SECONDS)
            self.at(self.gone_at[key], "stop", asked[key])
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
