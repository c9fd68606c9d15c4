"""Retention of jobs that ended long ago: events, logs and step metrics are dropped; record, attempts, usage and
checkpoints stay."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from sqlalchemy import delete, exists, select

from muster.api.core.database.db import Database
from muster.api.core.database.tables import EventRow, JobRow
from muster.words.state_folder import StateFolder

JOBS_AT_ONCE = 100  # of a round; the next one goes on
NAMES_AT_ONCE = 500  # of a statement


async def drop_old(database: Database, layout: StateFolder, before: float) -> list[str]:
    """Drop it of jobs that ended before then, but for the last event of each, which says how it ended. Returns the ids
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


async def drop_left(database: Database, layout: StateFolder, before: float) -> None:
    """Remove the logs and step metrics of such jobs on this machine's disk: each replica has its own, and another one
    may have dropped the events by which they are found."""
    names = await asyncio.to_thread(_untouched, layout.jobs, before)
    for at in range(0, len(names), NAMES_AT_ONCE):
        some = JobRow.id.in_(names[at : at + NAMES_AT_ONCE])
        async with database.read() as session:
            old = select(JobRow.id).where(some, JobRow.finished_at < before, JobRow.live.is_(False))
            ids = (await session.scalars(old)).all()
        for uid in ids:
            await asyncio.to_thread(shutil.rmtree, layout.jobs / uid, ignore_errors=True)


def _untouched(folder: Path, since: float) -> list[str]:
    """The folders of jobs to which nothing was added since then."""
    try:
        return [each.name for each in folder.iterdir() if each.stat().st_mtime < since]
    except FileNotFoundError:  # of no job, or one was just removed: the next round looks again
        return []
