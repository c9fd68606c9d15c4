"""The client with threads is written from the one with asyncio, which loses nothing over broken connections."""

import asyncio
import runpy
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx2
import pytest

from muster.client import Unreachable, exchange
from muster.client.address import Server
from muster.client.async_connection import AsyncConnection
from muster.client.exchange import StreamEvent
from muster.client.steps import RequestStep

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(exchange, "PAUSE_SECONDS_MAX", 0.001)


def test_the_client_with_threads_is_written_from_the_other() -> None:
    """Its classes, names of parameters and documentation are the other's, so only one of the two is written."""
    assert runpy.run_path(str(ROOT / "tools" / "generate_client.py"))["main"](["--check"]) == 0


def connection(answer: Callable[[httpx2.Request], httpx2.Response], waits: list[str]) -> AsyncConnection:
    server = Server("http://127.0.0.1:1", "test", "abc")
    return AsyncConnection(server, waiting=waits.append, transport=httpx2.MockTransport(answer))


async def test_a_lost_answer_is_asked_for_again_with_the_same_key() -> None:
    seen: list[tuple[str, str, bytes]] = []
    waits: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append((request.headers["idempotency-key"], request.headers["authorization"], request.content))
        if len(seen) == 1:
            raise httpx2.ReadError("the connection broke")
        if len(seen) == 2:
            return httpx2.Response(503, headers={"retry-after": "0"})
        return httpx2.Response(201, json={"id": 1})

    async with connection(answer, waits) as one:
        assert await one.ask(RequestStep("POST", "jobs", body={"spec": 1}, key="k")) == {"id": 1}
    assert (len(seen), set(seen), waits) == (3, {("k", "Bearer abc", b'{"spec":1}')}, ["the connection broke"])


async def test_what_may_be_done_already_is_not_asked_for_twice() -> None:
    """A gateway's 504 was answered by a second request, also for a token that would be made twice."""
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.path)
        return httpx2.Response(504)

    async with connection(answer, []) as one:
        with pytest.raises(exchange.MusterError, match="status 504"):
            await one.ask(RequestStep("POST", "tokens", repeat=False))
    assert asked == ["/api/v1/tokens"]


async def test_a_broken_stream_goes_on_after_the_last_event() -> None:
    asked: list[str | None] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.headers.get("last-event-id"))
        if len(asked) == 2:
            raise httpx2.ReadTimeout("silence")
        if len(asked) == 3:
            return httpx2.Response(503)
        first = b"id: 1\nevent: log\ndata: {}\n\n: ping\n\nid: 2\nevent: log\ndata: {}\n\n"
        last = b'id: 3\nevent: log\ndata: {}\n\nevent: end\ndata: {"phase": "Failed"}\n\ndata: no\n\n'
        content = first if len(asked) == 1 else last
        return httpx2.Response(200, content=content, headers={"content-type": "text/event-stream"})

    waits: list[str] = []
    async with connection(answer, waits) as one:
        found = [event async for event in one.stream("jobs/x/logs")]
    assert found[:3] == [StreamEvent("log", "{}", "1"), StreamEvent("log", "{}", "2"), StreamEvent("log", "{}", "3")]
    assert (found[3].json(), len(found)) == ({"phase": "Failed"}, 4)
    assert (asked, waits) == ([None, "2", "2", "2"], ["the server closed the stream"])


class Silent(httpx2.AsyncBaseTransport):
    """Answers nothing, and notes whether the request was given up."""

    def __init__(self) -> None:
        self.given_up = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up = True
        raise AssertionError("unreachable: nobody sets the event")


async def test_a_server_that_never_answers_is_said_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "ANSWER_SECONDS_MAX", 0.06)
    monkeypatch.setattr(exchange, "SILENCE_SECONDS", 0.02)
    waits: list[str] = []
    silent = Silent()
    async with AsyncConnection(Server("http://127.0.0.1:1", "test"), waiting=waits.append, transport=silent) as one:
        with pytest.raises(Unreachable, match=r"no answer within 0\.06 s"):
            await one.ask(RequestStep("GET", "jobs"))
    assert (waits, silent.given_up) == (["no answer for 0.02 s"], True)


async def test_what_is_no_muster_is_said() -> None:
    """An error page of a proxy was a traceback of the JSON reader."""
    async with connection(lambda _: httpx2.Response(200, content=b"<html>"), []) as one:
        with pytest.raises(exchange.MusterError, match=r"what answers at http://127\.0\.0\.1:1 is no Muster"):
            await one.ask(RequestStep("GET", "jobs"))
        with pytest.raises(exchange.MusterError, match="no stream of Muster's"):
            await anext(aiter(_events(one)))


async def _events(one: AsyncConnection) -> AsyncIterator[StreamEvent]:
    async for event in one.stream("jobs/x/logs"):
        yield event
