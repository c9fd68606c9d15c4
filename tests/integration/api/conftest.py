"""Tests that ask for `here` run on PostgreSQL. Those marked `both_databases` run on SQLite, as `muster up` has it, too.

What a statement, a lock or a migration does is a database's affair, and together the marked tests reach each of them;
what the API makes of the answer is the same on both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog
from tests.integration.api.platform import Platform, platform, sqlite_tables
from tests.integration.api.postgres import PostgresServer, postgres_server

from muster.api.core.database.db import Database
from muster.api.core.database.migrate import migrate
from muster.api.core.log import without_secrets
from muster.api.core.settings import ApiSettings


@pytest.fixture(autouse=True, scope="session")
def plain_logs() -> None:
    """As `python -m muster.api` logs; structlog's default draws whole stacks with all their variables."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            without_secrets,
            structlog.processors.JSONRenderer(),
        ]
    )


BACKENDS = [pytest.param("postgresql", marks=pytest.mark.postgres), pytest.param("sqlite")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        both = metafunc.definition.get_closest_marker("both_databases") is not None
        metafunc.parametrize("backend", BACKENDS if both else BACKENDS[:1])


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def migrated(postgres: PostgresServer) -> str:
    """The name of a database with today's tables, to copy from."""
    name = postgres.new_database()

    async def make() -> None:
        database = Database(ApiSettings(database_url=postgres.url(name)).database, 30.0)
        await migrate(database)
        await database.close()

    asyncio.run(make())
    return name


@pytest.fixture
def database_url(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh database with today's tables where that is cheap."""
    if backend == "sqlite":
        (tmp_path / "state").mkdir(mode=0o700)
        (tmp_path / "state" / "muster.db").write_bytes(sqlite_tables())
        return f"sqlite:///{tmp_path}/state/muster.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url(server.new_database(request.getfixturevalue("migrated")))


@pytest.fixture
def empty_database_url(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if backend == "sqlite":
        return f"sqlite:///{tmp_path}/state/muster.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url(server.new_database())


@pytest.fixture
async def here(tmp_path: Path, database_url: str) -> AsyncIterator[Platform]:
    async with platform(tmp_path / "state", database_url=database_url) as running:
        yield running
