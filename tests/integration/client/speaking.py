"""Both clients against the API in the test's own process: the one with threads speaks from a thread of its own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import httpx2
from tests.integration.api.platform import BASE, Platform

from muster.client import AsyncMuster, Muster


class Losing(httpx2.AsyncBaseTransport):
    """Carries requests to the app, and loses the answers to the first `lost` posts after the app has acted."""

    def __init__(self, here: Platform, lost: int = 0) -> None:
        self._app = httpx2.ASGITransport(app=here.app)
        self.lost = lost

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        reply = await self._app.handle_async_request(request)
        if request.method == "POST" and self.lost:
            self.lost -= 1
            await reply.aread()
            raise httpx2.ReadError("the connection broke", request=request)
        return reply


class FromThread(httpx2.BaseTransport):
    """The same for a client with threads: what it asks is answered in the loop of the test."""

    def __init__(self, transport: Losing) -> None:
        self._transport, self._loop = transport, asyncio.get_running_loop()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        return asyncio.run_coroutine_threadsafe(self._answer(request), self._loop).result()

    async def _answer(self, request: httpx2.Request) -> httpx2.Response:
        request = httpx2.Request(request.method, request.url, headers=request.headers, content=request.read())
        reply = await self._transport.handle_async_request(request)
        return httpx2.Response(reply.status_code, headers=reply.headers, content=await reply.aread())


class Speaker:
    """`do` and `all` carry out what a test says of a client, whichever it is."""

    def __init__(self, kind: str, here: Platform, lost: int = 0) -> None:
        self.transport = Losing(here, lost)
        self.client: Any = (
            Muster(BASE, transport=FromThread(self.transport))
            if kind == "threads"
            else AsyncMuster(BASE, transport=self.transport)
        )

    @classmethod
    def to(cls, url: str, kind: str) -> Speaker:
        """Over a socket."""
        speaker = cls.__new__(cls)
        speaker.client = Muster(url) if kind == "threads" else AsyncMuster(url)
        return speaker

    async def do(self, method: Callable[..., Any], *words: Any, **named: Any) -> Any:
        """The method's result."""
        if inspect.iscoroutinefunction(method):
            return await method(*words, **named)
        return await asyncio.to_thread(method, *words, **named)

    async def all(self, method: Callable[..., Any], *words: Any, **named: Any) -> list[Any]:
        """All that the method finds."""
        if inspect.isasyncgenfunction(method):
            return [found async for found in method(*words, **named)]

        def found() -> Iterable[Any]:
            return list(method(*words, **named))

        return await asyncio.to_thread(found)
