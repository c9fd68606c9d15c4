"""The simulated store: time, stored jobs and their versions, the reservations, and who hears of changes.

Time is `t`, in seconds since the world began, and never jumps; the wall clock that the operator and the workers read is
`t + offset`, and the offset does.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from muster.local.cluster import NotFound, VersionConflict
from muster.operator.core.fleet import Fleet, FleetNode, JobSummary
from muster.operator.core.observed import NodeReservation, ObservedWorker
from muster.operator.world import FLEET
from muster.recipe.document import JobSpec
from muster.words.quotas import ProjectQuota
from muster.words.status import JobStatus
from tests.sim.checkers import Checkers
from tests.sim.faults import Weather
from tests.sim.physics import SimJob, SimNode, seen_worker

EPOCH = 1_700_000_000.0
SNAPSHOTS_KEPT = 6


class Store:
    def __init__(self, rng: random.Random, weather: Weather, trace: bool = False) -> None:
        self.rng = rng
        self.weather = weather
        self.t = 0.0
        self.offset = EPOCH
        self.set_back = 0.0  # seconds by which the wall clock ever went back
        self.outage_until = 0.0
        self.nodes: dict[str, SimNode] = {}
        self.jobs: dict[str, SimJob] = {}
        self.limits: dict[str, int] = {}
        self.quotas: dict[str, ProjectQuota] = {}
        self.quotas_changed_at = float("-inf")
        self.quota_until: dict[str, float] = {}  # namespace → when its quota has room again
        self.grow_after_seconds = 600.0
        self.reservations: tuple[NodeReservation, ...] = ()
        self.reservations_version = 1
        self.reservation_history: list[tuple[NodeReservation, ...]] = [()]
        self.fleets: list[dict[str, FleetNode]] = []  # by name; the newest is the truth
        self.listeners: list[Callable[[str], None]] = []  # operators that hear of changes
        self.trace = trace
        self.history: list[tuple[float, str]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.check = Checkers(self)

    # --- time ---

    @property
    def wall(self) -> float:
        return self.t + self.offset

    def at(self, t: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (max(t, self.t), self._count, event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.t + seconds, event)

    def run_until(self, t: float, stop: Callable[[], bool] | None = None) -> None:
        """stop: asked once per simulated second; it is over when it says so."""
        asked = self.t
        while self._events and self._events[0][0] <= t:
            when, _, event = heapq.heappop(self._events)
            self.t = when
            event()
            if stop is not None and when >= asked + 1.0:
                asked = when
                if stop():
                    return
        self.t = max(self.t, t)

    def log(self, text: Callable[[], str]) -> None:
        if self.trace:
            self.history.append((self.t, text()))

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    # --- the store ---

    def create_job(self, job: SimJob) -> None:
        self.jobs[job.uid] = job
        self.log(lambda: f"user submits {job.name}: {_gang_words(job.spec)}, {job.steps} steps of {job.step_seconds} s")
        self.stored(job)
        self.crew_changed(job)

    def stored(self, job: SimJob) -> None:
        job.versions.append((job.version, job.spec, job.status, job.generation, job.deleting))
        del job.versions[:-SNAPSHOTS_KEPT]
        self.news(job.uid)

    def edit(self, uid: str, **updates: object) -> None:
        """A user's change of the spec, or a deletion."""
        job = self.jobs[uid]
        if job.removed:
            return
        if "deleting" in updates:
            job.deleting = True
        else:
            job.spec = job.spec.model_copy(update=updates)
            job.generation += 1
        job.requested.update(updates)
        job.version += 1
        self.log(lambda: f"user sets {updates} on {job.name}")
        self.stored(job)

    def write_status(self, uid: str, status: JobStatus, version: str, who: str) -> None:
        job = self.jobs.get(uid)
        if job is None or job.removed:
            raise NotFound(uid)
        if str(job.version) != version:
            raise VersionConflict(f"{uid} is at {job.version}, not {version}")
        before, job.status = job.status, status
        job.version += 1
        if (before.phase, before.code, before.attempt) != (status.phase, status.code, status.attempt):
            self.log(
                lambda: (
                    f"{who}: {job.name} {before.phase} -> {status.phase} ({status.code}), attempt {status.attempt}"
                    f" on {','.join(status.gang.nodes) or 'nothing'}, resume {status.resume_step}: {status.because}"
                )
            )
        self.stored(job)
        self.check.status_written(job, before, status, who)

    def write_reservations(self, entries: tuple[NodeReservation, ...], version: str, who: str) -> None:
        if str(self.reservations_version) != version:
            raise VersionConflict(f"the reservations are at {self.reservations_version}, not {version}")
        before, self.reservations = self.reservations, entries
        self.reservations_version += 1
        self.reservation_history.append(entries)
        del self.reservation_history[:-SNAPSHOTS_KEPT]
        self.log(
            lambda: (
                f"{who}: reservations: "
                + (" ".join(f"{e.uid}#{e.number}:{','.join(e.nodes)}" for e in entries) or "empty")
            )
        )
        self.check.reservations_written(before, entries)

    def news(self, key: str) -> None:
        for listener in self.listeners:
            listener(key)

    def crew(self, job: SimJob) -> tuple[ObservedWorker, ...]:
        return tuple(seen_worker(job, p, self.t, self.offset) for p in job.processes.values() if p.visible)

    def crew_changed(self, job: SimJob) -> None:
        if self.weather.stale:
            job.crews.append(self.crew(job))
            del job.crews[:-SNAPSHOTS_KEPT]
        self.news(job.uid)

    def fleet_changed(self) -> None:
        nodes = {
            n.name: FleetNode(n.name, n.pool, n.capacity, n.gpus, 64.0, 2**40, 110, "", n.labels, n.ready)  # type: ignore[arg-type]
            for n in self.nodes.values()
            if not n.gone
        }
        self.fleets.append(nodes)
        del self.fleets[:-SNAPSHOTS_KEPT]
        self.news(FLEET)

    def fleet(
        self,
        jobs: list[tuple[SimJob, tuple[int, JobSpec, JobStatus, int, bool]]],
        nodes: tuple[FleetNode, ...],
        fresh: bool,
    ) -> Fleet:
        summaries = tuple(
            JobSummary(
                job.uid, job.namespace, job.name, job.created_at, view[4], view[1], view[2], job.project, job.owner
            )
            for job, view in jobs
        )
        return Fleet(
            self.wall,
            fresh,
            nodes,
            summaries,
            self.limits,
            dict(self.quotas),
            grow_after_seconds=self.grow_after_seconds,
        )


def _gang_words(spec: JobSpec) -> str:
    nodes = spec.gang.nodes
    size = str(nodes.min) if nodes.min == nodes.max else f"{nodes.min}..{nodes.max}"
    return f"{size} nodes x {spec.gang.gpus_per_node} GPUs, priority {spec.priority}"
