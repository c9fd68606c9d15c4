"""The database: short sessions, one commit per request, and one kind of error when it does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
from pydantic_core import from_json
from sqlalchemy import Dialect, Text, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, DisconnectionError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from sqlalchemy.types import TypeDecorator

from muster.api.errors import database_unavailable, disk_full

# What goes wrong while connecting comes from asyncpg as it is: SQLAlchemy wraps only what statements raise. The last
# tells of several hosts that none takes writes now: a standby is about to be promoted.
NO_CONNECTION = (
    PoolTimeoutError,
    TimeoutError,
    ConnectionError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.exceptions.TargetServerAttributeNotMatched,
)
_WRITES = "muster_writes"
_USED_AT = "muster_used_at"
# A server that went without a word is found out by asking; one that answered a moment ago is not asked.
PING_AFTER_SECONDS = 5.0
# The largest submission takes 1 MB, in the log and again in the database. Ten times that would call small disks full.
FREE_BYTES_MIN = 4 << 20


class Json(TypeDecorator[Any]):
    """JSON as ASCII text: the same on SQLite and PostgreSQL, and no character that either of them refuses."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value, separators=(",", ":"))

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        try:
            return from_json(value)  # a third of the time of json's, and most of what a long list costs
        except ValueError:
            return json.loads(value)  # half a surrogate pair, which json takes


class Database:
    """read() and write() open a session each; nothing opens a session inside another, and no task shares one.

    Both raise ApiError database_unavailable when the database is locked, gone or does not answer within the time-out.
    """

    def __init__(self, url: str, timeout_seconds: float) -> None:
        self.url = make_url(url)
        self.timeout_seconds = timeout_seconds
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.file = Path(self.url.database) if self.is_sqlite and self.url.database else None
        self.engine = _sqlite(url, timeout_seconds) if self.is_sqlite else _postgresql(url, timeout_seconds)
        self.sessions = type("Session", (Session,), {})  # a class of this database's own, whose events may be heard
        writing = self.engine.execution_options(**{_WRITES: True})
        # PostgreSQL shows each statement what is committed when it begins, within a transaction or without one: reading
        # without saves its two exchanges. SQLite would read from another moment with each statement.
        reading = self.engine if self.is_sqlite else self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._read = async_sessionmaker(reading, expire_on_commit=False, sync_session_class=self.sessions)
        self._write = async_sessionmaker(writing, expire_on_commit=False, sync_session_class=self.sessions)
        # SQLite has one writer; waiting here is fair and cheap, while waiting inside SQLite is polling.
        self._turn = asyncio.Lock() if self.is_sqlite else None

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        with self._answers():
            async with self._read() as session:
                yield session

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """A session that commits at the end of the block, or rolls back when the block raises."""
        with self._answers():
            async with self._in_turn(), self._write() as session, session.begin():
                yield session

    async def probe(self) -> None:
        """Raises ApiError when the database can't be read or, where that is cheap to find out, not be written."""
        if not self.is_sqlite:
            async with self.read() as session:
                await session.execute(text("SELECT version FROM mirror"))
            return
        # A small write still fits into the log that SQLite has made already when nothing else does.
        if self.file is not None and await asyncio.to_thread(_free_bytes, self.file.parent) < FREE_BYTES_MIN:
            raise disk_full()
        async with self.write() as session:
            await session.execute(text("UPDATE mirror SET version = version"))

    async def connect_alone(self) -> AsyncConnection:
        """A connection to PostgreSQL outside the pool, for who keeps it."""
        assert not self.is_sqlite
        arguments = _postgresql_arguments(self.timeout_seconds)
        return await create_async_engine(self.url, connect_args=arguments, poolclass=NullPool).connect()

    async def close(self) -> None:
        await self.engine.dispose()

    @contextlib.asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        if self._turn is None:
            yield
            return
        async with asyncio.timeout(self.timeout_seconds):
            await self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()

    @contextlib.contextmanager
    def _answers(self) -> Any:
        # An open SQLite file that was deleted takes writes gladly and forgets them.
        if self.file is not None and not self.file.exists():
            raise database_unavailable()
        try:
            yield
        except IntegrityError:
            raise
        except DBAPIError as error:
            if _is_outage(error):
                raise (disk_full() if _is_full(error) else database_unavailable()) from error
            raise
        except NO_CONNECTION as error:
            raise database_unavailable() from error
        except OSError as error:
            if not self.is_sqlite:
                raise database_unavailable() from error
            raise


