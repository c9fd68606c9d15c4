"""Admission: the fleet and the reservations go in, the next reservations and each wait's reason
come out.

The reservations are written whole, by compare-and-swap, so two operators can't give one node away twice,
however stale the jobs and nodes that they see (docs/decisions/0004).

Order: priority, then whose project holds least for its share (fair_share.py), then age. A later job may pass one that
does not fit, but only for BACKFILL_SECONDS: from then on every node that the waiting gang could use is kept for it as
it becomes free, so no stream of small jobs starves a large gang.

A gang whose project may preempt has others preempted for it (preemption.py). A preempted gang learns of it from its own
reservation, which says to whom it yields; nodes are kept for that gang from then on (nominations.py).

The limits of namespaces, projects and people are enforced here as well (quotas.py).

A gang whose nodes were announced to go is in this queue while it still commits: replacement nodes are held for it from
the notice on, so that it continues at once when its last worker is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from muster.operator.core.budgets import capacity_order, is_excluded, remaining_backoff_seconds
from muster.operator.core.codes import Code
from muster.operator.core.explain_wait import HolderIndex, limits_hit, need
from muster.operator.core.fleet import Fleet, FleetNode, JobSummary
from muster.operator.core.month_budgets import MonthBudgets
from muster.operator.core.nominations import NominationPass
from muster.operator.core.observed import NodeReservation, QueueWait
from muster.operator.core.placement import FleetSpace, GangRequest, WorkerPlace, WorkerShape, largest_possible, shape_of
from muster.operator.core.preemption import GangPreemption, PreemptionPlanner
from muster.operator.core.quotas import QuotaBook
from muster.operator.core.transitions import replace_last
from muster.words.job import JobSpec
from muster.words.status import STATUS_VERSION, Phase
from muster.words.text import plural

# How long later jobs may pass a gang that does not fit. Longer fills more holes, shorter lets large gangs start sooner.
BACKFILL_SECONDS = 300.0
# A gang grows by a restart, which costs what it had not committed: so only just after a commit.
GROW_AFTER_COMMIT_SECONDS = 60.0
# For so many gangs nodes are kept in one pass. One would do: when the first has started, the next is the first.
CLAIMS_MAX = 4
# What a gang waits for passes by itself, as others end.
_PASSING = frozenset({
    Code.AWAITING_CAPACITY, Code.BEHIND_EARLIER_GANG, Code.NAMESPACE_LIMIT, Code.PROJECT_LIMIT, Code.PERSON_LIMIT,
    Code.AWAITING_PREEMPTION,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """Result of a pass over the queue."""

    entries: tuple[NodeReservation, ...]
    """The reservations as they should be."""
    waits: dict[str, QueueWait]
    """Reason why a queued job got nothing, by its uid."""
    budgets: dict[str, QueueWait] = field(default_factory=dict)
    """Jobs that must stop because a month's budget is used up, and those of them that may continue
    (Observed.budget)."""
    look_after: float | None = None
    """Seconds until a budget will be used up, or a job's pause in the queue is over; None where neither is coming."""
    preemptions: tuple[GangPreemption, ...] = ()
    """Preemptions that start now."""

    @property
    def reservations(self) -> tuple[NodeReservation, ...]:
        """The reservations without those that only keep nodes while others make room."""
        return tuple(entry for entry in self.entries if not entry.nominated)


