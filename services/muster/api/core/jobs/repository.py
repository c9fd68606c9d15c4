"""Jobs in the database. Functions on a session: who opens it also commits it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, and_, bindparam, exists, func, or_, select
from sqlalchemy import insert as insert_into
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.database.tables import EventRow, JobRow, JobTagRow, LabelRow, TrialRow
from muster.api.core.events.repository import event_values
from muster.api.core.events.types import NewEvent
from muster.api.core.jobs.ordering import JobOrder
from muster.words.address import AddressError, StorageAddress, job_folder
from muster.words.status import Phase


@dataclass(frozen=True)
class NewJob:
    id: str
    namespace: str
    name: str
    project: str
    owner: str
    labels: dict[str, str]
    spec: dict[str, Any]
    priority: int
    created_at: float
    status: dict[str, Any]
    live: bool = True
    relayed_version: int = 0  # 1: the cluster has it already

    @property
    def key(self) -> tuple[str, str]:
        """Return the key that no other live job has."""
        return self.namespace, self.name


@dataclass(frozen=True)
class JobFilter:
    """Filter of jobs. Every given condition must hold: the phase is any of `phases`, and every label has exactly its
    value."""

    phases: Sequence[str] = ()
    name: str | None = None
    namespace: str | None = None
    labels: Sequence[tuple[str, str]] = ()
    live: bool | None = None
    project: str | None = None
    owner: str | None = None
    visible: Collection[str] | None = None  # the projects that the caller may see; None for all
    search: str = ""  # a part of the name or the owner's name, in any case, or the beginning of the id
    tag: str | None = None
    sweep: str | None = None  # the id of the sweep whose trials they are


async def insert(session: AsyncSession, jobs: Sequence[tuple[NewJob, NewEvent]]) -> None:
    """Add the rows in this order, their labels and their first events. Raises IntegrityError when an id or a live job's
    name is taken."""
    await session.execute(insert_into(JobRow.__table__), [_values(job) for job, _ in jobs])  # type: ignore[arg-type]
    labels = [
        {"job_id": job.id, "key": key[:320], "value": value[:256]}
        for job, _ in jobs
        for key, value in job.labels.items()
    ]
    if labels:
        await session.execute(_INSERT_LABEL, labels)
    first = [event_values(job.id, 1, created) for job, created in jobs]
    await session.execute(insert_into(EventRow.__table__), first)  # type: ignore[arg-type]


_INSERT_LABEL = insert_into(LabelRow.__table__).values(  # type: ignore[arg-type]
    job_seq=select(JobRow.seq).where(JobRow.id == bindparam("job_id")).scalar_subquery(),
    key=bindparam("key"),
    value=bindparam("value"),
)


def new_row(job: NewJob) -> JobRow:
    """The job as its row will be, which no session knows."""
    return JobRow(**_values(job))


def _values(job: NewJob) -> dict[str, Any]:
    return {
        "id": job.id,
        "namespace": job.namespace,
        "name": job.name,
        "project": job.project,
        "owner": job.owner,
        "labels": job.labels,
        "spec": job.spec,
        "spec_version": 1,
        "relayed_version": job.relayed_version,
        "relay_failures": 0,
        "relay_after": 0.0,
        "priority": job.priority,
        "created_at": job.created_at,
        "live": job.live,
        "deleted": False,
        "phase": job.status["phase"],
        "status": job.status,
        "status_version": 0,
        "finished_at": None,
        "last_event": 1,
        "tags": "",
        "note": "",
        "noted_at": None,
    }


async def get(session: AsyncSession, job_id: str, lock: bool = False) -> JobRow | None:
    query = select(JobRow).where(JobRow.id == job_id)
    return (await session.scalars(query.with_for_update() if lock else query)).one_or_none()


async def live_job(session: AsyncSession, namespace: str, name: str) -> JobRow | None:
    query = select(JobRow).where(JobRow.namespace == namespace, JobRow.name == name, JobRow.live.is_(True))
    return (await session.scalars(query)).one_or_none()


async def live_with_name(session: AsyncSession, namespace: str, name: str) -> str | None:
    """The id of the live job of that name."""
    query = select(JobRow.id).where(JobRow.namespace == namespace, JobRow.name == name, JobRow.live.is_(True))
    return (await session.scalars(query)).one_or_none()


async def named(session: AsyncSession, project: str, namespace: str, reference: str, limit: int = 20) -> list[JobRow]:
    """The jobs of the project that `reference`, an id or a name, can mean; newest first."""
    by_name = and_(JobRow.namespace == namespace, JobRow.name == reference)
    meant = and_(JobRow.project == project, or_(JobRow.id == reference, by_name))
    return list((await session.scalars(select(JobRow).where(meant).order_by(JobRow.seq.desc()).limit(limit))).all())


async def names_like(session: AsyncSession, namespace: str, stem: str) -> set[str]:
    """Return the names of live jobs that start with `stem`."""
    query = select(JobRow.name).where(
        JobRow.namespace == namespace, JobRow.live.is_(True), JobRow.name.startswith(stem, autoescape=True)
    )
    return set((await session.scalars(query)).all())


async def phases_among(session: AsyncSession, phases: Collection[str]) -> set[str]:
    """Return those of the phases that some job is in."""
    matches = await session.scalars(select(JobRow.phase).where(JobRow.phase.in_(phases)).distinct())
    return set(matches.all())


async def page(session: AsyncSession, chosen: JobFilter, before_seq: int | None, limit: int) -> list[JobRow]:
    """The newest jobs older than `before_seq`, newest first."""
    query = _filtered(select(JobRow), chosen).order_by(JobRow.seq.desc()).limit(limit)
    if before_seq is not None:
        query = query.where(JobRow.seq < before_seq)
    return list((await session.scalars(query)).all())


async def ordered(
    session: AsyncSession, selection: JobFilter, order: JobOrder, offset: int, limit: int
) -> list[tuple[JobRow, str]]:
    """A piece of the list, for people who turn pages, each job with the value that it is grouped by; programs read on
    by `page`."""
    group = order.group_value()
    terms = _filtered(select(JobRow.seq, group), selection).order_by(*order.terms()).offset(offset).limit(limit)
    # Their numbers first: to sort the rows themselves moves the specs and statuses of all that match.
    places = [(seq, str(value or "")) for seq, value in await session.execute(terms)]
    chosen = select(JobRow).where(JobRow.seq.in_([seq for seq, _ in places]))
    rows = {row.seq: row for row in await session.scalars(chosen)}
    return [(rows[seq], value) for seq, value in places if seq in rows]


async def newest(session: AsyncSession, selection: JobFilter) -> JobRow | None:
    """Return the newest job that matches."""
    query = _filtered(select(JobRow), selection).order_by(JobRow.seq.desc()).limit(1)
    return (await session.scalars(query)).one_or_none()


async def those_of(session: AsyncSession, job_ids: Collection[str], visible: Collection[str] | None) -> list[JobRow]:
    """Return the jobs with these ids that are in a visible project (None: in any), in no order."""
    query = _filtered(select(JobRow), JobFilter(visible=visible)).where(JobRow.id.in_(job_ids))
    return list((await session.scalars(query)).all())


async def count_by_group(session: AsyncSession, chosen: JobFilter, order: JobOrder) -> dict[str, int]:
    """Return the number of jobs that match the filter by the value that they are grouped by."""
    values = _filtered(select(order.group_value().label("value")).select_from(JobRow), chosen).subquery()
    query = select(values.c.value, func.count()).group_by(values.c.value)
    return {str(value or ""): int(count) for value, count in (await session.execute(query)).all()}


async def count_by_phase(session: AsyncSession, chosen: JobFilter) -> dict[str, int]:
    """Return the number of jobs that match the filter in each phase."""
    query = _filtered(select(JobRow.phase, func.count()), chosen).group_by(JobRow.phase)
    return {phase: int(count) for phase, count in (await session.execute(query)).all()}


def _filtered(query: Select[Any], chosen: JobFilter) -> Select[Any]:
    if chosen.phases:
        query = query.where(JobRow.phase.in_(chosen.phases))
    if chosen.name is not None:
        query = query.where(JobRow.name == chosen.name)
    if chosen.namespace is not None:
        query = query.where(JobRow.namespace == chosen.namespace)
    if chosen.project is not None:
        query = query.where(JobRow.project == chosen.project)
    if chosen.owner is not None:
        query = query.where(JobRow.owner == chosen.owner)
    if chosen.visible is not None:
        query = query.where(JobRow.project.in_(chosen.visible))
    if chosen.live is not None:
        query = query.where(JobRow.live.is_(chosen.live))
    if chosen.search:
        part = chosen.search.lower()
        query = query.where(
            or_(
                func.lower(JobRow.name).contains(part, autoescape=True),
                JobRow.owner.contains(part, autoescape=True),
                JobRow.id.startswith(part, autoescape=True),
            )
        )
    if chosen.tag is not None:
        query = query.where(exists().where(JobTagRow.job_seq == JobRow.seq, JobTagRow.tag == chosen.tag))
    if chosen.sweep is not None:
        query = query.where(exists().where(TrialRow.job_id == JobRow.id, TrialRow.sweep_id == chosen.sweep))
    for key, value in chosen.labels:
        has = exists().where(LabelRow.job_seq == JobRow.seq, LabelRow.key == key, LabelRow.value == value)
        query = query.where(has)
    return query


async def queue_ahead(session: AsyncSession, row: JobRow) -> tuple[int, int]:
    """Return (jobs ahead of this one in the queue, all queued jobs). The order is by priority, then by submission."""
    queued = and_(JobRow.phase == Phase.QUEUED, JobRow.live.is_(True))
    before = or_(JobRow.priority > row.priority, and_(JobRow.priority == row.priority, JobRow.seq < row.seq))
    query = select(func.count().filter(before), func.count()).select_from(JobRow).where(queued)
    ahead, total = (await session.execute(query)).one()
    return int(ahead), int(total)


async def live_in_cluster(session: AsyncSession) -> set[str]:
    """The ids of jobs that were seen in the cluster and not seen to go."""
    query = select(JobRow.id).where(JobRow.status_version > 0, JobRow.deleted.is_(False))
    return set((await session.scalars(query)).all())


def folder_of(row: JobRow) -> StorageAddress | None:
    """Return the job's checkpoint folder, or None if its spec names none (it was not submitted through this API)."""
    base = (row.spec.get("checkpoint") or {}).get("uri")
    try:
        return job_folder(str(base), row.id) if base else None
    except AddressError:  # accepted by an older Muster
        return None
