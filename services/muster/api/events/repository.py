"""Events in the database. Numbers are given out under the job's lock: readers see them in order, without gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.events.types import NewEvent
from muster.api.redact import redact
from muster.api.tables import EventRow, JobRow


async def append(session: AsyncSession, job_id: str, events: Sequence[NewEvent]) -> None:
    """Add the events with the job's next numbers; the job's row stays locked until the commit."""
    if not events:
        return
    counted = update(JobRow).where(JobRow.id == job_id).values(last_event=JobRow.last_event + len(events))
    last = (await session.execute(counted.returning(JobRow.last_event), execution_options=_QUIETLY)).scalar_one()
    first = last - len(events) + 1
    rows = [event_values(job_id, first + index, event) for index, event in enumerate(events)]
    await session.execute(insert(EventRow), rows)


# The session's own copy of the row is not looked at again.
_QUIETLY = {"synchronize_session": False}


async def after(
    session: AsyncSession, job_id: str, number: int, limit: int, kinds: Sequence[str] = ()
) -> list[EventRow]:
    query = select(EventRow).where(EventRow.job_id == job_id, EventRow.number > number)
    if kinds:
        query = query.where(EventRow.type.in_(kinds))
    return list((await session.scalars(query.order_by(EventRow.number).limit(limit))).all())


def event_values(job_id: str, number: int, event: NewEvent) -> dict[str, Any]:
    body = {"message": redact(event.message), "data": event.data}
    return {
        "job_id": job_id,
        "number": number,
        "type": event.type,
        "at": event.at,
        "attempt": event.attempt,
        "body": body,
    }
