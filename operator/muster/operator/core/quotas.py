"""Quotas of namespaces, projects and people, their usage, and the limit that keeps a gang waiting.

A limit that is below what is held stops nothing; nothing more is given until there is room. A gang that waits for room
may be passed by smaller ones of the same project for as long as by any others; then room is kept for it as it becomes
free, so that a stream of small jobs starves nobody within a limit either.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from muster.operator.core.codes import Code
from muster.operator.core.fair_share import FleetShares
from muster.operator.core.fleet import Fleet, JobSummary
from muster.operator.core.observed import NodeReservation, QueueWait
from muster.operator.core.placement import GangRequest
from muster.operator.core.visibility import describe_job
from muster.words.text import plural

HOLDERS_NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class QuotaAmount:
    """Usage of a limit by a gang's nodes."""

    gpus: int = 0
    processes: int = 0

    def __add__(self, other: QuotaAmount) -> QuotaAmount:
        return QuotaAmount(self.gpus + other.gpus, self.processes + other.processes)


_NOTHING = QuotaAmount()
_NOUNS = {"gpus": ("GPU", "GPUs"), "processes": ("process", "processes")}


def _amount(job: JobSummary, nodes: int, gpus_per_node: int) -> QuotaAmount:
    return QuotaAmount(nodes * gpus_per_node, nodes * job.spec.gang.ranks_per_node)


@dataclass(slots=True)
class _UsageLimit:
    """Limits of one namespace, project or person, and its usage."""

    whose: str
    code: Code
    gpus: int | None
    gangs: int | None
    processes: int | None = None
    by_job: dict[str, QuotaAmount] = field(default_factory=dict)
    """Amount by the uid of each job that holds nodes."""
    total: QuotaAmount = _NOTHING
    """Held in all."""
    kept_for: str = ""
    """The uid of the gang that has waited longest for room, once it has waited long."""
    kept: QuotaAmount = _NOTHING
    """Amount that is kept for it."""

    def add(self, uid: str, more: QuotaAmount) -> None:
        self.by_job[uid] = self.by_job.get(uid, _NOTHING) + more
        self.total += more
        if uid == self.kept_for:
            self.kept_for, self.kept = "", _NOTHING

    def most(self, kind: str) -> int | None:
        """GPUs or processes that may be held; None where these are not limited."""
        return self.gpus if kind == "gpus" else self.processes

    def short_of(self, uid: str, more: QuotaAmount) -> str | None:
        """The first kind, of GPUs and processes, of which there are too few left for so many more of this job."""
        kept = self.kept if uid != self.kept_for else _NOTHING
        taken = self.total + kept
        for kind in _NOUNS:
            most, asked = self.most(kind), getattr(more, kind)
            if most is not None and asked and asked > most - getattr(taken, kind):
                return kind
        return None

    def has_room(self, uid: str, more: QuotaAmount) -> bool:
        """Return whether there is room for so much more of this job."""
        return self._may_run(uid) and self.short_of(uid, more) is None

    def never_has(self, amount: QuotaAmount) -> str | None:
        """The first kind of which it would be too much if nobody else held anything."""
        beyond = ((kind, self.most(kind)) for kind in _NOUNS)
        return next((kind for kind, most in beyond if most is not None and getattr(amount, kind) > most), None)

    def could_have_room(self, amount: QuotaAmount) -> bool:
        """Return whether there would be room if nobody else held anything."""
        return self.never_has(amount) is None and self.gangs != 0

    def keep(self, uid: str, amount: QuotaAmount) -> None:
        if not self.kept_for and self.could_have_room(amount):
            self.kept_for, self.kept = uid, amount

    def _may_run(self, uid: str) -> bool:
        if self.gangs is None or uid in self.by_job:
            return True
        return len(self.by_job) + (self.kept_for not in ("", uid)) < self.gangs


