"""What is promised of those who make room for others, and to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.operator.core.codes import Code
from muster.operator.core.observed import NodeReservation
from muster.words.quotas import ProjectQuota
from muster.words.signals import Cause
from muster.words.status import Phase

if TYPE_CHECKING:
    from tests.sim.physics import SimJob
    from tests.sim.world import SimWorld

ALIVE = (Phase.STARTING, Phase.RUNNING)
QUOTA_SEEN_SECONDS = 60.0  # after a quota was changed: a pass may have begun before
FIRST_SECONDS = 600.0  # for which no equal puts a gang out
SEEN_SECONDS = 60.0  # by which what a pass saw may be older
ROOM_SECONDS_MAX = 120.0  # within which a gang that is asked to make room begins to stop, in fair weather


class PreemptionChecks:
    def __init__(self, world: SimWorld, require: Callable[[bool, str, str], None]) -> None:
        """`require` raises a Violation unless what it is given holds; then come the promise and the details."""
        self._world, self._require = world, require
        self._fair = False  # the weather has cleared

    def ordered(self, before: tuple[NodeReservation, ...], after: tuple[NodeReservation, ...]) -> None:
        """Whoever is told to make room is told so for somebody who may ask for that, and for no more than is asked."""
        known = {(entry.uid, entry.number) for entry in before if entry.yields_to}
        kept = {(entry.uid, entry.number - 1): len(entry.nodes) for entry in after}
        freed: dict[str, int] = {}
        of_equals: set[str] = set()
        for entry in after:
            if not entry.yields_to or (entry.uid, entry.number) in known:
                continue
            job, victim = self._world.jobs[entry.yields_to], self._world.jobs[entry.uid]
            victim.allow(victim.status.attempt, Cause.EVICTION)
            self._will_make_room(victim, entry)
            nodes = len(entry.nodes) - kept.get((entry.uid, entry.number), 0)
            freed[job.uid] = freed.get(job.uid, 0) + nodes * entry.gpus
            if "priority" not in job.requested | victim.requested and job.spec.priority == victim.spec.priority:
                of_equals.add(job.uid)
            if self._world.t < self._world.quotas_changed_at + QUOTA_SEEN_SECONDS:
                continue
            quota, what = self._world.quotas.get(job.project, ProjectQuota()), f"{victim.name} for {job.name}"
            self._require(quota.preempts, "only who may preempt does", what)
            if "priority" not in job.requested | victim.requested:
                higher = job.spec.priority > victim.spec.priority
                equal = job.spec.priority == victim.spec.priority
                spared = self._served(victim) < FIRST_SECONDS - SEEN_SECONDS - self._world.set_back
                self._require(higher or not spared, "nobody is put out by an equal in its first minutes", what)
                own = job.project == victim.project and self._served(job) < FIRST_SECONDS
                others = job.project != victim.project and self._shares()
                self._require(higher or (equal and (own or others)), "nobody is put out by their equal", what)
        for uid, gpus in freed.items():
            gang = self._world.jobs[uid].spec.gang
            asked = gang.nodes.min * gang.gpus_per_node
            most = 2 if uid in of_equals else 4
            self._require(gpus <= most * asked, "not much more is put out than is asked for", f"{gpus} for {asked}")

    def kept(self, before: tuple[NodeReservation, ...], after: tuple[NodeReservation, ...]) -> None:
        """What is kept for a gang while others make room for it, goes to none of its priority or a lower one."""
        nominated = [{(name, e.uid) for e in entries if e.nominated for name in e.nodes} for entries in (before, after)]
        kept = dict(nominated[0] & nominated[1])
        had = {(entry.uid, name) for entry in before for name in entry.nodes}
        for entry in after:
            for name in entry.nodes if not entry.nominated else ():
                if (entry.uid, name) in had or name not in kept:
                    continue
                job, other = self._world.jobs[entry.uid], self._world.jobs[kept[name]]
                if "priority" not in job.requested | other.requested:
                    higher = job.spec.priority > other.spec.priority
                    self._require(higher, "what is kept goes to nobody else", f"{name} of {other.name} to {job.name}")

    def weather_cleared(self) -> None:
        self._fair = True
        for entry in self._world.reservations:
            if entry.yields_to:
                self._will_make_room(self._world.jobs[entry.uid], entry)

    def _will_make_room(self, job: SimJob, order: NodeReservation) -> None:
        def look() -> None:
            held = {(e.uid, e.number, e.yields_to) for e in self._world.reservations}
            asked = (order.uid, order.number, order.yields_to) in held and job.status.reservation == order.number
            stays = asked and job.status.phase in ALIVE and not job.removed
            self._require(not stays, "whoever is asked to make room stops", f"{job.name} is {job.status.phase}")

        if self._fair:
            self._world.after(ROOM_SECONDS_MAX, look)

    def asked_to_stop(self, job: SimJob, grace: float) -> None:
        """A worker that lives is told to go, for the first time."""
        failure = job.status.last_failure
        preempted = failure is not None and failure.message.startswith("preempted by")
        if preempted and job.status.code == Code.EVICTED:
            self._require(grace >= 60.0, "whoever makes room may commit", f"{job.name} has {grace} s")

    def _served(self, job: SimJob) -> float:
        """Seconds for which it has had nodes."""
        account = job.status.ledger
        away = account.seconds.get("queue", 0.0) + account.seconds.get("suspended", 0.0)
        now = self._world.wall - account.since if job.status.gang.nodes else 0.0
        return sum(account.seconds.values()) - away + now

    def _shares(self) -> bool:
        quotas = self._world.quotas.values()
        return any(quota.weight is not None or quota.guaranteed_gpus is not None for quota in quotas)
