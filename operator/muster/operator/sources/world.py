"""A world whose observations also contain the signals of Alertmanager and Prometheus."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from muster.operator.core.decision import Action
from muster.operator.core.fleet import Fleet
from muster.operator.core.observed import NodeReservation, ObservedJob
from muster.operator.sources.hub import SignalHub
from muster.operator.sources.prometheus import SOURCE as PROMETHEUS
from muster.operator.world import ReservationSet, World
from muster.words.signals import Signal
from muster.words.status import JobStatus

# A rank rewrites its heartbeat every second. So long without one from anybody, and we are blind.
HEARTBEAT_FRESH_SECONDS = 60.0


class SignalWorld:
    """Precedence of sources: heartbeats are the authority on whether a gang moves. What Prometheus shows of its
    progress is the second source, asked only where no rank has been heard directly for a minute. An alert that somebody
    gave a `muster_action` is his wish for the attempt that it names, and is passed on as it is.
    """

    def __init__(self, world: World, hub: SignalHub) -> None:
        self._world, self._hub = world, hub

    def now(self) -> float:
        return self._world.now()

    def watch(self) -> AsyncIterator[str]:
        return self._world.watch()

    async def jobs(self) -> tuple[str, ...]:
        return await self._world.jobs()

    async def observe(self, uid: str, fresh: bool = False) -> ObservedJob | None:
        seen = await self._world.observe(uid, fresh)
        if seen is None:
            self._hub.forget(uid)
            return None
        signals = self._hub.signals(uid, seen.status.attempt)
        return replace(seen, signals=(*seen.signals, *believed(signals, seen))) if signals else seen

    async def write_status(self, uid: str, status: JobStatus, version: str) -> None:
        await self._world.write_status(uid, status, version)

    async def apply(self, uid: str, action: Action) -> None:
        await self._world.apply(uid, action)

    async def fleet(self, fresh: bool = False) -> Fleet:
        return await self._world.fleet(fresh)

    async def reservations(self) -> ReservationSet:
        return await self._world.reservations()

    async def write_reservations(self, entries: tuple[NodeReservation, ...], version: str) -> None:
        await self._world.write_reservations(entries, version)


def believed(signals: tuple[Signal, ...], seen: ObservedJob) -> tuple[Signal, ...]:
    """Return the signals without what Prometheus infers, where we see for ourselves."""
    gang = (worker for worker in seen.workers if worker.id == seen.status.current(worker.worker))
    beats = (beat for worker in gang for beat in worker.heartbeats if worker.wrote(beat))
    heard = any(seen.now - beat.at <= HEARTBEAT_FRESH_SECONDS for beat in beats)
    return tuple(signal for signal in signals if not (heard and signal.source == PROMETHEUS))
