"""What namespaces, projects and people may hold, what they hold, and which of these limits keeps a gang waiting.

A limit that is below what is held stops nothing; nothing more is given until there is room. A gang that waits for room
may be passed by smaller ones of the same project for as long as by any others; then room is kept for it as it becomes
free, so that a stream of small jobs starves nobody within a limit either.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from muster.contract.text import plural
from muster.operator.core.codes import Code
from muster.operator.core.fair_share import Shares
from muster.operator.core.fleet import Fleet, JobSummary
from muster.operator.core.observed import Reservation, Wait
from muster.operator.core.placement import Ask
from muster.operator.core.visibility import describe_job

HOLDERS_NAMED_MAX = 3


@dataclass(slots=True)
class _Limit:
    """What one namespace, project or person may hold, and what it holds."""

    whose: str
    code: Code
    gpus: int | None
    gangs: int | None
    held: dict[str, int] = field(default_factory=dict)
    """GPUs by the uid of each job that holds nodes."""
    total: int = 0
    """GPUs held in all."""
    kept_for: str = ""
    """The uid of the gang that has waited longest for room, once it has waited long."""
    kept: int = 0
    """GPUs that are kept for it."""

    def add(self, uid: str, gpus: int) -> None:
        self.held[uid] = self.held.get(uid, 0) + gpus
        self.total += gpus
        if uid == self.kept_for:
            self.kept_for, self.kept = "", 0

    def gpus_left(self, uid: str) -> int | None:
        if self.gpus is None:
            return None
        return self.gpus - self.total - (self.kept if uid != self.kept_for else 0)

    def has_room(self, uid: str, gpus: int) -> bool:
        """For so many more GPUs of this job."""
        left = self.gpus_left(uid)
        return self._may_run(uid) and (left is None or not gpus or gpus <= left)

    def could_have_room(self, gpus: int) -> bool:
        """If nobody else held anything."""
        return (self.gpus is None or gpus <= self.gpus) and self.gangs != 0

    def keep(self, uid: str, gpus: int) -> None:
        if not self.kept_for and self.could_have_room(gpus):
            self.kept_for, self.kept = uid, gpus

    def _may_run(self, uid: str) -> bool:
        if self.gangs is None or uid in self.held:
            return True
        return len(self.held) + (self.kept_for not in ("", uid)) < self.gangs


class Quotas:
    """Every limit and share of a fleet, and what the reservations `entries` hold of it."""

    def __init__(self, fleet: Fleet, entries: Iterable[Reservation]) -> None:
        self._fleet = fleet
        self.shares = Shares(fleet)
        self._jobs = {job.uid: job for job in fleet.jobs}
        self._limits: dict[tuple[str, ...], _Limit | None] = {}
        self._of: dict[tuple[str, str, str], tuple[_Limit, ...]] = {}
        counted: set[tuple[str, str]] = set()
        for entry in entries:
            new = [node for node in entry.nodes if (entry.uid, node) not in counted]
            counted.update((entry.uid, node) for node in new)
            self._add(self._jobs[entry.uid], entry.gpus * len(new))

    def allowed(self, job: JobSummary, ask: Ask) -> Ask:
        """The ask with only those sizes that there is room for."""
        limits = self._concerning(job)
        if not limits:
            return ask
        gpus = ask.shape.gpus
        sizes = tuple(size for size in ask.sizes if all(limit.has_room(job.uid, size * gpus) for limit in limits))
        return ask if sizes == ask.sizes else replace(ask, sizes=sizes)

    def has_room(self, job: JobSummary, nodes: int) -> bool:
        """For so many more nodes of a job that holds some."""
        gpus = job.spec.gang.gpus_per_node * nodes
        return all(limit.has_room(job.uid, gpus) for limit in self._concerning(job))

    def hold(self, job: JobSummary, nodes: int) -> None:
        """It is given so many more nodes."""
        self._add(job, job.spec.gang.gpus_per_node * nodes)

    def keep(self, job: JobSummary, ask: Ask) -> None:
        """Let later jobs not take the room that this one has waited for: up to the first limit that it waits at."""
        gpus = ask.sizes[-1] * ask.shape.gpus
        for limit in self._concerning(job):
            limit.keep(job.uid, gpus)
            if not limit.has_room(job.uid, gpus):
                return

    def wait(self, job: JobSummary, ask: Ask) -> Wait | None:
        """Which limit the smallest gang of the ask waits at; None if there is room for it."""
        gpus = ask.sizes[-1] * ask.shape.gpus
        for limit in self._concerning(job):
            if not limit.could_have_room(gpus):
                return Wait(Code.EXCEEDS_LIMIT, _never(limit, gpus))
            if not limit.has_room(job.uid, gpus):
                return Wait(limit.code, self._describe_limit(limit, job, gpus))
        return None

    def _add(self, job: JobSummary, gpus: int) -> None:
        self.shares.hold(job, gpus)
        for limit in self._concerning(job):
            limit.add(job.uid, gpus)

    def _describe_limit(self, limit: _Limit, job: JobSummary, gpus: int) -> str:
        left = limit.gpus_left(job.uid)
        if left is not None and gpus > left:
            said = (
                f"gang needs {plural(gpus, 'GPU')}, {max(0, (limit.gpus or 0) - limit.total)} of the {limit.gpus} "
                f"that {limit.whose} may hold are left"
            )
        else:
            said = f"{limit.whose} may run {plural(limit.gangs or 0, 'gang')} at a time and runs {len(limit.held)}"
        parts = [said]
        if limit.held:
            parts.append(f"held by {self._holders(limit, job)}")
        if limit.kept_for not in ("", job.uid):
            parts.append(f"room is kept for {describe_job(job, self._jobs[limit.kept_for])}, which has waited longer")
        return "; ".join(parts)

    def _holders(self, limit: _Limit, reader: JobSummary) -> str:
        most = heapq.nsmallest(HOLDERS_NAMED_MAX, limit.held.items(), key=lambda item: (-item[1], item[0]))
        named = ", ".join(f"{describe_job(reader, self._jobs[uid])} ({plural(gpus, 'GPU')})" for uid, gpus in most)
        more = len(limit.held) - len(most)
        return named + (f" and {more} more" if more else "")

    def _concerning(self, job: JobSummary) -> tuple[_Limit, ...]:
        """The narrowest first."""
        key = (job.namespace, job.project, job.owner)
        if key not in self._of:
            self._of[key] = tuple(limit for limit in self._made(*key) if limit is not None)
        return self._of[key]

    def _made(self, namespace: str, project: str, owner: str) -> Iterator[_Limit | None]:
        quota = self._fleet.quotas.get(project)
        if quota is not None:
            person, whole = quota.person, f"project {project}"
            words = f"{owner or 'jobs without an owner'} in {whole}"
            yield self._one(
                ("person", project, owner), lambda: _Limit(words, Code.PERSON_LIMIT, person.gpus, person.gangs)
            )
            yield self._one(("project", project), lambda: _Limit(whole, Code.PROJECT_LIMIT, quota.gpus, quota.gangs))
        gpus = self._fleet.limits.get(namespace)
        yield self._one(
            ("namespace", namespace), lambda: _Limit(f"namespace {namespace}", Code.NAMESPACE_LIMIT, gpus, None)
        )

    def _one(self, key: tuple[str, ...], make: Callable[[], _Limit]) -> _Limit | None:
        if key not in self._limits:
            made = make()
            self._limits[key] = None if made.gpus is None and made.gangs is None else made
        return self._limits[key]


def _never(limit: _Limit, gpus: int) -> str:
    if limit.gangs == 0:
        return f"{limit.whose} may run no gang at all"
    return f"gang needs {plural(gpus, 'GPU')}, and {limit.whose} may never hold more than {limit.gpus}"
