"""Connections to PostgreSQL: to that server of several which takes writes, and never for long to one that is gone."""

from __future__ import annotations

import select
import socket
import time
from typing import Any

import asyncpg
from sqlalchemy import URL, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from muster.api.core.errors import ApiError, database_unavailable

# No server was found that takes writes: a standby is about to be promoted.
NO_WRITER = asyncpg.exceptions.TargetServerAttributeNotMatched
NO_SERVER = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, NO_WRITER)
_MADE_AT = "muster_made_at"
_USED_AT = "muster_used_at"
# A server that went without a word is found out by asking; one that answered a moment ago is not asked.
PING_AFTER_SECONDS = 5.0
# How long a server that takes no writes is used before its name, or the other names, are tried again. Reads go on
# meanwhile, and with no writer anywhere each connection is made anew this often.
LOOK_FOR_WRITER_SECONDS = 5.0


class DatabaseServers:
    """The servers of one database's URL. `connect` is SQLAlchemy's `async_creator_fn`.

    asyncpg has one time-out for all hosts together: a first one whose machine is silent would take all of it, and the
    second, which was promoted, would never be asked. Here each has its share of the time, and the one that failed last
    comes last.
    """

    def __init__(self, url: URL, timeout_seconds: float) -> None:
        self._url, self._timeout_seconds = url, timeout_seconds
        self._failed_at: dict[tuple[Any, Any], float] = {}

    def engine(self) -> AsyncEngine:
        """An engine with a pool, whose connections are found out when they are dead or take no writes any more."""
        engine = create_async_engine(
            self._url,
            connect_args=self._arguments(),
            pool_size=8,
            max_overflow=8,
            pool_timeout=self._timeout_seconds,
        )
        _watch(engine)
        return engine

    async def connect_alone(self) -> AsyncConnection:
        """A connection outside the pool, for who keeps it."""
        return await create_async_engine(self._url, connect_args=self._arguments(), poolclass=NullPool).connect()

    async def connect(self, *, host: Any = None, port: Any = None, **options: Any) -> Any:
        """Raises what the first server said if none will have it, and NO_WRITER only if all said so."""
        addresses = list(zip(host, port, strict=True)) if isinstance(host, list) else [(host, port)]
        failures: list[Exception] = []
        for address in sorted(addresses, key=lambda each: self._failed_at.get(each, 0.0)):
            seconds = self._timeout_seconds / len(addresses)
            try:
                connection = await asyncpg.connect(host=address[0], port=address[1], timeout=seconds, **options)
            except NO_SERVER as error:
                self._failed_at[address] = time.monotonic()
                failures.append(error)
                continue
            self._failed_at.pop(address, None)
            _end_when_silent(connection, self._timeout_seconds)
            return connection
        raise next((each for each in failures if not isinstance(each, NO_WRITER)), failures[0])

    def _arguments(self) -> dict[str, Any]:
        milliseconds = str(int(self._timeout_seconds * 1000))
        return {
            "async_creator_fn": self.connect,
            "server_settings": {
                "application_name": "muster-api",
                "statement_timeout": milliseconds,
                "lock_timeout": milliseconds,
                "idle_in_transaction_session_timeout": "60000",
            },
        }


def takes_writes(driver: Any) -> bool:
    """Return whether the server takes writes, as it reported with its last reply. Servers before PostgreSQL 14 do not
    report it, and are assumed to."""
    parameters = driver.get_settings()
    return "on" not in (
        getattr(parameters, "in_hot_standby", "off"),
        getattr(parameters, "default_transaction_read_only", "off"),
    )


def read_only() -> ApiError:
    detail = (
        "The database takes no writes: it is a standby, or was made read-only, so nothing was changed. Retry in a "
        "moment; if it stays so, promote a standby or make MUSTER_API_DATABASE_URL name the server that takes writes."
    )
    return database_unavailable(detail)


def _end_when_silent(driver: Any, seconds: float) -> None:
    """Let the kernel end the connection when the other machine acknowledges nothing for so long: by itself TCP waits a
    quarter of an hour for one that lost its power, and for ever where it waits for an answer."""
    there: socket.socket = driver._transport.get_extra_info("socket")
    if there.family not in (socket.AF_INET, socket.AF_INET6):
        return
    there.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", max(1, round(seconds))),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", max(1, round(seconds))),
        ("TCP_USER_TIMEOUT", round(seconds * 1000)),
    ):
        if hasattr(socket, option):  # macOS has some of them
            there.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _has_news(driver: Any) -> bool:
    """Return whether unrequested data has arrived, such as the connection's end, even if the event loop has yet to see
    it."""
    poll = select.poll()
    poll.register(driver._transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _watch(engine: AsyncEngine) -> None:
    @event.listens_for(engine.sync_engine, "checkin")
    def _returned(_connection: Any, record: Any) -> None:
        record.info[_USED_AT] = time.monotonic()

    @event.listens_for(engine.sync_engine, "checkout")
    def _taken(connection: Any, record: Any, _proxy: Any) -> None:
        """Replace a connection that died while nobody used it, or whose server takes no writes any more. pool_pre_ping
        would ask the server, in a transaction of three exchanges, before every use; here it is asked where it has said
        something, or nothing for long."""
        now, driver = time.monotonic(), connection.driver_connection
        made_at = record.info.setdefault(_MADE_AT, now)
        try:
            if driver.is_closed():
                raise DisconnectionError
            if now - record.info.get(_USED_AT, now) > PING_AFTER_SECONDS or _has_news(driver):
                engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise DisconnectionError from error
        if now - made_at > LOOK_FOR_WRITER_SECONDS and not takes_writes(driver):
            raise DisconnectionError
