"""What one API process writes wakes the streams of another, by PostgreSQL's NOTIFY."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.integration.api.platform import Frame, Platform, frames, served, until
from tests.integration.api.postgres import PostgresServer
from tests.polling import WAIT_SECONDS_MAX

from muster.api.core import hub
from muster.words.status import Phase

pytestmark = pytest.mark.postgres
_FAR_SECONDS = 3_600.0  # longer than any test may take: what comes was told


@pytest.fixture
async def pair(
    tmp_path: Path, postgres: PostgresServer, migrated: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Platform, Platform]]:
    """Two replicas that hear each other and never ask; only the first one reads what the cluster has."""
    monkeypatch.setattr(hub, "POLL_SECONDS_NOTIFIED", _FAR_SECONDS)
    monkeypatch.setattr(hub, "POLL_SECONDS", _FAR_SECONDS)
    url = postgres.url(postgres.new_database(migrated))
    async with (
        served(tmp_path / "state", database_url=url) as (first, _),
        served(tmp_path / "state", database_url=url, mirror_seconds=_FAR_SECONDS, relay_seconds=_FAR_SECONDS) as (
            second,
            _,
        ),
    ):
        await hear(first, second)
        yield first, second


async def hear(*replicas: Platform) -> None:
    async def all_hear() -> bool:
        return all(replica.services.hub.heard for replica in replicas)

    await until(all_hear, "replicas that hear each other")


@contextlib.asynccontextmanager
async def followed(replica: Platform, uid: str) -> AsyncIterator[AsyncIterator[Frame]]:
    async with replica.client.stream("GET", f"/api/v1/jobs/{uid}/events", params={"follow": "true"}) as reply:
        assert reply.status_code == 200
        yield frames(reply)


async def event(stream: AsyncIterator[Frame], kind: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        assert (await anext(stream)).event == kind


async def test_an_event_written_by_one_replica_reaches_a_stream_of_the_other(pair: tuple[Platform, Platform]) -> None:
    first, second = pair
    uid = (await first.submit())["id"]
    await first.handed_over(uid)
    async with followed(second, uid) as stream:
        await event(stream, "job.created")
        first.operate(uid, phase=Phase.RUNNING, code="Training", because="trains")
        await event(stream, "job.running")
        await first.finish(uid)
        await event(stream, "job.succeeded")
        await event(stream, "end")


async def test_replicas_whose_connections_are_cut_hear_each_other_again(pair: tuple[Platform, Platform]) -> None:
    """As when PostgreSQL fails over. What was written before they hear again is looked up when they do."""
    first, second = pair
    uid = (await first.submit())["id"]
    await first.handed_over(uid)
    async with followed(second, uid) as stream:
        await event(stream, "job.created")
        async with second.services.database.read() as session:
            cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            ours = "datname = current_database() AND pid <> pg_backend_pid()"
            await session.execute(text(f"{cut} WHERE {ours}"))
        first.operate(uid, phase=Phase.RUNNING, code="Training", because="trains")
        await event(stream, "job.running")
        await hear(first, second)
        await first.finish(uid)
        await event(stream, "job.succeeded")


async def test_news_that_come_while_a_stream_reads_end_its_next_wait() -> None:
    there = hub.NotificationHub()
    with there.following("job") as news:
        there.tell("job")  # between its read and its wait
        waiting = asyncio.create_task(news.wait(_FAR_SECONDS))
        assert await asyncio.wait({waiting}, timeout=WAIT_SECONDS_MAX) == ({waiting}, set())
