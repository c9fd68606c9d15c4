"""How one operator sees the world: through caches that lag, calls that fail, and replies that get lost.

Implements muster.operator.world.World. Each call pauses before and after it takes effect; at a pause the scheduler may
let anybody else move, or let the operator die.
"""

from __future__ import annotations

import types
from collections.abc import AsyncIterator, Generator
from typing import TYPE_CHECKING, TypeVar

from muster.local.cluster import VersionConflict
from muster.operator.core.decision import Action
from muster.operator.core.fleet import Fleet
from muster.operator.core.observed import CommittedSteps, NodeReservation, ObservedJob
from muster.operator.world import ReservationSet
from muster.recipe.document import JobSpec
from muster.words.status import JobStatus

if TYPE_CHECKING:
    from tests.sim.physics import SimJob
    from tests.sim.world import SimWorld


T = TypeVar("T")


class ApiError(Exception):
    """The call failed; it may have happened."""


@types.coroutine
def pause() -> Generator[None, None, None]:
    yield


class View:
    def __init__(self, world: SimWorld, who: str) -> None:
        self.world = world
        self.who = who
        self.in_flight: list[tuple[str, object]] = []

    def now(self) -> float:
        return self.world.wall

    def watch(self) -> AsyncIterator[str]:
        raise NotImplementedError("the scheduler delivers the news")

    async def jobs(self) -> tuple[str, ...]:
        await self._request()
        return tuple(uid for uid, job in self.world.jobs.items() if not job.removed)

    async def observe(self, uid: str, fresh: bool = False) -> ObservedJob | None:
        world = self.world
        await self._request()
        job = world.jobs.get(uid)
        if job is None or job.removed:
            return None
        _, spec, status, generation, deleting = version = self._cached(job.versions, fresh)
        if fresh:
            await pause()
        workers = world.crew(job) if fresh or not self._stale() else self._cached(job.crews, False)
        if fresh:
            await pause()
        commits = job.commits if fresh or not self._stale() else job.commits[: world.rng.randint(0, len(job.commits))]
        best = max(commits, key=lambda commit: commit[0], default=None)
        signals = tuple(job.signals if not self._stale() else job.signals[:-1])
        nodes = self._cached(world.fleets, fresh)
        reserved = self._cached(world.reservation_history, fresh)
        return ObservedJob(
            uid=uid,
            namespace=job.namespace,
            name=job.name,
            created_at=job.created_at,
            generation=generation,
            deleting=deleting,
            version=str(version[0]),
            now=world.wall,
            fresh=fresh,
            spec=spec,
            status=status,
            workers=workers,
            committed=CommittedSteps(best[0], best[3]) if best else None,
            checkpoint_uri=f"sim://{uid}",
            signals=signals,
            nodes_unfit=tuple(name for name in status.gang.nodes if name not in nodes or not nodes[name].ready),
            reservations=tuple(entry for entry in reserved if entry.uid == uid),
        )

    async def write_status(self, uid: str, status: JobStatus, version: str) -> None:
        await self._request()
        if self.world.chance(self.world.weather.spurious_conflict):
            raise VersionConflict("somebody wrote an annotation")
        self.world.write_status(uid, status, version, self.who)
        await self._reply()

    async def apply(self, uid: str, action: Action) -> None:
        self.in_flight.append((uid, action))
        await self._request()
        self.in_flight.clear()
        self.world.act(uid, action, self.who)
        await self._reply()

    async def fleet(self, fresh: bool = False) -> Fleet:
        world = self.world
        await self._request()
        jobs: list[tuple[SimJob, tuple[int, JobSpec, JobStatus, int, bool]]] = [
            (job, self._cached(job.versions, fresh)) for job in world.jobs.values() if not job.removed
        ]
        return world.fleet(jobs, tuple(self._cached(world.fleets, fresh).values()), fresh)

    async def reservations(self) -> ReservationSet:
        await self._request()
        reply = ReservationSet(self.world.reservations, str(self.world.reservations_version))
        await self._reply()
        return reply

    async def write_reservations(self, entries: tuple[NodeReservation, ...], version: str) -> None:
        await self._request()
        self.world.write_reservations(entries, version, self.who)
        await self._reply()

    async def _request(self) -> None:
        await pause()
        if self.world.t < self.world.outage_until or self.world.chance(self.world.weather.api_error):
            raise ApiError("503")

    async def _reply(self) -> None:
        await pause()
        if self.world.chance(self.world.weather.lost_reply):
            raise ApiError("the connection was reset")

    def _stale(self) -> bool:
        return self.world.chance(self.world.weather.stale)

    def _cached(self, versions: list[T], fresh: bool) -> T:
        return versions[-1] if fresh or not self._stale() else self.world.rng.choice(versions)
