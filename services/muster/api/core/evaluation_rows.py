"""Evaluations in the database. Functions on a session: who opens it also commits it."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.database.tables import EvaluationRow, EvaluationRunRow, JobRow


async def live(session: AsyncSession) -> list[tuple[EvaluationRow, JobRow]]:
    """Return the evaluations that have not ended, oldest first."""
    query = (
        select(EvaluationRow, JobRow)
        .join(JobRow, JobRow.id == EvaluationRow.job_id)
        .where(JobRow.live.is_(True))
        .order_by(JobRow.seq)
    )
    return [(row, job) for row, job in await session.execute(query)]


async def runs(session: AsyncSession, evaluation_id: str) -> list[tuple[EvaluationRunRow, JobRow | None]]:
    """Return the evaluations of single checkpoints by step, each with its job unless that was refused or deleted."""
    query = (
        select(EvaluationRunRow, JobRow)
        .outerjoin(JobRow, JobRow.id == EvaluationRunRow.job_id)
        .where(EvaluationRunRow.evaluation_id == evaluation_id)
        .order_by(EvaluationRunRow.step)
    )
    return [(run, job) for run, job in await session.execute(query)]


async def of_checkpoints(session: AsyncSession, target_id: str) -> Sequence[tuple[EvaluationRunRow, JobRow]]:
    """Return every evaluation of the job's checkpoints with the job that asked for it, oldest first."""
    query = (
        select(EvaluationRunRow, JobRow)
        .join(EvaluationRow, EvaluationRow.job_id == EvaluationRunRow.evaluation_id)
        .join(JobRow, JobRow.id == EvaluationRow.job_id)
        .where(EvaluationRow.target_id == target_id)
        .order_by(JobRow.seq, EvaluationRunRow.step)
    )
    return [(run, job) for run, job in await session.execute(query)]
