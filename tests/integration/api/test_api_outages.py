"""The database is locked, gone or slow: a clean refusal, nothing half-done, and the same request works afterwards."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event
from tests.integration.api.platform import Platform, document, platform, until
from tests.integration.api.postgres import PostgresServer

from muster.api.core import background
from muster.api.core.database import postgresql

KEY = {"Idempotency-Key": "one-request"}


async def refused(here: Platform) -> None:
    reply = await here.client.post("/api/v1/jobs", json=document(), headers=KEY)
    assert (reply.status_code, reply.json()["code"]) == (503, "database_unavailable"), reply.text
    assert int(reply.headers["retry-after"]) > 0
    assert "x-should-retry" not in reply.headers
    assert "sqlite" not in reply.text.lower()
    assert "asyncpg" not in reply.text.lower()


async def works_again(here: Platform) -> None:
    """The same request, repeated: one job, told to the cluster once."""

    async def accepted() -> bool:
        return (await here.client.post("/api/v1/jobs", json=document(), headers=KEY)).status_code == 201

    for _ in range(2):
        await until(accepted, "the request to be accepted")
    (job,) = (await here.get("/jobs"))["items"]
    await here.handed_over(job["id"])
    assert await here.events(job["id"]) == ["job.created"]
    assert [found.metadata.uid for found in here.cluster.jobs()] == [job["id"]]


@contextlib.contextmanager
def sqlite_locked(path: Path) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("ROLLBACK")


async def test_sqlite_locked(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", database_timeout_seconds=0.5) as here:
        with sqlite_locked(here.state.database):
            await refused(here)
            assert (await here.get("/jobs"))["items"] == [], "reading goes on"
        await works_again(here)


async def test_sqlite_gone(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", database_timeout_seconds=0.5) as here:
        aside = here.state.database.with_name("aside.db")
        here.state.database.rename(aside)
        await refused(here)
        listed = await here.client.get("/api/v1/jobs")
        assert (listed.status_code, listed.json()["code"]) == (503, "database_unavailable")
        ready = await here.client.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]["database"]["ok"]) == (503, False)
        assert (await here.client.get("/healthz")).status_code == 200
        aside.rename(here.state.database)
        await works_again(here)

        async def ready() -> bool:
            return (await here.client.get("/readyz")).status_code == 200

        await until(ready, "readyz to recover")


async def test_sqlite_replaced_by_something_else(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", database_timeout_seconds=0.5) as here:
        await here.services.database.engine.dispose()
        for path in here.state.root.glob("muster.db*"):
            path.unlink()
        here.state.database.write_bytes(b"not a database, but long enough to be taken for one " * 100)
        listed = await here.client.get("/api/v1/jobs")
        assert (listed.status_code, listed.json()["code"]) == (503, "database_unavailable")


@pytest.fixture
async def on_postgres(tmp_path: Path, postgres: PostgresServer, migrated: str) -> AsyncIterator[tuple[Platform, str]]:
    name = postgres.new_database(migrated)
    url = postgres.url(name)
    async with platform(tmp_path / "state", database_url=url, database_timeout_seconds=5.0) as here:
        yield here, name


@pytest.mark.postgres
async def test_postgresql_locked(on_postgres: tuple[Platform, str], postgres: PostgresServer) -> None:
    import asyncpg

    here, name = on_postgres
    other = await asyncpg.connect(host=str(postgres.folder), user="postgres", database=name)
    transaction = other.transaction()
    await transaction.start()
    await other.execute("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
    await refused(here)
    await transaction.rollback()
    await other.close()
    await works_again(here)


@pytest.mark.postgres
async def test_postgresql_gone(on_postgres: tuple[Platform, str], postgres: PostgresServer) -> None:
    here, name = on_postgres
    postgres.sql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    postgres.sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    await refused(here)
    assert (await here.client.get("/readyz")).status_code == 503
    postgres.sql(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    await works_again(here)


@pytest.mark.postgres
async def test_connections_that_die_while_idle_are_not_noticed(
    on_postgres: tuple[Platform, str], postgres: PostgresServer
) -> None:
    here, name = on_postgres
    await here.get("/jobs")
    postgres.sql(f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = '{name}'")
    assert (await here.get("/jobs"))["items"] == []


@pytest.mark.postgres
async def test_a_server_that_takes_no_writes_any_more_is_left(
    on_postgres: tuple[Platform, str], postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old primary comes back read-only and the API is connected to it again, then its name leads to the new one:
    here both are one server, whose new sessions may write and whose old ones may not."""
    monkeypatch.setattr(postgresql, "LOOK_FOR_WRITER_SECONDS", 0.2)
    monkeypatch.setattr(background, "RETRY_SECONDS_MAX", 0.2)
    here, name = on_postgres
    postgres.sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    postgres.sql(f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = '{name}'")
    await refused(here)
    ready = await here.client.get("/readyz")
    assert (ready.status_code, ready.json()["checks"]["database"]["ok"]) == (503, False)
    assert "takes no writes" in ready.json()["checks"]["database"]["detail"]
    assert (await here.get("/jobs"))["items"] == [], "reading goes on"
    old = f"FROM pg_stat_activity WHERE datname = '{name}' AND backend_start < '{postgres.sql('SELECT now()')}'"
    postgres.sql(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    await works_again(here)

    async def left() -> bool:
        await here.get("/jobs")
        return postgres.sql(f"SELECT count(*) {old} AND query LIKE '%pg_notify%'") == "0"

    await until(left, "it to listen to the new one")


@pytest.mark.postgres
async def test_a_commit_that_is_not_answered_is_told_as_such(
    on_postgres: tuple[Platform, str], postgres: PostgresServer
) -> None:
    """The connection ends as the server is asked to commit. Nobody knows if it did; nobody is told that it did not."""
    here, _ = on_postgres

    def lose(connection: Connection) -> None:
        driver = connection.connection.driver_connection
        assert driver is not None
        postgres.sql(f"SELECT pg_terminate_backend({driver.get_server_pid()}, 10000)")

    engine = here.services.database.engine.sync_engine
    event.listen(engine, "commit", lose)
    try:
        reply = await here.client.post("/api/v1/jobs", json=document(), headers=KEY)
    finally:
        event.remove(engine, "commit", lose)
    assert (reply.status_code, reply.json()["code"]) == (503, "database_unavailable"), reply.text
    assert "before it said whether it keeps the change" in reply.json()["detail"]
    assert "Idempotency-Key" in reply.json()["detail"]
    await works_again(here)


@pytest.mark.both_databases
async def test_a_crash_before_the_commit_stores_nothing(here: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    from muster.api.core import idempotency

    def crash(*_: Any) -> None:
        raise RuntimeError("crash after the job's row, before the checkpoint")

    with monkeypatch.context() as patched:
        patched.setattr(idempotency, "remember", crash)
        reply = await here.client.post("/api/v1/jobs", json=document(), headers=KEY)
        assert (reply.status_code, reply.json()["code"]) == (500, "internal")
    assert (await here.get("/jobs"))["items"] == []
    assert here.cluster.jobs() == []
    await works_again(here)


async def test_background_work_that_fails_shows_and_recovers(here: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    await here.ready()
    real = here.services.relay.step

    async def broken() -> bool:
        raise RuntimeError("the cluster is away")

    monkeypatch.setattr(background, "UNHEALTHY_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(background, "RETRY_SECONDS_MAX", 0.05)
    here.services.relay.step = broken

    async def ready(status: int) -> Any:
        reply = await here.client.get("/readyz")
        return reply.json() if reply.status_code == status else None

    async def relay_alone() -> Any:
        """At first the mirror has yet to catch up."""
        found = await ready(503)
        return found if found and found["checks"]["mirror"]["ok"] else None

    failing = await until(relay_alone, "readyz to fail for the relay")
    assert failing["checks"]["relay"] == {"ok": False, "detail": "RuntimeError: the cluster is away"}
    uid = (await here.submit())["id"]
    here.services.relay.step = real
    await here.handed_over(uid)
    await until(lambda: ready(200), "readyz to recover")
