"""Files, which jobs name as `file-…`, for programs with asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from muster.client import operations
from muster.client.answers import parsed
from muster.client.async_connection import AsyncConnection
from muster.client.async_transfers import transferred
from muster.client.outgoing import Progress, nobody
from muster.client.transfers import bring, take_in
from muster.replies.files import File


class AsyncFiles:
    """The files of one server. Every method raises MusterError."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def upload(
        self,
        path: str | Path,
        *,
        purpose: str = "fine-tune",
        project: str | None = None,
        name: str | None = None,
        lifetime_seconds: float | None = None,
        progress: Progress = nobody,
    ) -> File:
        """Send a file of this machine, wait until the server has read it through, and return it.

        An interrupted upload of it, also another program's, is resumed. `progress` is called with the bytes that have
        arrived, of all, from any thread. Raises InvalidRequest where nothing can be learnt from the data.
        """
        return await transferred(
            self._connection,
            lambda transfers, report: take_in(transfers, Path(path), purpose, project, name, lifetime_seconds, report),
            progress,
        )

    async def get(self, file_id: str) -> File:
        """The file of that id. Raises NotFound."""
        return parsed(File, await self._connection.run(operations.ask("GET", f"files/{file_id}")))

    async def list(
        self, *, limit: int | None = None, project: str | None = None, name: str | None = None
    ) -> AsyncIterator[File]:
        """The newest files, all or so many, newest first. Filters combine."""
        filters = {"project": project, "name": name}
        async for page in self._connection.walk(operations.pages(limit, filters, "files")):
            for line in page:
                yield parsed(File, line)

    async def download(self, file_id: str, to: str | Path, *, progress: Progress = nobody) -> Path:
        """Write the file's bytes to the path `to`; what an earlier try has left is gone on with."""
        return await transferred(
            self._connection, lambda transfers, report: bring(transfers, file_id, Path(to), report), progress
        )

    async def delete(self, file_id: str) -> None:
        """Delete the file. Raises Conflict while a live job reads it."""
        await self._connection.run(operations.ask("DELETE", f"files/{file_id}"))
