"""Sweeps and their trials in the database. Functions on a session: who opens it also commits it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.database.tables import JobRow, SweepRow, TrialRow
from muster.api.sweeps.trials import SweepDraft
from muster.recipe.sweep import Sweep


@dataclass(frozen=True)
class SweepFilter:
    """Filter of sweeps. Every given condition must hold. `visible` are the projects that the caller may see; None for
    all."""

    visible: Collection[str] | None
    project: str | None = None
    name: str | None = None
    live: bool | None = None


async def get(session: AsyncSession, sweep_id: str, lock: bool = False) -> SweepRow | None:
    query = select(SweepRow).where(SweepRow.id == sweep_id)
    return (await session.scalars(query.with_for_update() if lock else query)).one_or_none()


async def live_with_name(session: AsyncSession, project: str, name: str) -> str | None:
    """The id of the project's live sweep of that name."""
    query = select(SweepRow.id).where(SweepRow.project == project, SweepRow.name == name, SweepRow.live.is_(True))
    return (await session.scalars(query)).one_or_none()


async def by_request(session: AsyncSession, request: str) -> SweepRow | None:
    """Return the sweep that the request with that Idempotency-Key created, if any."""
    return (await session.scalars(select(SweepRow).where(SweepRow.request == request))).one_or_none()


async def live_ids(session: AsyncSession) -> list[str]:
    """Return the ids of the sweeps with something left to do, oldest first."""
    return list(
        (await session.scalars(select(SweepRow.id).where(SweepRow.live.is_(True)).order_by(SweepRow.seq))).all()
    )


async def page(session: AsyncSession, chosen: SweepFilter, before_seq: int | None, limit: int) -> list[SweepRow]:
    """The newest sweeps older than `before_seq`, newest first."""
    query = select(SweepRow).order_by(SweepRow.seq.desc()).limit(limit)
    if chosen.visible is not None:
        query = query.where(SweepRow.project.in_(chosen.visible))
    if chosen.project is not None:
        query = query.where(SweepRow.project == chosen.project)
    if chosen.name is not None:
        query = query.where(SweepRow.name == chosen.name)
    if chosen.live is not None:
        query = query.where(SweepRow.live.is_(chosen.live))
    if before_seq is not None:
        query = query.where(SweepRow.seq < before_seq)
    return list((await session.scalars(query)).all())


async def trials(session: AsyncSession, sweep_id: str) -> list[tuple[TrialRow, JobRow | None]]:
    """The trials that were started, by their numbers, each with its job unless that was refused or deleted."""
    query = (
        select(TrialRow, JobRow)
        .outerjoin(JobRow, JobRow.id == TrialRow.job_id)
        .where(TrialRow.sweep_id == sweep_id)
        .order_by(TrialRow.number)
    )
    return [(trial, job) for trial, job in (await session.execute(query)).all()]


def draft_of(row: SweepRow) -> SweepDraft:
    return SweepDraft(row.id, Sweep.model_validate(row.document["sweep"], by_alias=True), row.document["job"])
