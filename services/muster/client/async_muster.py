"""Muster for programs with asyncio."""

from __future__ import annotations

from typing import Any

from muster.client.address import server_for
from muster.client.async_connection import AsyncConnection
from muster.client.async_files import AsyncFiles
from muster.client.async_jobs import AsyncJobs
from muster.client.async_sweeps import AsyncSweeps
from muster.client.exchange import PATIENCE_SECONDS


class AsyncMuster:
    """One server. Use as an asynchronous context manager, or close it.

    It is found as the command line finds it: `server`, else MUSTER_SERVER, else the `muster up` of this machine; with
    `token`, else MUSTER_TOKEN, else the sign-in of `muster login`, else the token's file. Requests that may have been
    lost are sent again for `patience_seconds`. Raises MusterError.
    """

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        transport: Any = None,
    ) -> None:
        """`transport` is httpx's, for tests and for proxies of one's own."""
        self.connection = AsyncConnection(server_for(server, token), patience_seconds, transport=transport)
        self.jobs = AsyncJobs(self.connection)
        self.files = AsyncFiles(self.connection)
        self.sweeps = AsyncSweeps(self.connection)

    async def __aenter__(self) -> AsyncMuster:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.connection.close()

    def __repr__(self) -> str:
        return f"AsyncMuster({self.connection.server.url!r})"
