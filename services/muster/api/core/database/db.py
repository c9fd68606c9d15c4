"""The database: short sessions, one commit per request, and one kind of error when it does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json
from sqlalchemy import Dialect, Text, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.types import TypeDecorator

from muster.api.core.database.postgresql import NO_SERVER, NO_WRITER, DatabaseServers, read_only
from muster.api.core.errors import ApiError, commit_unanswered, database_busy, database_unavailable, disk_full

# What goes wrong while connecting comes from asyncpg as it is: SQLAlchemy wraps only what statements raise.
NO_CONNECTION = (PoolTimeoutError, *NO_SERVER)
_WRITES = "muster_writes"
_READ_ONLY = "25006"  # what PostgreSQL answers to a write where it takes none
_PROBE = text("SELECT current_setting('transaction_read_only'), (SELECT max(version) FROM mirror)")
# The largest submission takes 1 MB, in the log and again in the database. Ten times that would call small disks full.
FREE_BYTES_MIN = 4 << 20


# A race is lost to a row that is there from then on: a second one needs that row to be deleted in between.
RACES_MAX = 3
T = TypeVar("T")


class JsonText(TypeDecorator[Any]):
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
        self._servers = DatabaseServers(self.url, timeout_seconds)
        self.engine = _sqlite(url, timeout_seconds) if self.is_sqlite else self._servers.engine()
        self.sessions = type("Session", (Session,), {})  # a class of this database's own, whose events may be heard
        self.session_info: dict[str, Any] = {}  # what each session carries as its `info`
        writing = self.engine.execution_options(**{_WRITES: True})
        # PostgreSQL shows each statement what is committed when it begins, within a transaction or without one: reading
        # without saves its two exchanges. SQLite would read from another moment with each statement.
        reading = self.engine if self.is_sqlite else self.engine.execution_options(isolation_level="AUTOCOMMIT")
        options: dict[str, Any] = {
            "expire_on_commit": False,
            "sync_session_class": self.sessions,
            "info": self.session_info,
        }
        self._read = async_sessionmaker(reading, **options)
        self._write = async_sessionmaker(writing, **options)
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
        committing = False
        try:
            with self._answers():
                async with self._in_turn(), self._write() as session, session.begin():
                    yield session
                    committing = True
        except ApiError as error:
            cause = error.__cause__
            if committing and isinstance(cause, DBAPIError) and cause.connection_invalidated:
                raise commit_unanswered() from cause
            raise

    async def write_once(self, work: Callable[[AsyncSession], Awaitable[T]]) -> T:
        """Do `work`, which looks whether a row is there and makes it if not, in a session that commits.

        Of two requests that find the same row missing, one makes it and the other's insert fails: that one begins anew,
        and finds the row. `work` may therefore run several times.
        """
        for _ in range(RACES_MAX):
            with contextlib.suppress(IntegrityError):
                async with self.write() as session:
                    return await work(session)
        async with self.write() as session:
            return await work(session)

    async def probe(self) -> None:
        """Raises ApiError when the database can't be read or, where that is cheap to find out, not be written."""
        if not self.is_sqlite:
            async with self.read() as session:
                if (await session.execute(_PROBE)).one()[0] == "on":
                    raise read_only()
            return
        # A small write still fits into the log that SQLite has made already when nothing else does.
        if self.file is not None and await asyncio.to_thread(_free_bytes, self.file.parent) < FREE_BYTES_MIN:
            raise disk_full()
        async with self.write() as session:
            await session.execute(text("UPDATE mirror SET version = version"))

    async def connect_alone(self) -> AsyncConnection:
        """A connection to PostgreSQL outside the pool, for who keeps it."""
        assert not self.is_sqlite
        return await self._servers.connect_alone()

    async def close(self) -> None:
        await self.engine.dispose()

    @contextlib.asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        if self._turn is None:
            yield
            return
        try:
            async with asyncio.timeout(self.timeout_seconds):
                await self._turn.acquire()
        except TimeoutError:
            raise database_busy(self.timeout_seconds, "turn to change the database") from None
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
                raise _outage(error) from error
            raise
        except NO_WRITER as error:
            raise read_only() from error
        except PoolTimeoutError as error:
            raise database_busy(self.timeout_seconds) from error
        except NO_SERVER as error:
            raise database_unavailable() from error
        except OSError as error:
            if not self.is_sqlite:
                raise database_unavailable() from error
            raise


def _free_bytes(folder: Path) -> int:
    """Return the free bytes for this user. If the folder is gone, return enough to pass, because the database reports
    that itself."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return FREE_BYTES_MIN


def _outage(error: DBAPIError) -> ApiError:
    if getattr(error.orig, "sqlstate", None) == _READ_ONLY:
        return read_only()
    return disk_full() if _is_full(error) else database_unavailable()


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
        # 55P03 lock not available; 42P01 the tables are gone; 3D000 the database is gone; 28 log-in.
        return state[:2] in ("08", "53", "57", "58", "40", "28") or state in (_READ_ONLY, "55P03", "42P01", "3D000")
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
