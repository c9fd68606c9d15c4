"""Gangs that a gang may preempt: of lower priorities, beyond others' fair share, and its own project's."""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import cached_property

from muster.operator.core.evictions import FIRST_SECONDS, began, restart_seconds, served_seconds
from muster.operator.core.fair_share import FleetShares
from muster.operator.core.fleet import Fleet, JobSummary
from muster.operator.core.observed import NodeReservation
from muster.words.status import STATUS_VERSION, Phase

# Each time it starts it has so many times its restart's cost besides; else two thrash.
RESTARTS_BEFORE = 3.0


class VictimSelector:
    """Gangs of a fleet that may be preempted. `yielding` are the uids of those that already make room."""

    def __init__(
        self, fleet: Fleet, entries: Iterable[NodeReservation], shares: FleetShares, yielding: Container[str]
    ) -> None:
        self._fleet, self._entries, self._shares, self._yielding = fleet, entries, shares, yielding

    @cached_property
    def all(self) -> dict[str, JobSummary]:
        """Return the victims by uid. A job that is preempted in this pass is removed from them."""
        newest: dict[str, int] = {}
        for entry in self._entries:
            newest[entry.uid] = max(newest.get(entry.uid, 0), entry.number)
        return {
            job.uid: job
            for job in self._fleet.jobs
            if job.uid not in self._yielding and newest.get(job.uid) == job.status.reservation and _may_be_put_out(job)
        }

    def lower(self, priority: int) -> set[str]:
        """Return the victims of lower priorities."""
        return {uid for uid, victim in self.all.items() if self._fleet.priority(victim) < priority}

    def beyond_their_share(self, job: JobSummary, priority: int) -> set[str]:
        """Return the victims of that priority and of other projects that hold more than they are entitled to."""
        shares = self._shares
        if not shares.active:
            return set()
        return {
            uid
            for uid, victim in self.all.items()
            if victim.project != job.project
            and shares.gpus_of(victim.project) > shares.entitled.get(victim.project, 0.0)
            and self._yields_to_equals(victim, priority)
        }

    def of_its_project(self, job: JobSummary, priority: int, gpus_max: float) -> set[str]:
        """Return the victims of that priority and of the job's own project that have had their first minutes, while the
        job has not; of so many GPUs at most, because a large gang that is made smaller restarts as a whole."""
        if served_seconds(job, self._fleet.now) >= FIRST_SECONDS:
            return set()
        return {
            uid
            for uid, victim in self.all.items()
            if victim.project == job.project
            and len(victim.status.gang.nodes) * victim.spec.gang.gpus_per_node <= gpus_max
            and self._yields_to_equals(victim, priority)
        }

    def _yields_to_equals(self, victim: JobSummary, priority: int) -> bool:
        now = self._fleet.now
        return (
            self._fleet.priority(victim) == priority
            and served_seconds(victim, now) >= FIRST_SECONDS
            and now - began(victim) >= RESTARTS_BEFORE * restart_seconds(victim)
        )


def _may_be_put_out(job: JobSummary) -> bool:
    status, spec = job.status, job.spec
    return (
        status.phase in (Phase.STARTING, Phase.RUNNING)
        and bool(status.gang.nodes)
        and spec.gang.gpus_per_node > 0
        and spec.gang.scheduler.kind == "builtin"
        and not spec.recovery.dry_run
        and status.schema_version <= STATUS_VERSION
        and not is_leaving(job)
    )


def is_leaving(job: JobSummary) -> bool:
    """Return whether the job gives its nodes back by itself."""
    return bool(job.status.gang.nodes) and (
        job.status.phase is Phase.STOPPING or job.deleting or job.spec.cancel or job.spec.suspend
    )
