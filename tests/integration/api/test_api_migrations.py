"""The tables in code and the tables that the migrations make are the same, on both databases."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text
from tests.integration.api.platform import platform

from muster.api.db import Database
from muster.api.migrate import alembic_config, migrate
from muster.api.settings import Settings
from muster.api.tables import Table


def opened(url: str) -> Database:
    return Database(Settings(database_url=url).database, 10.0)


def differences(connection: Connection) -> object:
    context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
    return compare_metadata(context, Table.metadata)


def indexes(connection: Connection) -> dict[str, tuple[object, ...]]:
    found = inspect(connection)
    return {
        str(index["name"]): (
            table,
            tuple(index["column_names"]),
            bool(index["unique"]),
            bool(index.get("dialect_options")),
        )
        for table in found.get_table_names()
        if table != "alembic_version"
        for index in found.get_indexes(table)
    }


async def test_migrations_make_what_the_code_expects(empty_database_url: str) -> None:
    database = opened(empty_database_url)
    await migrate(database)
    async with database.engine.begin() as connection:
        assert await connection.run_sync(differences) == []
        migrated = await connection.run_sync(indexes)
        # Autogenerate looks at names and columns only; the conditions of partial indexes decide who may have a name.
        await connection.run_sync(Table.metadata.drop_all)
        await connection.run_sync(Table.metadata.create_all)
        assert await connection.run_sync(indexes) == migrated
    await database.close()


async def test_a_difference_would_be_found(empty_database_url: str) -> None:
    database = opened(empty_database_url)
    await migrate(database)
    async with database.engine.begin() as connection:
        await connection.execute(text("ALTER TABLE tokens DROP COLUMN last_used_at"))
        assert await connection.run_sync(differences) != []
    await database.close()


async def test_many_starters_migrate_once(empty_database_url: str) -> None:
    databases = [opened(empty_database_url) for _ in range(6)]
    await asyncio.gather(*(migrate(database) for database in databases))
    async with databases[0].engine.connect() as connection:
        versions = (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalars().all()
    assert versions == [ScriptDirectory.from_config(alembic_config()).get_current_head()]
    for database in databases:
        await database.close()


async def test_a_second_start_finds_everything_in_place(tmp_path: Path, empty_database_url: str) -> None:
    for _ in range(2):
        async with platform(tmp_path / "state", database_url=empty_database_url) as here:
            assert (await here.client.get("/readyz")).status_code == 200


@pytest.mark.parametrize("revision", ["base"])
async def test_migrations_go_back_too(empty_database_url: str, revision: str) -> None:
    from alembic import command

    database = opened(empty_database_url)
    await migrate(database)
    async with database.engine.begin() as connection:
        await connection.run_sync(lambda sync: command.downgrade(alembic_config(sync), revision))
        tables = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
    assert tables == ["alembic_version"]
    await database.close()