def admit(fleet: Fleet, reservations: tuple[NodeReservation, ...]) -> AdmissionPlan:
    entries = list(_still_held(fleet, reservations))
    queue, elastic = _queue(fleet, entries), [job for job in fleet.jobs if _may_grow(fleet, job, entries)]
    months = MonthBudgets(fleet)
    if not queue and not elastic and not any(entry.yields_to for entry in entries):
        return AdmissionPlan(tuple(entries), {}, budgets=months.waits(), look_after=_look_after(fleet, months))
    space = FleetSpace(fleet.nodes, (*_ours(fleet, entries), *fleet.others))
    quotas = QuotaBook(fleet, entries)
    nominations = NominationPass(fleet, reservations, queue)
    preemptor = PreemptionPlanner(fleet, entries, space, quotas.shares, nominations)
    waits: dict[str, QueueWait] = {}
    starving: list[GangRequest] = []
    explained, claims = _ExplainedWaits(fleet, entries), 0
    for job in quotas.shares.in_turn(queue, nominations):
        nominations.turn(job, space)
        if job.status.phase is Phase.RESTARTING:
            if (place := _replacement(fleet, job, space, quotas)) is not None:
                entries.append(_reservation(fleet, job, place, job.status.reservation + 1))
            continue
        if (spent := months.wait(job)) is not None:
            waits[job.uid] = spent
            continue
        if job.spec.gang.scheduler.kind != "builtin":
            waits[job.uid] = QueueWait(
                Code.AWAITING_SCHEDULER, f"waiting for {job.spec.gang.scheduler.kind} to admit the gang"
            )
            continue
        ask = _ask(fleet, job)
        allowed = quotas.allowed(job, ask)
        place = space.place(allowed) if allowed.sizes else None
        if place is not None:
            kind = (len(place.nodes), place.instance_type, place.capacity)
            if (short := months.short(job, *kind)) is not None:
                waits[job.uid] = short
                continue
            months.hold(job, *kind)
            space.take(place, ask.shape)
            entries.append(_reservation(fleet, job, place, job.status.reservation))
            quotas.hold(job, len(place.nodes))
            continue
        # What no waiting helps comes first: room that is kept for a gang that can never begin is kept for nothing.
        wait = _impossible(ask, explained) or quotas.wait(job, ask) or _wait(job, ask, allowed, space, explained)
        lacks_room = wait.code in (Code.AWAITING_CAPACITY, Code.BEHIND_EARLIER_GANG)
        paid = lacks_room and months.short(job, ask.sizes[-1], "", "on-demand") is None
        if paid and preemptor.plan(job, allowed) is not None:
            wait = QueueWait(Code.AWAITING_PREEMPTION, preemptor.words(job, ask))
        elif wait.code == Code.AWAITING_CAPACITY and (share := quotas.shares.words(job.project, job)):
            wait = replace(wait, because=f"{wait.because}; {share}")
        waits[job.uid] = wait
        if wait.code not in _PASSING:
            continue
        starves = fleet.now - (job.status.queued_at or fleet.now) >= BACKFILL_SECONDS
        if starves:
            quotas.keep(job, ask)
        if wait.code in (Code.AWAITING_CAPACITY, Code.BEHIND_EARLIER_GANG):
            starving.append(allowed)
            if starves and claims < CLAIMS_MAX:
                space.set_aside(allowed)
                claims += 1
    elastic = [job for job in elastic if months.wait(job) is None and job.uid not in preemptor.yielding]
    entries += _growth(fleet, elastic, space, quotas, months, starving)
    waiting = {uid for uid, wait in waits.items() if wait.code == Code.AWAITING_PREEMPTION}
    entries_held = preemptor.put_out(entries, waiting) + nominations.entries(preemptor.kept, waiting)
    return AdmissionPlan(entries_held, waits, months.waits(), _look_after(fleet, months), tuple(preemptor.made))


def _still_held(fleet: Fleet, reservations: tuple[NodeReservation, ...]) -> tuple[NodeReservation, ...]:
    """Return what the reservations must keep. A number below the job's own can never be used again, whatever else is
    stale; and a gang that they have lost is entered anew.
    """
    jobs = {job.uid: job for job in fleet.jobs}
    kept = [
        entry
        for entry in reservations
        if (job := jobs.get(entry.uid)) is not None and entry.number >= job.status.reservation and not entry.nominated
    ]
    counted = {(entry.uid, entry.number) for entry in kept}
    for job in fleet.jobs:
        gang, number = job.status.gang, job.status.reservation
        if gang.nodes and not job.status.phase.terminal and (job.uid, number) not in counted:
            place = WorkerPlace(gang.nodes, gang.pool or "", gang.capacity or "on-demand", gang.instance_type)
            kept.append(_reservation(fleet, job, place, number))
    return tuple(kept)


def _ours(fleet: Fleet, entries: list[NodeReservation]) -> Iterator[NodeReservation]:
    """Yield the reservations without those of gangs of other schedulers, whose pods are seen on their nodes like
    everybody else's (fleet.others)."""
    theirs = {job.uid for job in fleet.jobs if job.spec.gang.scheduler.kind != "builtin"}
    return (entry for entry in entries if entry.uid not in theirs)


def _look_after(fleet: Fleet, months: MonthBudgets) -> float | None:
    budget = months.look_after()
    pauses = [
        left
        for job in fleet.jobs
        if job.status.phase is Phase.QUEUED
        and (left := remaining_backoff_seconds(job.spec.recovery, job.status.retry_at, fleet.now))
    ]
    return min(pauses if budget is None else [budget, *pauses], default=None)


