"""Server-sent events (WHATWG HTML, 9.2): small frames, a ping against silent proxies, an end that readers can see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

MEDIA_TYPE = "text/event-stream"
PING = ": ping\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def frame(data: Any, event: str, identity: str | None = None) -> str:
    """Return the frame of one event. The data is JSON on one line."""
    lines = [f"id: {identity}"] if identity is not None else []
    lines += [f"event: {event}", f"data: {json.dumps(data, separators=(',', ':'), ensure_ascii=False)}"]
    return "\n".join(lines) + "\n\n"


def wants_stream(request: Request, follow: bool) -> bool:
    """Return whether the caller asks for a stream: by `Accept: text/event-stream` or by `?follow=true`."""
    return follow or MEDIA_TYPE in request.headers.get("accept", "")


def stream(
    frames: AsyncGenerator[str, None], ping_seconds: float, room: AbstractContextManager[None] | None = None
) -> StreamingResponse:
    """Response that streams these frames. It holds `room` while it is sent, and is a refusal where that raises."""
    return _EventResponse(
        room or nullcontext(), _with_pings(frames, ping_seconds), media_type=MEDIA_TYPE, headers=_HEADERS
    )


class _EventResponse(StreamingResponse):
    def __init__(self, room: AbstractContextManager[None], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Here, and not where the answer is made: one that is never sent would keep its room for ever.
        with self._room:
            await super().__call__(scope, receive, send)


async def _with_pings(frames: AsyncGenerator[str, None], ping_seconds: float) -> AsyncIterator[str]:
    yield PING  # sends the headers at once
    pending: asyncio.Future[str] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(frames))
            done, _ = await asyncio.wait({pending}, timeout=ping_seconds)
            if not done:
                yield PING
                continue
            try:
                text = pending.result()
            except StopAsyncIteration:
                return
            finally:
                pending = None
            yield text
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await frames.aclose()
