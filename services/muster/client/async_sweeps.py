"""Sweeps, whose steps are in `sweep_operations`, for programs with asyncio."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from muster.client import operations, sweep_operations
from muster.client.answers import parsed
from muster.client.async_connection import AsyncConnection
from muster.client.documents import JobSource, job_document
from muster.client.errors import MusterError
from muster.client.sweep_view import SweepView
from muster.replies.sweeps import SweepSummary


class AsyncSweep(SweepView):
    """One sweep. What it shows is as of when it was last asked for; every method that asks raises MusterError."""

    def __init__(self, connection: AsyncConnection, document: Mapping[str, Any]) -> None:
        super().__init__(document)
        self._connection = connection

    async def refresh(self) -> AsyncSweep:
        """Ask for the sweep as it is now; returns this very sweep."""
        self.document = await self._connection.run(operations.ask("GET", f"sweeps/{self.id}"))
        return self

    async def wait(self, timeout_seconds: float | None = None) -> AsyncSweep:
        """Wait until every trial has ended, at most so many seconds; returns this very sweep. Raises WaitTimeout."""
        self.document = await self._connection.run(sweep_operations.wait(self.id, timeout_seconds))
        return self

    async def cancel(self) -> AsyncSweep:
        """Start no more trials and cancel those that run. Returns this very sweep, which ends a little later."""
        self.document = await self._connection.run(operations.ask("POST", f"sweeps/{self.id}:cancel"))
        return self


class AsyncSweeps:
    """The sweeps of one server. Every method raises MusterError."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def create(
        self, sweep: JobSource, *, name: str | None = None, project: str | None = None, key: str | None = None
    ) -> AsyncSweep:
        """Create a sweep: a mapping, YAML text or the path of a file, that of a job with `sweep:` above its spec.

        It is sent again after a lost answer, under one idempotency key, so that one call makes one sweep.
        """
        sent = job_document(sweep, name, project, self._connection.server.local)
        try:
            document = await self._connection.run(sweep_operations.create(sent.data, key or str(uuid.uuid4())))
        except MusterError as error:
            raise sent.located(error) from None
        return AsyncSweep(self._connection, document)

    async def get(self, name: str) -> AsyncSweep:
        """The newest sweep of that name, or the one of that id. Raises NotFound."""
        return AsyncSweep(self._connection, await self._connection.run(sweep_operations.get(name)))

    async def list(
        self, *, limit: int | None = None, project: str | None = None, name: str | None = None, live: bool | None = None
    ) -> AsyncIterator[SweepSummary]:
        """The newest sweeps, all or so many, newest first. Filters combine."""
        filters = {"project": project, "name": name, "live": live}
        async for page in self._connection.walk(operations.pages(limit, filters, "sweeps")):
            for line in page:
                yield parsed(SweepSummary, line)
