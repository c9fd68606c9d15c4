"""PostgreSQL's NOTIFY between API processes: the news of one wake the streams of all.

Ids go out after the commit, outside the requests and many at a time: within the transaction, PostgreSQL would order all
commits of the database by one lock (PreCommit_Notify in its async.c). A process that is killed in between notifies
nobody, so streams still look by themselves now and then.
"""

from __future__ import annotations

import itertools
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from muster.api.core.background import BackgroundWork
from muster.api.core.database.db import NO_CONNECTION, Database
from muster.api.core.database.postgresql import takes_writes
from muster.api.core.errors import database_unavailable
from muster.api.core.hub import NotificationHub

log = structlog.get_logger("muster.api.notifications")

CHANNEL = "muster_jobs"
PROBE_SECONDS = 5.0  # how soon a connection that died without a word is found out
NOTIFY_SECONDS_MIN = 0.02  # the ids of a burst go out together
BATCH = 500
_NOTIFY = "SELECT count(pg_notify($1, id)) FROM unnest($2::text[]) AS id"


class NotificationChannel:
    """One connection, outside the pool, that listens and notifies; it is replaced when it is lost."""

    def __init__(self, database: Database, hub: NotificationHub) -> None:
        self._database, self._hub = database, hub
        self._connection: AsyncConnection | None = None
        self._driver: Any = None  # asyncpg's connection in it
        self._untold = hub.untold = set()
        # Not needed: behind a pooler that knows no LISTEN, streams ask as often as they do on SQLite.
        self.work = BackgroundWork(
            "notifications", self.step, PROBE_SECONDS, NOTIFY_SECONDS_MIN, wake=hub.has_untold, needed=False
        )

    async def step(self) -> bool:
        """Tell one batch, which also tries the connection; True when there are more."""
        batch = list(itertools.islice(self._untold, BATCH))
        self._untold.difference_update(batch)
        try:
            if self._driver is None or self._driver.is_closed() or not takes_writes(self._driver):
                await self._connect()
            await self._driver.fetchval(_NOTIFY, CHANNEL, batch, timeout=self._database.timeout_seconds)
        except (SQLAlchemyError, OSError, *NO_CONNECTION) as error:
            self._untold.update(batch)
            await self.close()
            raise database_unavailable() from error
        return bool(self._untold)

    async def close(self) -> None:
        self._hub.heard = False
        if self._connection is not None:
            self._driver.terminate()  # whoever does not answer is not waited for
            await self._connection.close()
            self._connection = None

    async def _connect(self) -> None:
        await self.close()
        self._connection = await self._database.connect_alone()
        self._driver = (await self._connection.get_raw_connection()).driver_connection
        self._driver.add_termination_listener(self._lost)
        await self._driver.add_listener(CHANNEL, self._on_notify)
        self._hub.heard = True
        self._hub.wake_all()  # what was told while nobody listened
        log.info("hears of other processes' news")

    def _on_notify(self, driver: Any, pid: int, _channel: str, job_id: str) -> None:
        if pid != driver.get_server_pid():
            self._hub.wake(job_id)

    def _lost(self, _driver: Any) -> None:
        self._hub.heard = False
        self._hub.wake_all()  # from now on they ask more often
        self._hub.has_untold.set()
