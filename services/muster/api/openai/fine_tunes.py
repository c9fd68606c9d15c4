"""Rows of fine-tuning jobs: a job's own row, and alongside it what its request said in OpenAI's words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Select, exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.database.tables import FineTuneMetadataRow, FineTuneRow, JobRow, Table
from muster.words.status import Phase


class FineTuneBody(BaseModel):
    """Request of a fine-tuning job, with numbers in place of every `"auto"`; `choices` says how each was chosen.

    `base` is the mapped model that the job starts from, also where `model` was fine-tuned from it.
    """

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    model: str
    base: str
    training_file: str
    validation_file: str | None = None
    suffix: str | None = None
    seed: int
    metadata: dict[str, str] | None = None
    method: str
    hyperparameters: dict[str, float]
    grader: dict[str, Any] | None = None  # as it came
    choices: tuple[str, ...] = Field(default=(), alias="told")  # as rows and events have it


@dataclass(frozen=True)
class FineTune:
    """A job and what it is in OpenAI's words."""

    job: JobRow
    body: FineTuneBody


@dataclass(frozen=True)
class FineTuneFilter:
    """`metadata`: pairs that must all be there; None for jobs that have none; an empty mapping for every job."""

    visible: Collection[str] | None
    project: str | None
    metadata: Mapping[str, str] | None


def rows_of(job_id: str, body: FineTuneBody, retried: bool) -> list[Table]:
    pairs = (body.metadata or {}).items()
    row = FineTuneRow(job_id=job_id, body=body.model_dump(mode="json"), retried=retried)
    return [row, *(FineTuneMetadataRow(job_id=job_id, key=key, value=value) for key, value in pairs)]


async def get(session: AsyncSession, job_id: str) -> FineTune | None:
    row = (await session.execute(_all().where(JobRow.id == job_id))).one_or_none()
    return _of(row[0], row[1]) if row else None


async def page(session: AsyncSession, chosen: FineTuneFilter, after: str | None, limit: int) -> list[FineTune] | None:
    """The newest jobs older than `after`, newest first; None where `after` is no job that the caller may see."""
    query = _seen(_all(), chosen)
    if after is not None:
        place = (await session.execute(_seen(_all(), chosen).where(JobRow.id == after))).one_or_none()
        if place is None:
            return None
        query = query.where(JobRow.seq < place[0].seq)
    if chosen.metadata is None:
        query = query.where(~exists().where(FineTuneMetadataRow.job_id == JobRow.id))
    for key, value in (chosen.metadata or {}).items():
        has = exists().where(
            FineTuneMetadataRow.job_id == JobRow.id,
            FineTuneMetadataRow.key == key,
            FineTuneMetadataRow.value == value,
        )
        query = query.where(has)
    rows = (await session.execute(query.order_by(JobRow.seq.desc()).limit(limit))).all()
    return [_of(job, row) for job, row in rows]


async def succeeded(session: AsyncSession, visible: Collection[str] | None, limit: int) -> list[FineTune]:
    """The newest jobs that made a model, newest first."""
    query = _seen(_all(), FineTuneFilter(visible, None, {})).where(JobRow.phase == Phase.SUCCEEDED)
    rows = (await session.execute(query.order_by(JobRow.seq.desc()).limit(limit))).all()
    return [_of(job, row) for job, row in rows]


def _all() -> Select[tuple[JobRow, FineTuneRow]]:
    return select(JobRow, FineTuneRow).join(FineTuneRow, FineTuneRow.job_id == JobRow.id)


def _seen(query: Select[tuple[JobRow, FineTuneRow]], chosen: FineTuneFilter) -> Select[tuple[JobRow, FineTuneRow]]:
    if chosen.visible is not None:
        query = query.where(JobRow.project.in_(chosen.visible))
    return query if chosen.project is None else query.where(JobRow.project == chosen.project)


def _of(job: JobRow, row: FineTuneRow) -> FineTune:
    body: dict[str, Any] = row.body
    return FineTune(job, FineTuneBody.model_validate(body))
