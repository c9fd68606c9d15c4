"""Bring the database to the newest schema at start; of several processes at once, one does it and the rest wait."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from muster.api.core.database.db import Database

_LOCK = 0x6D757374  # "must": the advisory lock that migrations hold on PostgreSQL
_LOCK_SECONDS_MAX = 60.0


def migrations_folder() -> Path:
    """`migrations/` of a checkout, or the copy inside an installed wheel."""
    here = Path(__file__).resolve()
    for folder in (here.parents[5] / "migrations", here.parents[2] / "_migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise FileNotFoundError("the migrations are missing: this installation of muster-train is not complete")


def alembic_config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    config.attributes["connection"] = connection
    return config


async def migrate(database: Database) -> None:
    """Raises NewerDatabase, the database's own errors, and TimeoutError when another process takes over a minute."""
    if database.file is not None:
        database.file.parent.mkdir(parents=True, exist_ok=True)
        async with (
            _file_lock(database.file.with_name(f"{database.file.name}.migrate")),
            database.engine.begin() as connection,
        ):
            await connection.run_sync(_upgrade)
        return
    async with database.engine.begin() as connection:
        await _advisory_lock(connection)
        await connection.run_sync(_upgrade)


class NewerDatabase(Exception):
    """The database was made by a newer Muster, whose tables this one does not know."""


def _upgrade(connection: Connection) -> None:
    revisions, newest = _revisions()
    there = set(MigrationContext.configure(connection).get_current_heads())
    if unknown := there - revisions:
        raise NewerDatabase(
            f"the database is of a newer Muster (its revision {', '.join(sorted(unknown))} is unknown here): "
            "start that version again, or restore the backup from before it"
        )
    if there != {newest}:
        command.upgrade(alembic_config(connection), "head")


@cache
def _revisions() -> tuple[frozenset[str], str | None]:
    """All revisions that this version knows, and the newest. To find them Alembic loads every file of the history."""
    script = ScriptDirectory.from_config(alembic_config())
    return frozenset(revision.revision for revision in script.walk_revisions()), script.get_current_head()


async def _advisory_lock(connection: AsyncConnection) -> None:
    await connection.execute(text("SET LOCAL statement_timeout = 0"))
    await connection.execute(text(f"SET LOCAL lock_timeout = '{int(_LOCK_SECONDS_MAX)}s'"))
    await connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))


@contextlib.asynccontextmanager
async def _file_lock(path: Path) -> AsyncIterator[None]:
    with _opened(path) as handle:
        deadline = time.monotonic() + _LOCK_SECONDS_MAX
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {_LOCK_SECONDS_MAX:.0f} s") from None
                await asyncio.sleep(0.05)
        yield


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)  # and with it the lock