class QuotaBook:
    """Every limit and share of a fleet, and what the reservations `entries` hold of it."""

    def __init__(self, fleet: Fleet, entries: Iterable[NodeReservation]) -> None:
        self._fleet = fleet
        self.shares = FleetShares(fleet)
        self._jobs = {job.uid: job for job in fleet.jobs}
        self._limits: dict[tuple[str, ...], _UsageLimit | None] = {}
        self._of: dict[tuple[str, str, str], tuple[_UsageLimit, ...]] = {}
        counted: set[tuple[str, str]] = set()
        for entry in entries:
            new = [node for node in entry.nodes if (entry.uid, node) not in counted]
            counted.update((entry.uid, node) for node in new)
            job = self._jobs[entry.uid]
            self._add(job, _amount(job, len(new), entry.gpus))

    def allowed(self, job: JobSummary, ask: GangRequest) -> GangRequest:
        """The ask with only those sizes that there is room for."""
        limits = self._concerning(job)
        if not limits:
            return ask
        amounts = {size: _amount(job, size, ask.shape.gpus) for size in ask.sizes}
        sizes = tuple(size for size in ask.sizes if all(limit.has_room(job.uid, amounts[size]) for limit in limits))
        return ask if sizes == ask.sizes else replace(ask, sizes=sizes)

    def has_room(self, job: JobSummary, nodes: int) -> bool:
        """Return whether there is room for so many more nodes of a job that holds some."""
        more = _amount(job, nodes, job.spec.gang.gpus_per_node)
        return all(limit.has_room(job.uid, more) for limit in self._concerning(job))

    def hold(self, job: JobSummary, nodes: int) -> None:
        """Record that the job is given so many more nodes."""
        self._add(job, _amount(job, nodes, job.spec.gang.gpus_per_node))

    def keep(self, job: JobSummary, ask: GangRequest) -> None:
        """Keep the room that this job has waited for from later jobs: up to the first limit that it waits at."""
        amount = _amount(job, ask.sizes[-1], ask.shape.gpus)
        for limit in self._concerning(job):
            limit.keep(job.uid, amount)
            if not limit.has_room(job.uid, amount):
                return

    def wait(self, job: JobSummary, ask: GangRequest) -> QueueWait | None:
        """Return the limit that the smallest gang of the request waits for; None if there is room for it."""
        amount = _amount(job, ask.sizes[-1], ask.shape.gpus)
        limits = self._concerning(job)
        # First of all: a job that waits for one limit keeps room from others, for nothing if another never lets it run.
        for limit in limits:
            if not limit.could_have_room(amount):
                return QueueWait(Code.EXCEEDS_LIMIT, _never(limit, amount))
        for limit in limits:
            if not limit.has_room(job.uid, amount):
                return QueueWait(limit.code, self._describe_limit(limit, job, amount))
        return None

    def _add(self, job: JobSummary, more: QuotaAmount) -> None:
        self.shares.hold(job, more.gpus)
        for limit in self._concerning(job):
            limit.add(job.uid, more)

    def _describe_limit(self, limit: _UsageLimit, job: JobSummary, amount: QuotaAmount) -> str:
        kind = limit.short_of(job.uid, amount)
        if kind is not None:
            most = limit.most(kind) or 0
            said = (
                f"gang needs {_counted(amount, kind)}, {max(0, most - getattr(limit.total, kind))} of the {most} "
                f"that {limit.whose} may hold are left"
            )
        else:
            said = f"{limit.whose} may run {plural(limit.gangs or 0, 'gang')} at a time and runs {len(limit.by_job)}"
        parts = [said]
        if limit.by_job:
            parts.append(f"held by {self._holders(limit, job, kind or 'gpus')}")
        if limit.kept_for not in ("", job.uid):
            parts.append(f"room is kept for {describe_job(job, self._jobs[limit.kept_for])}, which has waited longer")
        return "; ".join(parts)

    def _holders(self, limit: _UsageLimit, reader: JobSummary, kind: str) -> str:
        most = heapq.nsmallest(
            HOLDERS_NAMED_MAX, limit.by_job.items(), key=lambda item: (-getattr(item[1], kind), item[0])
        )
        named = ", ".join(f"{describe_job(reader, self._jobs[uid])} ({_counted(amount, kind)})" for uid, amount in most)
        more = len(limit.by_job) - len(most)
        return named + (f" and {more} more" if more else "")

    def _concerning(self, job: JobSummary) -> tuple[_UsageLimit, ...]:
        """The narrowest first."""
        key = (job.namespace, job.project, job.owner)
        if key not in self._of:
            self._of[key] = tuple(limit for limit in self._made(*key) if limit is not None)
        return self._of[key]

    def _made(self, namespace: str, project: str, owner: str) -> Iterator[_UsageLimit | None]:
        quota = self._fleet.quotas.get(project)
        if quota is not None:
            person, whole = quota.person, f"project {project}"
            words = f"{owner or 'jobs without an owner'} in {whole}"
            yield self._one(
                ("person", project, owner),
                lambda: _UsageLimit(words, Code.PERSON_LIMIT, person.gpus, person.gangs, person.processes),
            )
            yield self._one(
                ("project", project),
                lambda: _UsageLimit(whole, Code.PROJECT_LIMIT, quota.gpus, quota.gangs, quota.processes),
            )
        gpus = self._fleet.limits.get(namespace)
        yield self._one(
            ("namespace", namespace), lambda: _UsageLimit(f"namespace {namespace}", Code.NAMESPACE_LIMIT, gpus, None)
        )

    def _one(self, key: tuple[str, ...], make: Callable[[], _UsageLimit]) -> _UsageLimit | None:
        if key not in self._limits:
            made = make()
            is_unlimited = made.gpus is None and made.gangs is None and made.processes is None
            self._limits[key] = None if is_unlimited else made
        return self._limits[key]


def _never(limit: _UsageLimit, amount: QuotaAmount) -> str:
    kind = limit.never_has(amount)
    if limit.gangs == 0 or kind is None:
        return f"{limit.whose} may run no gang at all"
    return f"gang needs {_counted(amount, kind)}, and {limit.whose} may never hold more than {limit.most(kind)}"


def _counted(amount: QuotaAmount, kind: str) -> str:
    return plural(getattr(amount, kind), *_NOUNS[kind])
