"""Protocol of what the operator acts on: Kubernetes, local processes, or the simulation. Nine questions and no more.

Any call may raise; an error that is not one of those below is tried again later. The operator may be killed between any
two calls, and a call whose reply is lost may have happened.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from muster.local.cluster import NotFound, VersionConflict
from muster.operator.core.decision import Action
from muster.operator.core.fleet import Fleet
from muster.operator.core.observed import NodeReservation, ObservedJob
from muster.words.status import JobStatus

__all__ = ["FLEET", "NotFound", "ReservationSet", "UnreadableDocument", "VersionConflict", "World"]

FLEET = ""  # in `watch`: not a job but the fleet changed


class UnreadableDocument(Exception):
    """A stored document can't be understood (most likely a newer Muster wrote it). It is not touched."""


@dataclass(frozen=True, slots=True)
class ReservationSet:
    """Reservations of nodes, with the version for compare-and-swap."""

    entries: tuple[NodeReservation, ...]
    version: str


class World(Protocol):
    def now(self) -> float:
        """Return the seconds since the epoch. May jump."""

    def watch(self) -> AsyncIterator[str]:
        """The uid of each job that there is, then of each that may have changed (spec, status, worker, heartbeat phase,
        commit, signal); FLEET when nodes came, went or changed. Repeats and false alarms are harmless. Never ends.
        """

    async def jobs(self) -> tuple[str, ...]:
        """The uids of all jobs; may lag."""

    async def observe(self, uid: str, fresh: bool = False) -> ObservedJob | None:
        """The job; None when it is gone.

        With `fresh` every part is read from its source, after this call began, and in this order: the object, its
        workers, its commits, the rest. A worker seen gone can commit nothing more, so no commit is missed; a status
        that changes after it was read makes the write fail. The object itself may be older, as long as every write that
        is decided by it fails then, and the next fresh look is not.
        """

    async def write_status(self, uid: str, status: JobStatus, version: str) -> None:
        """Compare-and-swap on the whole object. Raises VersionConflict, NotFound."""

    async def apply(self, uid: str, action: Action) -> None:
        """Carry out the action, or find it done. A CreateWorker whose attempt is no longer current may be refused with
        Conflict."""

    async def fleet(self, fresh: bool = False) -> Fleet:
        """All nodes and jobs; with `fresh` read from the source, after this call began."""

    async def reservations(self) -> ReservationSet:
        """Return the current reservations of nodes."""

    async def write_reservations(self, entries: tuple[NodeReservation, ...], version: str) -> None:
        """Compare-and-swap of all reservations. Raises VersionConflict. This one object is what makes over-admission
        impossible, so all operators of a cluster must share it.
        """
