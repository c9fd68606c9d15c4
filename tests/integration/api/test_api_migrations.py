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
from tests.polling import WAIT_SECONDS_MAX

from muster.api.core.database.db import Database
from muster.api.core.database.migrate import alembic_config, migrate
from muster.api.core.database.tables import Table
from muster.api.core.settings import ApiSettings
from muster.api.tenants.authentication import hash_of
from muster.api.tenants.usage import repository as usage
from muster.plan.usage import HeldNodes


def opened(url: str) -> Database:
    return Database(
        ApiSettings(database_url=url).database, WAIT_SECONDS_MAX
    )  # of six who make the tables at once, five wait


def differences(connection: Connection) -> object:
    # PostgreSQL gives the expression of an index back in its own words; `indexes` compares those.
    def compared(_object: object, name: str | None, kind: str, *_: object) -> bool:
        return (kind, name) != ("index", "ix_jobs_listed")

    options = {"compare_type": True, "compare_server_default": True, "include_object": compared}
    context = MigrationContext.configure(connection, opts=options)
    return compare_metadata(context, Table.metadata)


def indexes(connection: Connection) -> dict[str, tuple[object, ...]]:
    found = inspect(connection)
    return {
        str(index["name"]): (
            table,
            tuple(index["column_names"]),
            tuple(index.get("expressions", ())),
            bool(index["unique"]),
            bool(index.get("dialect_options")),
        )
        for table in found.get_table_names()
        if table != "alembic_version"
        for index in found.get_indexes(table)
    }


@pytest.mark.both_databases
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


@pytest.mark.both_databases
async def test_a_difference_would_be_found(empty_database_url: str) -> None:
    database = opened(empty_database_url)
    await migrate(database)
    async with database.engine.begin() as connection:
        await connection.execute(text("ALTER TABLE tokens DROP COLUMN last_used_at"))
        assert await connection.run_sync(differences) != []
    await database.close()


@pytest.mark.both_databases
async def test_many_starters_migrate_once(empty_database_url: str) -> None:
    databases = [opened(empty_database_url) for _ in range(6)]
    await asyncio.gather(*(migrate(database) for database in databases))
    async with databases[0].engine.connect() as connection:
        versions = (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalars().all()
    assert versions == [ScriptDirectory.from_config(alembic_config()).get_current_head()]
    for database in databases:
        await database.close()


@pytest.mark.both_databases
async def test_a_second_start_finds_everything_in_place(tmp_path: Path, empty_database_url: str) -> None:
    for _ in range(2):
        async with platform(tmp_path / "state", database_url=empty_database_url) as here:
            assert (await here.ready())["checks"]["database"]["ok"]


OLD_ROWS = """
INSERT INTO jobs (id, namespace, name, labels, priority, created_at, live, deleted, spec, spec_version, relayed_version,
  relay_failures, relay_after, phase, status, status_version, last_event) VALUES ('j1', 'team-a', 'old', '{}', 0, 1.0,
  true, false, '{}', 1, 1, 0, 0.0, 'Running', '{"phase": "Running"}', 3, 1);
INSERT INTO events (job_id, number, type, at, body) VALUES ('j1', 1, 'job.created', 1.0, '{"message": "", "data": {}}');
INSERT INTO attempts (job_id, number, body) VALUES
  ('j1', 1, '{"number": 1, "createdAt": 2.0, "endedAt": 9.0, "workers": 2}');
INSERT INTO job_labels (job_seq, key, value) VALUES (1, 'team', 'x');
INSERT INTO idempotency_keys (owner, route, key, body_hash, job_id, reply, created_at)
  VALUES ('11111111-a', 'POST /jobs', 'k', 'h', 'j1', '{}', 4e9)
"""
TOKENS = {"11111111-a": "write", "22222222-b": "read", "33333333-c": "admin"}


@pytest.mark.both_databases
async def test_rows_of_the_first_schema_are_carried_over(tmp_path: Path, empty_database_url: str) -> None:
    """What a token opened it opens still, and no more; jobs keep their history."""
    from alembic import command

    database = opened(empty_database_url)
    if database.file is not None:
        database.file.parent.mkdir(parents=True)
    async with database.engine.begin() as connection:
        await connection.run_sync(lambda sync: command.upgrade(alembic_config(sync), "0001"))
        for statement in OLD_ROWS.split(";"):
            await connection.exec_driver_sql(statement)
        insert = text("INSERT INTO tokens (id, name, hash, scopes, created_at) VALUES (:id, 'n', :hash, :scopes, 1.0)")
        for number, scope in TOKENS.items():
            values = {"id": number, "hash": hash_of(f"muster_{scope}"), "scopes": f'{{"scopes": ["{scope}"]}}'}
            await connection.execute(insert, values)
    await database.close()
    async with platform(tmp_path / "state", database_url=empty_database_url, auth=True) as here:
        seen = {}
        for scope in TOKENS.values():
            headers = {"authorization": f"Bearer muster_{scope}"}

            async def ask(method: str, path: str, headers: dict[str, str] = headers) -> int:
                return (await here.client.request(method, f"/api/v1{path}", headers=headers)).status_code

            listed = (await here.client.get("/api/v1/jobs", headers=headers)).json()["items"]
            assert [(job["name"], job["project"], job["owner"]) for job in listed] == [("old", "default", "admin")]
            seen[scope] = (
                await ask("POST", "/jobs/j1:suspend"),
                await ask("GET", "/tokens"),
                await ask("GET", "/people"),
            )
            assert await ask("GET", "/jobs/j1/events") == 200
        assert seen == {"write": (200, 403, 403), "read": (403, 403, 403), "admin": (200, 200, 200)}
        async with here.services.database.read() as session:
            kept = [
                (await session.execute(text(f"SELECT count(*) FROM {table}"))).scalar_one()
                for table in ("attempts", "job_labels", "idempotency_keys")
            ]
            held = await usage.held_by(session, "default", 0.0, 10.0)
        assert kept == [1, 1, 1]
        assert held == [HeldNodes("j1", "old", "admin", 2.0, 9.0, 2)]


@pytest.mark.both_databases
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