def _queue(fleet: Fleet, entries: list[NodeReservation]) -> list[JobSummary]:
    """Return the jobs that request nodes and have none, or must leave those they have, in the order of the queue."""
    granted = {(entry.uid, entry.number) for entry in entries}
    ready = {node.name: node for node in fleet.nodes if node.ready}
    yielding = {(entry.uid, entry.number) for entry in entries if entry.yields_to}
    leaving = [
        job
        for job in fleet.jobs
        if _must_leave(job, ready, granted) and (job.uid, job.status.reservation) not in yielding
    ]
    asking = [
        job
        for job in fleet.jobs
        if job.status.phase is Phase.QUEUED
        and job.status.schema_version <= STATUS_VERSION
        and not (job.deleting or job.spec.cancel or job.spec.suspend)
        and (job.uid, job.status.reservation) not in granted
        and not remaining_backoff_seconds(job.spec.recovery, job.status.retry_at, fleet.now)
    ]
    return sorted((*asking, *leaving), key=fleet.line)


def _must_leave(job: JobSummary, ready: dict[str, FleetNode], granted: set[tuple[str, int]]) -> bool:
    """Return whether the job is preempted or evicted from nodes that are going, will try again, and has nothing
    reserved for that yet."""
    status, spec = job.status, job.spec
    return (
        status.phase is Phase.RESTARTING
        and status.code in (Code.PREEMPTED, Code.EVICTED)
        and bool(status.gang.nodes)
        and not _all_open(status.gang.nodes, ready, shape_of(spec))
        and spec.gang.scheduler.kind == "builtin"
        and status.schema_version <= STATUS_VERSION
        and not (job.deleting or spec.cancel or spec.suspend)
        and (job.uid, status.reservation + 1) not in granted
    )


def _all_open(names: tuple[str, ...], ready: dict[str, FleetNode], shape: WorkerShape) -> bool:
    return all(name in ready and shape.allows(ready[name]) for name in names)


def _replacement(fleet: Fleet, job: JobSummary, space: FleetSpace, quotas: QuotaBook) -> WorkerPlace | None:
    """Nodes for as many workers as now, taken: the ones that stay and others of their pool, or all of them elsewhere.

    The preemption is not charged yet, and counts for where to look as if it were.
    """
    gang, status = job.status.gang, job.status
    charged = status.model_copy(
        update={
            "preemptions_in_a_row": status.preemptions_in_a_row + (status.code == Code.PREEMPTED),
            "attempts": replace_last(status.attempts, ended_at=fleet.now) if status.attempts else (),
        }
    )
    ask = replace(_ask(fleet, replace(job, status=charged)), sizes=(len(gang.nodes),))
    staying = tuple(node for node in gang.nodes if space.usable((node,), ask.shape) and node not in ask.avoid)
    first = ask.capacity_order[0] if ask.capacity_order else gang.capacity
    place = None
    if staying and gang.pool and gang.capacity and gang.capacity == first:
        place = space.extend(ask, WorkerPlace(staying, gang.pool, gang.capacity), len(gang.nodes))
    place = place or space.place(ask)
    if place is None:
        return None
    new = tuple(node for node in place.nodes if node not in staying)
    if not quotas.has_room(job, len(new)):
        return None
    space.take(replace(place, nodes=new), ask.shape)
    quotas.hold(job, len(new))
    return place


def _ask(fleet: Fleet, job: JobSummary) -> GangRequest:
    spec = job.spec
    recovery, excluded = spec.recovery, job.status.excluded_nodes
    avoid = (
        frozenset(entry.node for entry in excluded if is_excluded(entry, recovery, fleet.now))
        if excluded
        else frozenset()
    )
    ask = GangRequest(
        shape_of(spec),
        _sizes(spec),
        capacity_order(spec, job.status, fleet.now),
        avoid,
        spec.gang.topology.required,
        spec.gang.topology.preferred,
    )
    # Waiting a day for an exclusion to end helps nobody: where the rest is too small, the node is used again.
    if avoid and largest_possible((n for n in fleet.nodes if n.name not in avoid and n.ready), ask) < ask.sizes[-1]:
        return GangRequest(ask.shape, ask.sizes, ask.capacity_order, frozenset(), ask.required, ask.preferred)
    return ask


def _sizes(spec: JobSpec) -> tuple[int, ...]:
    """Return the sizes, largest first. A fixed gang needs no arithmetic."""
    nodes = spec.gang.nodes
    return (nodes.min,) if nodes.min == nodes.max else tuple(reversed(spec.gang_sizes()))


class _ExplainedWaits:
    """Explanations of waits, computed once per shape: many jobs in a queue are alike."""

    def __init__(self, fleet: Fleet, entries: list[NodeReservation]) -> None:
        self.fleet, self.holders = fleet, HolderIndex(fleet, entries)
        self._possible: dict[tuple[WorkerShape, str | None], int] = {}

    def possible(self, ask: GangRequest) -> int:
        """largest_possible of the whole fleet."""
        key = (ask.shape, ask.required)
        if key not in self._possible:
            self._possible[key] = largest_possible(self.fleet.nodes, ask)
        return self._possible[key]


