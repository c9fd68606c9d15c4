"""Nodes that are kept for a gang while others make room for it, as kube-scheduler nominates a node for a pod that
preempts: from the order to make room until the gang begins. No gang of its priority or a lower one is given them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from muster.operator.core.fleet import Fleet, JobSummary
from muster.operator.core.observed import NodeReservation
from muster.operator.core.placement import FleetSpace


class NominationPass:
    """Nominations during one pass of admission, which reports each job of the queue to `turn`."""

    def __init__(self, fleet: Fleet, reservations: Iterable[NodeReservation], queue: Iterable[JobSummary]) -> None:
        waiting = {job.uid: fleet.priority(job) for job in queue}
        self._fleet = fleet
        self._nominated = {entry.uid: entry for entry in reservations if entry.nominated and entry.uid in waiting}
        self._by_priority: dict[int, list[NodeReservation]] = {}
        self._kept: dict[str, tuple[str, ...]] = {}
        for entry in self._nominated.values():
            self._by_priority.setdefault(waiting[entry.uid], []).append(entry)

    def __contains__(self, uid: object) -> bool:
        return uid in self._nominated

    def nodes(self, uid: str) -> tuple[str, ...]:
        """Return the gang's nominated nodes as they were when the pass began."""
        return self._nominated[uid].nodes if uid in self._nominated else ()

    def turn(self, job: JobSummary, space: FleetSpace) -> None:
        """The job is next: it may have its own, and not those of its equals. Jobs come by priority: gangs of a higher
        one could take them before.
        """
        for entry in self._by_priority.pop(self._fleet.priority(job), ()):
            self._kept[entry.uid] = space.keep(entry.nodes)
        space.release(self._kept.pop(job.uid, ()))

    def entries(self, kept: Mapping[str, tuple[str, ...]], waiting: Container[str]) -> tuple[NodeReservation, ...]:
        """The reservations that say so for the next pass, of the gangs that are `waiting` for others to make room;
        `kept` are the nodes of each."""
        jobs = {job.uid: job for job in self._fleet.jobs}
        return tuple(
            nomination
            if (nomination := self._nominated.get(uid)) is not None and nomination.nodes == nodes
            # Of a number that no job asks by, so that nobody takes it for nodes that the job was given.
            else NodeReservation(uid, -1, jobs[uid].namespace, nodes, "", "", at=self._fleet.now, nominated=True)
            for uid, nodes in kept.items()
            if uid in waiting
        )
