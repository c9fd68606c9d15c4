"""Usage in the database: written by the mirror with each attempt, read by reports and budgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError
from sqlalchemy import delete, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.database.tables import JobRow, UsageRow
from muster.plan.usage import HeldNodes, held_of
from muster.words.quantities import quantity
from muster.words.status import Attempt


class UsageRecorder:
    """Recorder of usage, which the mirror calls with each change."""

    async def attempt_changed(
        self, session: AsyncSession, row: JobRow, before: dict[str, Any] | None, after: dict[str, Any]
    ) -> None:
        """Note what the attempt holds, where that is news: `before` is the attempt as it was last seen."""
        usage = _nodes_of(row, after)
        if usage == (_nodes_of(row, before) if before else None):
            return
        if usage is None or _never_placed(before, usage):
            this = delete(UsageRow).where(UsageRow.job_id == row.id, UsageRow.attempt == after["number"])
            await session.execute(this)
            return
        values = asdict(usage) | {"job_id": usage.job, "project": row.project, "attempt": after["number"]}
        values.pop("job")
        await session.merge(UsageRow(**values))

    async def job_ended(self, session: AsyncSession, job_id: str, at: float) -> None:
        """Nothing of the job holds anything after that."""
        open_rows = update(UsageRow).where(UsageRow.job_id == job_id, UsageRow.until.is_(None))
        await session.execute(open_rows.values(until=at))


async def held_by(session: AsyncSession, project: str, since: float, until: float) -> list[HeldNodes]:
    """Return what the project's attempts held at any time between `since` and `until`."""
    query = select(UsageRow).where(
        UsageRow.project == project, UsageRow.since < until, or_(UsageRow.until.is_(None), UsageRow.until > since)
    )
    return list(_read(await session.scalars(query.order_by(UsageRow.since))))


async def held_by_project(session: AsyncSession, since: float, until: float) -> dict[str, list[HeldNodes]]:
    """The same of every project that held anything."""
    query = select(UsageRow).where(UsageRow.since < until, or_(UsageRow.until.is_(None), UsageRow.until > since))
    rows = (await session.scalars(query)).all()
    by_project: dict[str, list[HeldNodes]] = {}
    for row, usage in zip(rows, _read(rows), strict=True):
        by_project.setdefault(row.project, []).append(usage)
    return by_project


def _read(rows: Any) -> Iterator[HeldNodes]:
    for row in rows:
        yield HeldNodes(
            job=row.job_id,
            name=row.name,
            person=row.person,
            since=row.since,
            until=row.until,
            workers=row.workers,
            gpus_per_worker=row.gpus_per_worker,
            cpus_per_worker=row.cpus_per_worker,
            instance_type=row.instance_type,
            capacity=row.capacity,
            lost_seconds=row.lost_seconds,
        )


def _nodes_of(row: JobRow, raw: dict[str, Any]) -> HeldNodes | None:
    """Return what the attempt held, or None. It is also None for an attempt that a newer version wrote."""
    try:
        attempt = Attempt.model_validate(raw)
    except ValidationError:
        return None
    return held_of(attempt, row.id, row.name, row.owner, cpus_per_worker(row.spec))


def _never_placed(before: dict[str, Any] | None, usage: HeldNodes) -> bool:
    """Return whether the attempt ended while it waited for another scheduler. Its beginning moves when it is placed."""
    was = Attempt.model_validate(before) if before and before.get("outcome") == "waiting" else None
    return was is not None and usage.until is not None and was.created_at == usage.since


def cpus_per_worker(spec: dict[str, Any]) -> float:
    """Cores that each worker of the job asks for; 0 where it names none."""
    asked = ((spec.get("gang") or {}).get("resources") or {}).get("cpu")
    try:
        return quantity(asked)
    except ValueError:
        return 0.0
