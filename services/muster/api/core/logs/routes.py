"""`/jobs/{id}/logs`: a page, plain text, or a stream that walks from attempt to attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.concurrency import run_in_threadpool

from muster.api.core.access import StreamReader, find_job
from muster.api.core.callers import Caller, reads
from muster.api.core.database.tables import JobRow
from muster.api.core.errors import ApiError, invalid_parameter
from muster.api.core.events.routes import STREAM_DONE, Follow, LastEventId, with_stream
from muster.api.core.http import sse
from muster.api.core.http.openapi import example_reply, problems
from muster.api.core.http.path_parts import JobId
from muster.api.core.jobs import repository
from muster.api.core.logs.files import JobLogs, LogFollower, LogLine, page, tail_offset
from muster.api.core.services import Services, ServicesDependency
from muster.replies.jobs import LogPage

router = APIRouter(prefix="/jobs", tags=["jobs"])

_LOOK_SECONDS = 1.0  # between looks at the job's row while its files are quiet


_EXAMPLE = {
    "attempt": 2,
    "worker": 0,
    "attempts": [1, 2],
    "workers": [0, 1],
    "text": '{"type":"step","step":124,"loss":2.31}\n',
    "offset": 20_480,
    "nextOffset": 20_518,
    "complete": False,
}


def _page_reply() -> dict[str, Any]:
    reply = with_stream(example_reply(_EXAMPLE, "A page of at most a megabyte"))
    reply["content"]["text/plain"] = {"schema": {"type": "string"}, "example": _EXAMPLE["text"]}
    return reply


@router.get(
    "/{job_id}/logs",
    response_model=LogPage,
    dependencies=[reads],
    summary="Read or follow a worker's log",
    responses={200: _page_reply(), **STREAM_DONE, **problems("job_not_found", "log_not_found", "too_many_streams")},
)
async def read_logs(
    request: Request,
    services: ServicesDependency,
    caller: Caller,
    job_id: JobId,
    attempt: Annotated[
        int | None, Query(ge=1, le=10**9, description="Left out: the newest; a stream then goes on to later ones.")
    ] = None,
    worker: Annotated[
        str, Query(pattern=r"^(all|[0-9]{1,9})$", description="A number, or `all` for a stream of every worker.")
    ] = "0",
    tail: Annotated[int | None, Query(ge=0, le=100_000, description="Begin with the last so many lines.")] = None,
    offset: Annotated[
        int | None, Query(ge=0, le=2**53, description="Begin at this byte: `nextOffset` of the page before.")
    ] = None,
    follow: Follow = False,
    last_event_id: LastEventId = None,
) -> Response:
    """Returns the log of a worker: its standard output and standard error. Logs are kept after the worker is gone."""
    row = await find_job(services, caller, job_id)
    logs = JobLogs(services.settings.layout, job_id)
    streaming = sse.wants_stream(request, follow)
    number = None if worker == "all" else int(worker)
    if number is None and not streaming:
        raise invalid_parameter("query.worker", "`all` is for streams; a page is of one worker")
    await services.cluster.fetch_log(job_id, attempt, number)
    attempts = await run_in_threadpool(logs.attempts)
    if attempt is not None and attempt not in attempts and (not row.live or not streaming):
        numbers = ", ".join(map(str, attempts)) or "none"
        raise ApiError("log_not_found", f"Job {row.name!r} has no log of attempt {attempt}; there are: {numbers}.")
    chosen = attempt or (attempts[-1] if attempts else None)
    if not streaming:
        assert number is not None
        return await _page(request, row, logs, attempts, chosen, number, tail, offset)
    follower = LogFollower(logs, chosen, number)
    await run_in_threadpool(_begin, follower, tail, last_event_id)
    if last_event_id is not None and not row.live and await run_in_threadpool(_is_exhausted, follower, attempt):
        return Response(status_code=204)
    reader = StreamReader(services, caller, row.project)
    lines = _follow(services, reader, row, follower, pinned=attempt is not None)
    return sse.stream(lines, services.settings.stream_ping_seconds, services.streams.one_of(caller.person))


async def _page(
    request: Request,
    row: JobRow,
    logs: JobLogs,
    attempts: list[int],
    attempt: int | None,
    worker: int,
    tail: int | None,
    offset: int | None,
) -> Response:
    workers = await run_in_threadpool(logs.workers, attempt) if attempt else []
    if attempt and worker not in workers:
        numbers = ", ".join(map(str, workers)) or "none yet"
        raise ApiError(
            "log_not_found", f"Attempt {attempt} of job {row.name!r} has no worker {worker}; there are: {numbers}."
        )
    file = logs.file(attempt or 0, worker)
    start = (
        offset if offset is not None else await run_in_threadpool(tail_offset, file, tail) if tail is not None else 0
    )
    read = await run_in_threadpool(page, file, start)
    if "text/plain" in request.headers.get("accept", ""):
        return PlainTextResponse(read.text, headers={"X-Next-Offset": str(read.next_offset)})
    over = not row.live or (attempt is not None and attempt < attempts[-1])
    document = {
        "attempt": attempt,
        "worker": worker,
        "attempts": attempts,
        "workers": workers,
        "text": read.text,
        "offset": read.offset,
        "nextOffset": read.next_offset,
        "complete": over and read.at_end,
    }
    return JSONResponse(document)


def _begin(follower: LogFollower, tail: int | None, last_event_id: str | None) -> None:
    if last_event_id is not None:
        try:
            follower.resume(last_event_id)
        except ValueError:
            raise invalid_parameter(
                "header.Last-Event-ID", "must be an id that a log stream of this job gave out"
            ) from None
    elif tail is not None:
        follower.start_at_tail(tail)


def _is_exhausted(follower: LogFollower, pinned: int | None) -> bool:
    """Return whether the reader of a finished job has everything. A copy of the follower is read, because the follower
    itself has yet to return what is found."""
    probe = LogFollower(follower.logs, follower.attempt, follower.worker)
    probe.offsets = dict(follower.offsets)
    return not probe.lines(final=True) and (pinned is not None or not probe.next_attempt())


async def _follow(
    services: Services, reader: StreamReader, row: JobRow, follower: LogFollower, pinned: bool
) -> AsyncGenerator[str, None]:
    clock = asyncio.get_running_loop().time
    deadline, looked = clock() + services.settings.stream_seconds_max, clock()
    with services.metrics.streams.track_inprogress():
        while not services.hub.closing.is_set() and clock() < deadline and await reader.may_read():
            lines = await run_in_threadpool(follower.lines, False)
            for line in lines:
                yield _frame(line)
            if lines:
                continue
            if follower.attempt is None or await run_in_threadpool(_has_later, follower) or not row.live:
                # The attempt is gone, so what its files hold now is all.
                for line in await run_in_threadpool(follower.lines, True):
                    yield _frame(line)
                if not pinned and await run_in_threadpool(follower.next_attempt):
                    yield sse.frame({"attempt": follower.attempt}, "attempt", follower.position)
                    continue
                if pinned or not row.live:
                    yield sse.frame({"phase": row.phase, "attempt": follower.attempt}, "end", follower.position)
                    return
            await services.hub.wait(row.id, services.settings.stream_poll_seconds)
            if clock() - looked >= _LOOK_SECONDS:
                row, looked = await _look(services, row), clock()


def _has_later(follower: LogFollower) -> bool:
    return any(number > (follower.attempt or 0) for number in follower.logs.attempts())


async def _look(services: Services, row: JobRow) -> JobRow:
    try:
        async with services.database.read() as session:
            return await repository.get(session, row.id) or row
    except ApiError:  # the database is away: the files are not
        return row


def _frame(line: LogLine) -> str:
    return sse.frame({"attempt": line.attempt, "worker": line.worker, "line": line.text}, "log", line.position)