def _impossible(ask: GangRequest, explained: _ExplainedWaits) -> QueueWait | None:
    """Return why the gang would not fit an empty, healthy fleet; None if it would."""
    size = ask.sizes[-1]
    possible = explained.possible(ask)
    if possible >= size:
        return None
    needs = need(ask.shape, size)
    anywhere = explained.possible(GangRequest(ask.shape, ask.sizes)) if ask.required else possible
    if anywhere >= size:
        because = f"{needs} that share one value of {ask.required}; the largest such group has {possible}"
        return QueueWait(Code.TOPOLOGY_UNSATISFIABLE, because)
    if hit := limits_hit(ask.shape, explained.fleet.nodes):
        return QueueWait(Code.NODE_TOO_SMALL, f"{needs}; {hit}")
    return QueueWait(Code.GANG_TOO_LARGE, f"{needs}; the largest pool has {plural(possible, 'such node')}")


def _wait(
    job: JobSummary, ask: GangRequest, allowed: GangRequest, space: FleetSpace, explained: _ExplainedWaits
) -> QueueWait:
    size = ask.sizes[-1]
    needs = need(ask.shape, size)
    free, pool = space.free(allowed)
    if free + space.kept_back(allowed) >= size and free < size:
        return QueueWait(
            Code.BEHIND_EARLIER_GANG, f"{needs}; {free} free, the others are kept for a gang that has waited longer"
        )
    within = f", but not within one {ask.required}" if ask.required and free >= size else ""
    there = f"{free} free in pool {pool}{within}" if pool else "none is free"
    holders = "" if within else explained.holders.words(job, ask.shape, pool)
    return QueueWait(Code.AWAITING_CAPACITY, f"{needs}, {there}" + (f"; {holders}" if holders else ""))


def _growth(
    fleet: Fleet,
    elastic: list[JobSummary],
    space: FleetSpace,
    quotas: QuotaBook,
    months: MonthBudgets,
    starving: list[GangRequest],
) -> list[NodeReservation]:
    """Offer running elastic gangs more nodes, once nobody in the queue could use them, where the month's budgets pay
    for them for a while: growing is a restart."""
    if not elastic:
        return []
    for ask in starving[:CLAIMS_MAX]:
        space.set_aside(ask)
    offers = []
    for job in sorted(elastic, key=fleet.line):
        gang, ask = job.status.gang, _ask(fleet, job)
        here = WorkerPlace(gang.nodes, gang.pool or "", gang.capacity or "on-demand")
        if not space.usable(gang.nodes, ask.shape):
            continue
        for size in ask.sizes:
            extra = size - len(gang.nodes)
            if extra <= 0:
                break
            if not quotas.has_room(job, extra):
                continue
            place = space.extend(ask, here, size)
            if place is None or months.short(job, extra, place.instance_type, place.capacity) is not None:
                continue
            months.hold(job, extra, place.instance_type, place.capacity)
            space.take(WorkerPlace(place.nodes[len(gang.nodes) :], place.pool, place.capacity), ask.shape)
            quotas.hold(job, extra)
            offers.append(_reservation(fleet, job, place, job.status.reservation + 1))
            break
    return offers


def _may_grow(fleet: Fleet, job: JobSummary, entries: list[NodeReservation]) -> bool:
    status, spec = job.status, job.spec
    if status.phase is not Phase.RUNNING or status.gang.wanted >= spec.gang.nodes.max or status.checkpoint is None:
        return False
    if job.deleting or spec.cancel or spec.suspend or spec.gang.scheduler.kind != "builtin":
        return False
    if status.schema_version > STATUS_VERSION or any(
        e.uid == job.uid and e.number > status.reservation for e in entries
    ):
        return False
    since_commit, since_start = fleet.now - status.checkpoint.committed_at, fleet.now - status.since
    return 0 <= since_commit <= GROW_AFTER_COMMIT_SECONDS and since_start >= fleet.grow_after_seconds


def _reservation(fleet: Fleet, job: JobSummary, place: WorkerPlace, number: int) -> NodeReservation:
    shape = shape_of(job.spec)
    return NodeReservation(
        uid=job.uid,
        number=number,
        namespace=job.namespace,
        nodes=place.nodes,
        pool=place.pool,
        capacity=place.capacity,
        gpus=shape.gpus,
        cpus=shape.cpus,
        memory_bytes=shape.memory_bytes,
        at=fleet.now,
        instance_type=place.instance_type,
    )
