"""Fair shares: each project's entitlement to the fleet's GPUs, and the order of jobs of one priority.

A project is entitled to its guarantee, and beyond it to a part, by its weight, of what is left; what it does not ask
for is divided among the others, so that nothing idles for somebody who does not come. That is weighted max-min
fairness by progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2).

Shares say who comes first and who may take back what others borrowed (preemption.py). They reserve nothing: a gang may
borrow whatever is idle.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from muster.operator.core.fleet import Fleet, JobSummary
from muster.operator.core.visibility import describe_project
from muster.words.quotas import ProjectQuota
from muster.words.status import Phase
from muster.words.text import plural

_NOTHING = ProjectQuota()


@dataclass(frozen=True, slots=True)
class ShareClaim:
    """Demand of a project in GPUs, and its weight."""

    weight: float
    guaranteed: int
    demand: int


def entitlements(capacity: int, claims: Mapping[str, ShareClaim]) -> dict[str, float]:
    """GPUs by project: never more than a project asks for, nor together more than `capacity`."""
    entitled = {name: float(min(claim.guaranteed, claim.demand)) for name, claim in claims.items()}
    promised = sum(entitled.values())
    if promised > capacity:  # more was promised than there is now: everybody has the same part of it
        return {name: gpus * capacity / promised for name, gpus in entitled.items()}
    left = capacity - promised
    weights = sum(claim.weight for claim in claims.values())
    # Those who ask for least per weight are filled first; what they leave is the others'.
    for name, claim in sorted(claims.items(), key=lambda item: (item[1].demand - entitled[item[0]]) / item[1].weight):
        part = min(claim.demand - entitled[name], left * claim.weight / weights)
        entitled[name] += part
        left -= part
        weights -= claim.weight
    return entitled


class FleetShares:
    """The shares of a fleet's projects, and what they hold. If no project names a weight or a guarantee, nobody is
    entitled to anything and age alone decides among jobs of one priority.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._gpus: dict[str, dict[int, int]] = {}  # GPUs by project and priority
        self._total: dict[str, int] = {}
        self.active = any(q.weight is not None or q.guaranteed_gpus is not None for q in fleet.quotas.values())
        self.entitled: dict[str, float] = self._entitled() if self.active else {}

    def hold(self, job: JobSummary, gpus: int) -> None:
        """Record that the job holds so many more GPUs (fewer, if negative)."""
        levels, priority = self._gpus.setdefault(job.project, {}), self._fleet.priority(job)
        levels[priority] = levels.get(priority, 0) + gpus
        self._total[job.project] = self._total.get(job.project, 0) + gpus

    def gpus_of(self, project: str) -> int:
        return self._total.get(project, 0)

    def within(self, project: str, priority: int, change: int = 0) -> float:
        """GPUs that the project holds by gangs of that priority or a higher one, and `change` more, as far as it is
        entitled to them.
        """
        return min(self._held_from(project, priority) + change, self.entitled.get(project, 0.0))

    def turn(self, project: str, priority: int, change: int = 0) -> tuple[bool, float]:
        """Return the key that sorts the projects with queued gangs of one priority, first turn first: the project that
        holds least of its guarantee, then the one that has borrowed least for its weight. `change`: as if it held so
        many more GPUs.

        Only gangs of that priority or a higher one count: whose turn it is must not change when lower ones are
        preempted, or the nodes that were freed for one gang go to another, which is preempted for the first again.
        """
        if not self.active:
            return False, 0.0
        weight, guaranteed = _weight(self._quota(project)), self._quota(project).guaranteed_gpus or 0
        gpus = self._held_from(project, priority) + change
        if gpus < guaranteed:
            return False, gpus / guaranteed
        return True, (gpus - guaranteed) / weight

    def in_turn(self, queue: list[JobSummary], first: Container[str]) -> Iterator[JobSummary]:
        """The queue (by priority, then age) so that among jobs of one priority those come first whose uids are in
        `first`, as others make room for them, and then the projects take turns. A call of `hold` for one job counts for
        whose turn is next.
        """
        queue = sorted(queue, key=lambda job: (-self._fleet.priority(job), job.uid not in first))
        if not self.active:
            yield from queue
            return
        for (priority, _), level in groupby(queue, key=lambda job: (self._fleet.priority(job), job.uid in first)):
            waiting: dict[str, deque[JobSummary]] = defaultdict(deque)
            for job in level:
                waiting[job.project].append(job)
            turns = [self._entry(project, priority, jobs) for project, jobs in waiting.items()]
            heapq.heapify(turns)
            while turns:
                project = heapq.heappop(turns)[-1]
                yield waiting[project].popleft()
                if waiting[project]:
                    heapq.heappush(turns, self._entry(project, priority, waiting[project]))

    def words(self, project: str, reader: JobSummary) -> str:
        """`project nlp holds 24 GPUs of its share of 16`, as `reader` may see it; empty where there are no shares."""
        if not self.active:
            return ""
        share, whose = self.entitled.get(project, 0.0), describe_project(reader, project)
        return f"{whose} holds {plural(self.gpus_of(project), 'GPU')} of its share of {share:.4g}"

    def _held_from(self, project: str, priority: int) -> int:
        """GPUs that the project holds by gangs of that priority or a higher one."""
        return sum(gpus for level, gpus in self._gpus.get(project, {}).items() if level >= priority)

    def _entry(
        self, project: str, priority: int, jobs: deque[JobSummary]
    ) -> tuple[tuple[bool, float], float, str, str]:
        return self.turn(project, priority), jobs[0].created_at, jobs[0].uid, project

    def _entitled(self) -> dict[str, float]:
        demand: dict[str, int] = {}
        for job in self._fleet.jobs:
            if _wants_nodes(job):
                gang = job.spec.gang
                demand[job.project] = demand.get(job.project, 0) + gang.nodes.max * gang.gpus_per_node
        used = sum(entry.gpus * len(entry.nodes) for entry in self._fleet.others)
        capacity = max(0, sum(node.gpus for node in self._fleet.nodes if node.ready) - used)
        claims = {
            project: ShareClaim(_weight(self._quota(project)), self._quota(project).guaranteed_gpus or 0, gpus)
            for project, gpus in demand.items()
        }
        return entitlements(capacity, claims)

    def _quota(self, project: str) -> ProjectQuota:
        return self._fleet.quotas.get(project, _NOTHING)


def _weight(quota: ProjectQuota) -> float:
    return 1.0 if quota.weight is None else quota.weight


def _wants_nodes(job: JobSummary) -> bool:
    """Return whether the job holds nodes or waits for some, and Muster places it."""
    status, spec = job.status, job.spec
    if spec.gang.scheduler.kind != "builtin" or status.phase.terminal or job.deleting or spec.cancel or spec.suspend:
        return False
    return status.phase is not Phase.STOPPING


def gpus_by_project(jobs: Iterable[tuple[JobSummary, int]]) -> dict[str, int]:
    """The GPUs of these jobs together, by project."""
    totals: dict[str, int] = {}
    for job, gpus in jobs:
        totals[job.project] = totals.get(job.project, 0) + gpus
    return totals
