"""The API's answers as plain JSON, over HTTP with asyncio: what `AsyncMuster` stands on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeVar

import httpx2

from muster.client.address import Server
from muster.client.exchange import (
    PATIENCE_SECONDS,
    ExchangeReply,
    NextEvent,
    OpenStep,
    RequestExchange,
    SendStep,
    StreamEvent,
    TooSlow,
)
from muster.client.steps import RequestStep, Steps, run_async, walk_async
from muster.client.wire import address, client_options, event_of, meant, reply_of, request_options, silence

T = TypeVar("T")


class AsyncConnection:
    """One server. Use as an asynchronous context manager, or close it. Every method raises MusterError."""

    def __init__(
        self,
        server: Server,
        patience_seconds: float = PATIENCE_SECONDS,
        waiting: Callable[[str], None] = lambda _: None,
        transport: Any = None,
    ) -> None:
        """`waiting` is called with the reason, once for each time that the server has to be waited for."""
        self.server = server
        self.exchange = RequestExchange(server, patience_seconds, waiting)
        self._http = httpx2.AsyncClient(**client_options(server, transport))

    async def __aenter__(self) -> AsyncConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, ask: RequestStep) -> Any:
        """The answer's JSON, after as many tries as patience allows."""
        return await run_async(self.exchange.answer(ask), self._send)

    async def stream(self, path: str, last_id: str = "", **params: Any) -> AsyncIterator[StreamEvent]:
        """Server-sent events until the server says `end`, over broken connections by Last-Event-ID."""
        stream = _EventStream(self._http, self.token)
        try:
            async for event in walk_async(
                self.exchange.events(RequestStep("GET", path, params), last_id), stream.answer_to
            ):
                yield event
        finally:
            await stream.close()

    async def run(self, steps: Steps[T]) -> T:
        return await run_async(steps, self.ask)

    def walk(self, steps: Steps[Any]) -> AsyncGenerator[Any, None]:
        return walk_async(steps, self.ask)

    async def token(self) -> str | None:
        """Return the token. If a sign-in may have to be renewed, it is renewed in a thread, because that calls the
        provider."""
        signed_in = self.server.signed_in
        return await asyncio.to_thread(self.exchange.token) if signed_in else self.exchange.token()

    async def _send(self, send: SendStep) -> ExchangeReply:
        request = asyncio.ensure_future(self._request(send))
        try:
            await asyncio.wait({request}, timeout=min(send.seconds_max, send.silence_seconds))
            if not request.done() and send.seconds_max > send.silence_seconds:
                self.exchange.waiting(f"no answer for {send.silence_seconds:g} s")
                await asyncio.wait({request}, timeout=send.seconds_max - send.silence_seconds)
            if not request.done():
                raise TooSlow
            return await request
        finally:
            if not request.done():  # too slow, or whoever asked is cancelled
                request.cancel()
                await asyncio.wait({request})

    async def _request(self, send: SendStep) -> ExchangeReply:
        try:
            options = request_options(send.ask, send.headers, await self.token())
            response = await self._http.request(send.ask.method, address(send.ask), **options)
        except httpx2.HTTPError as error:
            raise meant(error) from None
        return reply_of(response, response.content)


class _EventStream:
    """Connection to at most one open stream of server-sent events."""

    def __init__(self, http: httpx2.AsyncClient, token: Callable[[], Any]) -> None:
        self._http, self._token = http, token
        self._response: httpx2.Response | None = None
        self._events: AsyncIterator[httpx2.ServerSentEvent] | None = None

    async def answer_to(self, step: OpenStep | NextEvent) -> ExchangeReply | StreamEvent | None:
        try:
            if isinstance(step, OpenStep):
                return await self._open(step)
            assert self._events is not None, "an event is asked for once a stream is open"
            return event_of(await anext(self._events, None))
        except httpx2.HTTPError as error:
            raise meant(error) from None

    async def _open(self, order: OpenStep) -> ExchangeReply:
        await self.close()
        options = request_options(order.ask, order.headers, await self._token())
        request = self._http.build_request(order.ask.method, address(order.ask), timeout=silence(order), **options)
        self._response = response = await self._http.send(request, stream=True)
        self._events = aiter(httpx2.EventSource(response))
        return reply_of(response, b"" if response.is_success else await response.aread())

    async def close(self) -> None:
        if self._response is not None:
            with contextlib.suppress(httpx2.HTTPError):
                await self._response.aclose()
