"""Events and logs as they happen, over real sockets: resumed exactly, ended visibly, no connection of the pool held."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from tests.integration.api.platform import Frame, Platform, document, frames, platform, served, until
from tests.integration.api.test_api_callers import for_ever
from tests.polling import WAIT_SECONDS_MAX

from muster.api.__main__ import ApiServer
from muster.api.core.access import StreamReader
from muster.api.core.callers import Principal
from muster.api.core.database.tables import TokenRow
from muster.api.core.errors import ApiError
from muster.api.tenants import authentication
from muster.api.tenants.authentication import CallerAuthentication
from muster.words.status import Phase

STREAM = {"accept": "text/event-stream"}


@pytest.fixture
async def live(tmp_path: Path, database_url: str) -> AsyncIterator[Platform]:
    async with served(tmp_path / "state", database_url=database_url) as (here, _):
        yield here


async def collect(
    here: Platform, path: str, headers: dict[str, str] | None = None, stop_after: int = 10**6
) -> list[Frame]:
    """Frames until the stream ends, or until so many have come; then the connection is cut."""
    found: list[Frame] = []
    async with here.client.stream("GET", f"/api/v1{path}", headers={**STREAM, **(headers or {})}) as reply:
        assert reply.status_code == 200, await reply.aread()
        assert reply.headers["content-type"].startswith("text/event-stream")
        async for frame in frames(reply):
            found.append(frame)
            if len(found) >= stop_after:
                break
    return found


async def test_events_come_as_they_happen_and_end_with_the_job(live: Platform) -> None:
    uid = (await live.submit())["id"]
    await live.handed_over(uid)
    stream = asyncio.create_task(collect(live, f"/jobs/{uid}/events"))
    live.operate(uid, phase=Phase.RUNNING, code="Training", because="trains")
    await live.finish(uid)
    found = await asyncio.wait_for(stream, WAIT_SECONDS_MAX)
    assert [frame.event for frame in found] == ["job.created", "job.running", "job.succeeded", "end"]
    assert [frame.id for frame in found[:3]] == ["1", "2", "3"]
    assert found[1].data["message"] == "trains"
    assert found[-1].data == {"phase": "Succeeded"}


@pytest.mark.both_databases
async def test_a_cut_event_stream_resumes_where_it_was(live: Platform) -> None:
    uid = (await live.submit())["id"]
    await live.handed_over(uid)
    live.operate(uid, phase=Phase.RUNNING, code="Training", because="trains")
    first = await collect(live, f"/jobs/{uid}/events", stop_after=2)
    await live.finish(uid)
    rest = await collect(live, f"/jobs/{uid}/events", {"last-event-id": first[-1].id})
    assert [frame.event for frame in first + rest] == ["job.created", "job.running", "job.succeeded", "end"]
    over = await live.client.get(f"/api/v1/jobs/{uid}/events", headers={**STREAM, "last-event-id": rest[-1].id})
    assert over.status_code == 204, "a browser's EventSource stops at 204"
    wrong = await live.client.get(f"/api/v1/jobs/{uid}/events", headers={**STREAM, "last-event-id": "x"})
    assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid_parameter")


async def test_chosen_types_only(live: Platform) -> None:
    uid = (await live.submit())["id"]
    await live.finish(uid)
    found = await collect(live, f"/jobs/{uid}/events?type=job.succeeded")
    assert [frame.event for frame in found] == ["job.succeeded", "end"]


def write(here: Platform, uid: str, attempt: int, worker: int, text: str) -> None:
    folder = here.state.worker(uid, attempt, worker)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("a") as file:
        file.write(text)


async def open_streams(here: Platform, number: int) -> None:
    async def counted() -> bool:
        return f"muster_api_streams {number}.0" in (await here.client.get("/metrics")).text

    await until(counted, f"{number} open streams")


def lines(found: list[Frame]) -> list[str]:
    return [frame.data["line"] for frame in found if frame.event == "log"]


async def test_logs_are_followed_through_the_attempts(live: Platform) -> None:
    uid = (await live.submit())["id"]
    await live.handed_over(uid)
    write(live, uid, 1, 0, "one\ntwo\nhalf")
    async with live.client.stream("GET", f"/api/v1/jobs/{uid}/logs", headers=STREAM) as reply:
        coming = frames(reply)
        found = [await anext(coming), await anext(coming)]
        write(live, uid, 1, 0, " and half")
        write(live, uid, 2, 0, "three\n")
        found.append(await anext(coming))
        write(live, uid, 2, 0, "the end")
        await live.finish(uid)
        found += [frame async for frame in coming]
    assert lines(found) == ["one", "two", "half and half", "three", "the end"]
    assert [frame.event for frame in found] == ["log", "log", "log", "attempt", "log", "log", "end"]
    assert [frame.data["attempt"] for frame in found] == [1, 1, 1, 2, 2, 2, 2]


async def test_a_cut_log_stream_loses_and_repeats_nothing(live: Platform) -> None:
    uid = (await live.submit())["id"]
    await live.handed_over(uid)
    for worker in (0, 1):
        for attempt in (1, 2):
            write(live, uid, attempt, worker, "".join(f"{attempt}.{worker}.{n} größer\n" for n in range(20)))
    await live.finish(uid)
    whole = await collect(live, f"/jobs/{uid}/logs?worker=all&attempt=1")
    assert len(lines(whole)) == 40
    found: list[Frame] = []
    while not found or found[-1].event != "end":
        headers = {"last-event-id": found[-1].id} if found else {}
        found += await collect(live, f"/jobs/{uid}/logs?worker=all&attempt=1", headers, stop_after=7)
    assert [(frame.event, frame.data, frame.id) for frame in found] == [(f.event, f.data, f.id) for f in whole]
    over = await live.client.get(f"/api/v1/jobs/{uid}/logs", headers={**STREAM, "last-event-id": found[-1].id})
    assert over.status_code == 200, "worker 0 of attempt 2 is still to be told"
    both = await collect(live, f"/jobs/{uid}/logs?worker=all", {"last-event-id": whole[-1].id})
    assert len(lines(both)) == 40
    assert {frame.data["attempt"] for frame in both if frame.event == "log"} == {2}


async def test_tail_and_pinned_attempt(live: Platform) -> None:
    uid = (await live.submit())["id"]
    await live.handed_over(uid)
    write(live, uid, 1, 0, "".join(f"{n}\n" for n in range(100)))
    write(live, uid, 2, 0, "later\n")
    pinned = await collect(live, f"/jobs/{uid}/logs?attempt=1&tail=2")
    assert (lines(pinned), pinned[-1].event) == (["98", "99"], "end"), "an attempt that is over ends its stream"


async def test_a_line_without_end_comes_in_pieces(live: Platform) -> None:
    uid = (await live.submit())["id"]
    write(live, uid, 1, 0, "x" * 1_000_000)
    await live.finish(uid)
    found = await collect(live, f"/jobs/{uid}/logs")
    assert "".join(lines(found)) == "x" * 1_000_000


async def test_fifty_streams_leave_the_pool_to_others(live: Platform) -> None:
    uid = (await live.submit())["id"]
    await live.handed_over(uid)
    streams = [
        asyncio.create_task(collect(live, f"/jobs/{uid}/{what}")) for what in ("events", "logs") for _ in range(25)
    ]
    await open_streams(live, 50)
    await asyncio.gather(*(live.submit(f"other-{n}") for n in range(20)))
    await live.finish(uid)
    ends = await asyncio.wait_for(asyncio.gather(*streams), WAIT_SECONDS_MAX)
    assert {found[-1].event for found in ends} == {"end"}


async def test_a_person_has_so_many_streams_and_no_more(tmp_path: Path) -> None:
    """Each asks the database every few seconds: three thousand of one person left others no connection to it."""
    async with served(tmp_path / "state", streams_per_person_max=2) as (here, _):
        uid = (await here.submit())["id"]
        await here.handed_over(uid)
        events, logs = f"/jobs/{uid}/events", f"/jobs/{uid}/logs"
        streams = [asyncio.create_task(collect(here, path)) for path in (events, logs)]
        await open_streams(here, 2)
        for path in (events, logs):
            refused = await here.client.get(f"/api/v1{path}", headers=STREAM)
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams"), path
            assert "MUSTER_API_STREAMS_PER_PERSON_MAX" in refused.json()["detail"]
            assert refused.headers["retry-after"]
            assert (await here.client.get(f"/api/v1{path}")).status_code in (200, 404), "a list is no stream"
        await here.finish(uid)
        await asyncio.wait_for(asyncio.gather(*streams), WAIT_SECONDS_MAX)
        assert (await collect(here, events))[-1].event == "end", "there is room again"


async def test_the_streams_of_a_reader_ask_together_who_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    async def counted(*arguments: Any) -> Principal | None:
        looks.append(arguments)
        return await look_up(*arguments)

    look_up = authentication._look_up
    async with platform(tmp_path / "state", auth=True) as here:
        token = here.state.admin_token.read_text().strip()
        services = here.services
        async with services.database.read() as session:
            caller = await look_up(session, TokenRow.hash == authentication.hash_of(token))
        assert caller is not None
        monkeypatch.setattr(authentication, "_look_up", counted)
        for_ever(here)
        readers = [StreamReader(services, caller, "default") for _ in range(300)]
        assert all(await asyncio.gather(*(reader.may_read() for reader in readers)))
        assert len(looks) == 1
        services[CallerAuthentication].callers.forget()
        assert all(await asyncio.gather(*(reader.may_read() for reader in readers)))
        assert len(looks) == 2, "what has changed is looked at anew"


async def test_who_gets_no_connection_hears_that_the_api_is_busy(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", database_timeout_seconds=0.2) as here:
        await here.services.background.stop()  # whose turn might be now
        database = here.services.database

        async def take_all() -> None:
            async with contextlib.AsyncExitStack() as held:
                for _ in range(100):
                    session = await held.enter_async_context(database.read())
                    await session.execute(text("SELECT 1"))

        with pytest.raises(ApiError, match="The API is busy: no connection to the database came free"):
            await take_all()
        async with database.write():
            with pytest.raises(ApiError, match="The API is busy: no turn to change the database came free"):
                async with database.write():
                    pass


async def test_streams_end_when_the_process_is_asked_to(tmp_path: Path) -> None:
    async with served(tmp_path / "state", grace_seconds=300) as (here, server):
        uid = (await here.submit())["id"]
        stream = asyncio.create_task(collect(here, f"/jobs/{uid}/events"))
        await open_streams(here, 1)
        server.end()
        found = await asyncio.wait_for(stream, WAIT_SECONDS_MAX)  # not only when the grace is over
        assert "end" not in {frame.event for frame in found}, "the job goes on: the reader is to come again"


async def test_a_silent_stream_pings(tmp_path: Path) -> None:
    async with served(tmp_path / "state", stream_ping_seconds=0.05) as (here, _):
        uid = (await here.submit())["id"]
        pings = 0
        async with here.client.stream("GET", f"/api/v1/jobs/{uid}/events", headers=STREAM) as reply:
            async for line in reply.aiter_lines():
                pings += line == ": ping"
                if pings == 3:
                    break
        assert pings == 3


async def test_a_stream_outlives_an_outage_of_the_database(tmp_path: Path) -> None:
    async with served(tmp_path / "state", database_timeout_seconds=3.0) as (here, _):
        uid = (await here.submit())["id"]
        await here.handed_over(uid)
        stream = asyncio.create_task(collect(here, f"/jobs/{uid}/events"))
        await open_streams(here, 1)
        aside = here.state.database.with_name("aside.db")
        here.state.database.rename(aside)
        assert (await here.client.get("/readyz")).status_code == 503
        aside.rename(here.state.database)
        await here.finish(uid)
        found = await asyncio.wait_for(stream, WAIT_SECONDS_MAX)  # not only when the grace is over
        assert [frame.event for frame in found] == ["job.created", "job.succeeded", "end"]


async def test_a_body_of_fifty_megabytes_is_refused_and_the_sender_hears_why(tmp_path: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b" " * 1_000_000

    async with served(tmp_path / "state") as (here, server):
        assert isinstance(server, ApiServer)
        headers = {"content-type": "application/json"}
        for content in (chunks(), b" " * 50_000_000):
            reply = await here.client.post("/api/v1/jobs", content=content, headers=headers)
            assert (reply.status_code, reply.json()["code"]) == (413, "body_too_large")
        assert (await here.client.post("/api/v1/jobs", json=document())).status_code == 201
