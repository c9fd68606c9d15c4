"""A fleet that replays a trace through the production admission (`core/admit.py`), event by event, for
benchmarks/fairness.py.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import traces
from benchmarks.traces import GPUS

from muster.operator.core import preemption, victims
from muster.operator.core.admit import BACKFILL_SECONDS, admit
from muster.operator.core.evictions import FIRST_SECONDS, PreemptionOption, began
from muster.operator.core.fleet import Fleet, FleetNode, JobSummary
from muster.operator.core.observed import NodeReservation
from muster.recipe.document import JobSpec, parse_job
from muster.words.quotas import ProjectQuota
from muster.words.status import Attempt, CheckpointStatus, GangStatus, GoodputAccount, JobStatus, Phase

NOW = 1_700_000_000.0
ASKED_SECONDS, ENDED_SECONDS = 30.0, 5.0  # until a gang that is asked to commit, or is ended at once, is gone
COMMIT_FAILS = 0.03
WEIGHTS = {"vision": 1.0, "speech": 1.0, "text": 2.0}
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
        key = (self.reservation, self.nodes, self.committed(now))
        if self._summary is None or self._summary[0] != key:
            self._summary = key, self._summarize(now)
        return self._summary[1]

    def _summarize(self, now: float) -> JobSummary:
        status = JobStatus.model_construct(
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
        self.nodes = tuple(
            FleetNode(f"n{i:03d}", "pool", gpus=GPUS, cpus=96.0, memory_bytes=2**40) for i in range(nodes)
        )
        self.jobs = {job.uid: job for job in jobs}
        self.entries: tuple[NodeReservation, ...] = ()
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
        self.entries = plan.entries
        began_any = False
        for entry in plan.reservations:
            job = self.jobs[entry.uid]
            if entry.number == job.reservation and not job.nodes:
                job.nodes, job.began = entry.nodes, now
                job.waited += now - job.queued
                restart = job.assumed.restart_seconds
                self.at(now + restart + job.work / len(job.nodes), "finish", job)
                self.look(job, now + victims.RESTARTS_BEFORE * restart)
                self.look(job, now + FIRST_SECONDS - job.served)
                began_any = True
        asked = {(entry.uid, entry.number): self.jobs[entry.uid] for entry in plan.entries if entry.yields_to}
        for key in self.gone_at.keys() - asked.keys():  # the order was taken back
            del self.gone_at[key]
        for key in sorted(asked.keys() - self.gone_at.keys()):
            self.gone_at[key] = now + (ASKED_SECONDS if self.policy.asks else ENDED_SECONDS)
            self.at(self.gone_at[key], "stop", asked[key])
        return began_any


def newest_first(options: list[list[PreemptionOption]], missing: int, gpus_max: int) -> PreemptionOption | None:
    """Those that began last until there is room; then those are spared that it does not need, the oldest first."""
    stops = sorted((unit[0] for unit in options), key=lambda option: -max(began(e.job) for e in option.evictions))
    chosen: list[PreemptionOption] = []
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
    return PreemptionOption(evictions, missing, sum(o.cost for o in chosen), sum(o.gpus for o in chosen))