def _free_bytes(folder: Path) -> int:
    """What is free for this user; plenty where the folder is gone, for then the database says so."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return FREE_BYTES_MIN


def _is_full(error: DBAPIError) -> bool:
    """SQLite's SQLITE_FULL, and PostgreSQL's disk_full."""
    return "disk is full" in str(error.orig) or getattr(error.orig, "sqlstate", None) == "53100"


def _is_outage(error: DBAPIError) -> bool:
    """Locked, gone, full, shutting down: the world's fault. A wrong statement or value is ours, and is a 500."""
    if error.connection_invalidated:
        return True
    state = getattr(error.orig, "sqlstate", None) or getattr(getattr(error.orig, "__cause__", None), "sqlstate", None)
    if state is not None:
        # Class 08 connection, 53 resources, 57 operator intervention, 58 system; 40 lost a race and may be repeated;
        # 25006 a standby; 55P03 lock not available; 42P01 the tables are gone; 3D000 the database is gone; 28 log-in.
        return state[:2] in ("08", "53", "57", "58", "40", "28") or state in ("25006", "55P03", "42P01", "3D000")
    # By name, for a ProgrammingError, which is ours, is a DatabaseError too.
    return type(error).__name__ in ("OperationalError", "InterfaceError", "InternalError", "DatabaseError")


def _sqlite(url: str, timeout_seconds: float) -> AsyncEngine:
    engine = create_async_engine(
        url,
        # isolation_level None: the driver begins nothing by itself; _begin below says when.
        connect_args={"timeout": timeout_seconds, "isolation_level": None},
        pool_size=8,
        max_overflow=8,
        pool_timeout=timeout_seconds,
    )

    @event.listens_for(engine.sync_engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA foreign_keys=ON")
        # FULL: what a reply promised survives a power cut, not only a crash of the process.
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Any) -> None:
        # A writer takes the lock at once: one that reads first and writes later fails at once when another was quicker.
        writes = connection.get_execution_options().get(_WRITES)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _postgresql_arguments(timeout_seconds: float) -> dict[str, Any]:
    milliseconds = str(int(timeout_seconds * 1000))
    return {
        "timeout": timeout_seconds,
        "server_settings": {
            "application_name": "muster-api",
            "statement_timeout": milliseconds,
            "lock_timeout": milliseconds,
            "idle_in_transaction_session_timeout": "60000",
        },
    }


def _has_news(driver: Any) -> bool:
    """Whether something has arrived that nobody asked for, such as the connection's end, also where the event loop has
    yet to see it."""
    poll = select.poll()
    poll.register(driver._transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _postgresql(url: str, timeout_seconds: float) -> AsyncEngine:
    engine = create_async_engine(
        url,
        connect_args=_postgresql_arguments(timeout_seconds),
        pool_size=8,
        max_overflow=8,
        pool_timeout=timeout_seconds,
    )

    @event.listens_for(engine.sync_engine, "checkin")
    def _returned(_connection: Any, record: Any) -> None:
        record.info[_USED_AT] = time.monotonic()

    @event.listens_for(engine.sync_engine, "checkout")
    def _taken(connection: Any, record: Any, _proxy: Any) -> None:
        """Replace a connection that died while nobody used it. pool_pre_ping would ask the server, in a transaction of
        three exchanges, before every use; here it is asked where it has said something, or nothing for long."""
        idle_seconds = time.monotonic() - record.info.get(_USED_AT, time.monotonic())
        try:
            if connection.driver_connection.is_closed():
                raise DisconnectionError
            if idle_seconds > PING_AFTER_SECONDS or _has_news(connection.driver_connection):
                engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise DisconnectionError from error

    return engine
