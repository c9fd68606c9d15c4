"""Events in the database. Numbers are given out under the job's lock: readers see them in order, without gaps.

What must happen with an event, and in its transaction, listens to the database's events.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.database.db import Database
from muster.api.core.database.tables import EventRow, JobRow
from muster.api.core.events.types import NewEvent
from muster.words.redaction import redact


@dataclass(frozen=True)
class NamedJob:
    """The job that an event is about."""

    id: str
    name: str
    owner: str
    project: str


Listener = Callable[[AsyncSession, NamedJob, Sequence[Mapping[str, Any]]], Awaitable[None]]
_LISTENERS = "event listeners"  # in what each session of a database carries


def listen(database: Database, listener: Listener) -> None:
    """Have the listener called with the rows of each job's new events, in the transaction that adds them."""
    database.session_info.setdefault(_LISTENERS, []).append(listener)


async def append(session: AsyncSession, job_id: str, events: Sequence[NewEvent]) -> None:
    """Add the events with the job's next numbers, and call the listeners. The job's row stays locked until
    the commit.

    Times never go back from one event to the next: what is heard of late (a commit, while the status is newer already)
    has the time of the event before it, and its own as `happenedAt` in its data.
    """
    if not events:
        return
    counted = update(JobRow).where(JobRow.id == job_id).values(last_event=JobRow.last_event + len(events))
    counted = counted.returning(JobRow.last_event, JobRow.name, JobRow.owner, JobRow.project)
    last, name, owner, project = (await session.execute(counted, execution_options=_QUIETLY)).one()
    first = last - len(events) + 1
    before = select(EventRow.at).where(EventRow.job_id == job_id, EventRow.number == first - 1)
    at, rows = (await session.scalars(before)).one_or_none() or 0.0, []
    for number, event in enumerate(events, first):
        values = event_values(job_id, number, event)
        if event.at < at:
            values |= {"at": at, "body": {**values["body"], "data": {**event.data, "happenedAt": event.at}}}
        at = values["at"]
        rows.append(values)
    await session.execute(insert(EventRow), rows)
    for listener in session.info.get(_LISTENERS, ()):
        await listener(session, NamedJob(job_id, name, owner, project), rows)


# The session's own copy of the row is not looked at again.
_QUIETLY = {"synchronize_session": False}


async def after(
    session: AsyncSession, job_id: str, number: int, limit: int, kinds: Sequence[str] = ()
) -> list[EventRow]:
    query = select(EventRow).where(EventRow.job_id == job_id, EventRow.number > number)
    if kinds:
        query = query.where(EventRow.type.in_(kinds))
    return list((await session.scalars(query.order_by(EventRow.number).limit(limit))).all())


async def before(
    session: AsyncSession, job_id: str, number: int | None, limit: int, kinds: Sequence[str] = ()
) -> list[EventRow]:
    """The newest events with a smaller number, newest first; None for the newest of all."""
    query = select(EventRow).where(EventRow.job_id == job_id)
    if number is not None:
        query = query.where(EventRow.number < number)
    if kinds:
        query = query.where(EventRow.type.in_(kinds))
    return list((await session.scalars(query.order_by(EventRow.number.desc()).limit(limit))).all())


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
