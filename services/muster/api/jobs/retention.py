"""What is dropped of jobs that ended long ago: events, logs, step metrics. Record, attempts, usage, commits stay."""

from __future__ import annotations

import asyncio
import shutil

from sqlalchemy import delete, exists, select

from muster.api.db import Database
from muster.api.tables import EventRow, JobRow
from muster.contract.layout import State

JOBS_AT_ONCE = 100  # of a round; the next one goes on


async def drop_old(database: Database, layout: State, before: float) -> list[str]:
    """Drop it of jobs that ended before then, but for the last event of each, which tells how it ended. Returns the ids
    of jobs that had something; whatever ends this in the middle leaves them to be found again."""
    earlier = (EventRow.job_id == JobRow.id, EventRow.number < JobRow.last_event)
    old = select(JobRow.id).where(JobRow.finished_at < before, JobRow.live.is_(False), exists().where(*earlier))
    async with database.read() as session:
        ids = list((await session.scalars(old.order_by(JobRow.finished_at).limit(JOBS_AT_ONCE))).all())
    for uid in ids:
        await asyncio.to_thread(shutil.rmtree, layout.jobs / uid, ignore_errors=True)
    if ids:
        async with database.write() as session:
            of_job = select(JobRow.last_event).where(JobRow.id == EventRow.job_id).scalar_subquery()
            await session.execute(delete(EventRow).where(EventRow.job_id.in_(ids), EventRow.number < of_job))
    return ids
