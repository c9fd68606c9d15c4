"""How fast this server's jobs were, for the time that another like them would take."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from sqlalchemy import select

from muster.api.auth import Principal
from muster.api.db import Database
from muster.api.tables import JobRow
from muster.contract.spec import JobSpec
from muster.contract.status import JobStatus
from muster.contract.throughput import Measured, setup_of

JOBS_MAX = 500  # the newest; speeds of long ago are of another Muster


async def measured(database: Database, caller: Principal) -> tuple[Measured, ...]:
    """Of the newest jobs that have trained, and that the caller may see."""
    query = select(JobRow.name, JobRow.spec, JobRow.status).order_by(JobRow.seq.desc()).limit(JOBS_MAX)
    if caller.visible_projects is not None:
        query = query.where(JobRow.project.in_(caller.visible_projects))
    async with database.read() as session:
        rows = (await session.execute(query)).all()
    return tuple(record for name, spec, status in rows if (record := _record(name, spec, status)) is not None)


def _record(name: str, spec: dict[str, Any], status: dict[str, Any]) -> Measured | None:
    """None for a job that has told no speed, or that a newer Muster wrote."""
    try:
        training, seen = JobSpec.model_validate(spec).training, JobStatus.model_validate(status)
    except ValidationError:
        return None
    speed = seen.progress.tokens_per_second if seen.progress else None
    last = next((attempt for attempt in reversed(seen.attempts) if attempt.first_step_at is not None), None)
    if not speed or last is None or not last.world_size:
        return None
    return Measured(name, setup_of(training), speed, last.world_size, last.instance_type, last.gpus_per_worker)
