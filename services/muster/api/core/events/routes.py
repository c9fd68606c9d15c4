"""`/jobs/{id}/events`: a list, or a stream that resumes where it was cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import select

from muster.api.core.access import StreamReader, find_job
from muster.api.core.callers import Caller, reads
from muster.api.core.database.tables import EventRow, JobRow
from muster.api.core.errors import ApiError, invalid_parameter
from muster.api.core.events import repository
from muster.api.core.events.types import EventType
from muster.api.core.http import sse
from muster.api.core.http.openapi import AT, UID, example_reply, problems
from muster.api.core.http.path_parts import JobId
from muster.api.core.hub import POLL_SECONDS
from muster.api.core.services import Services, ServicesDependency
from muster.replies.jobs import Event, EventList
from muster.replies.views import with_times
from muster.words.times import rfc3339

router = APIRouter(prefix="/jobs", tags=["jobs"])

BATCH = 500
Since = Annotated[int, Query(ge=0, le=2**62, description="Only events with a greater id.")]
LastEventId = Annotated[
    str | None, Header(alias="Last-Event-ID", max_length=1000, description="The last id that a cut stream gave.")
]
Follow = Annotated[bool, Query(description="Stream (server-sent events); so does `Accept: text/event-stream`.")]
_EXAMPLE = {
    "id": 4,
    "jobId": UID,
    "type": "attempt.failed",
    "at": rfc3339(AT + 95),
    "attempt": 1,
    "message": "worker 1 was killed by signal 9",
    "data": {"cause": "infrastructure", "lastStep": 88, "lostSteps": 8, "exitCode": 137},
}
_FRAME = {
    "type": "object",
    "description": "One server-sent event; its data is JSON.",
    "properties": {name: {"type": "string"} for name in ("id", "event", "data")},
    "required": ["event", "data"],
}
_STREAM = {"text/event-stream": {"schema": _FRAME, "example": "id: 4\nevent: attempt.failed\ndata: {…}\n\n"}}
STREAM_DONE: dict[int | str, dict[str, Any]] = {
    204: {"description": "The job has ended and a resumed stream has nothing left to tell"}
}


def event_of(row: EventRow) -> Event:
    return Event(
        id=row.number,
        job_id=row.job_id,
        type=row.type,
        at=row.at,
        attempt=row.attempt,
        message=row.body["message"],
        data=with_times(row.body["data"]),
    )


def with_stream(reply: dict[str, Any]) -> dict[str, Any]:
    return {**reply, "content": {**reply["content"], **_STREAM}}


@router.get(
    "/{job_id}/events",
    response_model=EventList,
    dependencies=[reads],
    summary="List or follow a job's events",
    responses={
        200: with_stream(example_reply({"items": [_EXAMPLE], "lastId": 4}, "Events, oldest first")),
        **STREAM_DONE,
        **problems("job_not_found", "too_many_streams"),
    },
)
async def list_events(
    request: Request,
    services: ServicesDependency,
    caller: Caller,
    job_id: JobId,
    after: Since = 0,
    limit: Annotated[int, Query(ge=1, le=2000)] = 500,
    kind: Annotated[list[EventType] | None, Query(alias="type", max_length=32, description="Only these types.")] = None,
    follow: Follow = False,
    last_event_id: LastEventId = None,
) -> Response:
    """Returns the events of a job, oldest first. The log is append-only. A stream ends with `event: end` when the job
    has ended and every event has been sent."""
    row = await find_job(services, caller, job_id)
    kinds = tuple(kind or ())
    if not sse.wants_stream(request, follow):
        return await _list(services, row, after, limit, kinds)
    start = _resume_at(last_event_id) if last_event_id is not None else after
    if last_event_id is not None and _is_over(row) and start >= row.last_event:
        return Response(status_code=204)  # tells EventSource not to come again
    return sse.stream(
        _follow(services, StreamReader(services, caller, row.project), job_id, start, kinds),
        services.settings.stream_ping_seconds,
        services.streams.one_of(caller.person),
    )


def _resume_at(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 19:
        return int(text)
    raise invalid_parameter("header.Last-Event-ID", "must be the id of an event of this job")


async def _list(services: Services, row: JobRow, after: int, limit: int, kinds: tuple[str, ...]) -> JSONResponse:
    async with services.database.read() as session:
        rows = await repository.after(session, row.id, after, limit, kinds)
    items = [_document(event) for event in rows]
    return JSONResponse({"items": items, "lastId": items[-1]["id"] if items else after})


async def _follow(
    services: Services, reader: StreamReader, job_id: str, after: int, kinds: tuple[str, ...]
) -> AsyncGenerator[str, None]:
    clock = asyncio.get_running_loop().time
    deadline = clock() + services.settings.stream_seconds_max
    with services.metrics.streams.track_inprogress(), services.hub.following(job_id) as news:
        while not services.hub.closing.is_set() and clock() < deadline and await reader.may_read():
            try:
                row, rows = await _news(services, job_id, after)
            except ApiError:  # the database is away: the stream stays and goes on when it is back
                await news.wait(POLL_SECONDS)
                continue
            for event in rows:
                after = event.number
                if not kinds or event.type in kinds:
                    yield sse.frame(_document(event), event.type, str(event.number))
            if row is None or (_is_over(row) and after >= row.last_event):
                yield sse.frame({"phase": row.phase if row else None}, "end", str(after))
                return
            if len(rows) < BATCH:
                await news.wait(min(services.hub.poll_seconds, services.settings.stream_seconds_max))


async def _news(services: Services, job_id: str, after: int) -> tuple[JobRow | None, list[EventRow]]:
    """The row is read first, so that its `last_event` never promises less than the events that follow hold."""
    async with services.database.read() as session:
        row = (await session.scalars(select(JobRow).where(JobRow.id == job_id))).one_or_none()
        return row, await repository.after(session, job_id, after, BATCH)


def _is_over(row: JobRow) -> bool:
    return not row.live


def _document(row: EventRow) -> dict[str, Any]:
    return event_of(row).model_dump(mode="json", by_alias=True)
