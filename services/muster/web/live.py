"""`/live`: notifies an open page that it is out of date. The page then reads itself anew, by the rights of that
moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from fastapi.responses import Response

from muster.web import api
from muster.web.api import ANY_JOB, ApiError, Principal, Services, ServicesDependency, sse
from muster.web.news import NewsBoard, Version
from muster.web.session import Visitor
from muster.web.turns import StreamTurns

router = APIRouter(include_in_schema=False)

# Between two messages. A gang tells of each step; nobody reads faster, and half of it would double what pages cost.
REST_SECONDS = 0.5


@router.get("/live")
async def follow_changes(request: Request, services: ServicesDependency, visitor: Visitor, job: str = "") -> Response:
    """Server-sent events: `changed` when the job, or any job, has news; `ended` when the session has.

    Once its reader may see the job no more, the stream ends with one `changed`: the page then finds nothing there.
    """
    project = (await api.find(services, visitor, job)).project if job else None
    changes = _changes(services, request, visitor, job or ANY_JOB, project)
    return sse.stream(changes, services.settings.stream_ping_seconds, services.streams.one_of(visitor.person))


async def _changes(
    services: Services, request: Request, visitor: Principal, job: str, project: str | None
) -> AsyncGenerator[str, None]:
    clock = asyncio.get_running_loop().time
    news: NewsBoard = request.app.state.news
    turns: StreamTurns = request.app.state.turns
    deadline = clock() + services.settings.stream_seconds_max
    seen: Version | None = None
    with services.metrics.streams.track_inprogress():
        while not services.hub.closing.is_set() and clock() < deadline:
            try:
                reader = await api.as_now(services, request, visitor)
                if reader is None:
                    yield sse.frame({}, "ended")
                    return
                if project is not None and reader.role_in(project) is None:
                    yield sse.frame({}, "changed")
                    return
                now = await news.version(services, job)
            except ApiError:  # the database is away: the page stays as it is, and hears when it is back
                await news.wait(services, job)
                continue
            if now != seen:
                # The first message too: what happened while nobody listened is not on the page.
                seen = now
                await turns.turn()  # what comes meanwhile is told by the next message
                yield sse.frame({}, "changed")
                await asyncio.sleep(REST_SECONDS)
                continue  # what was told meanwhile woke nobody
            await news.wait(services, job)
