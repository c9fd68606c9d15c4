"""As much of the API server as the API needs: one object at a time, and a watch."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from muster.contract.kubernetes import Connection
from muster.contract.names import GROUP, VERSION

Object = dict[str, Any]
SILENCE_SECONDS = 90.0  # bookmarks come about once a minute
CALL_SECONDS = 15.0
ALL_JOBS = f"/apis/{GROUP}/{VERSION}/trainingjobs"


class ClusterError(OSError):
    """The API server refused. status: HTTP's. reason: Kubernetes' word for it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class Client:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._session = aiohttp.ClientSession(
            # Without a limit: each log that is followed holds a connection.
            connector=aiohttp.TCPConnector(ssl=connection.tls, limit=0),
            headers={"User-Agent": "muster-api"},
            trust_env=True,
        )

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, method: str, path: str, body: Object | None = None, **query: str) -> Object:
        """Raises ClusterError, and OSError when there is no answer."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = self._headers() | ({"Content-Type": kind} if body is not None else {})
        data = None if body is None else json.dumps(body).encode()
        limits = aiohttp.ClientTimeout(total=CALL_SECONDS)
        try:
            async with self._session.request(
                method, self._connection.server + path, data=data, params=query, headers=headers, timeout=limits
            ) as reply:
                answer: Object = json.loads(await reply.read() or b"{}")
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise OSError(f"the API server {self._connection.server} does not answer: {error!r}") from error
        if reply.status >= 400:
            if reply.status == 401:
                self._connection.credentials.forget()
            raise ClusterError(reply.status, answer.get("reason", ""), answer.get("message", str(reply.status)))
        return answer

    async def watch(self, path: str, version: str) -> AsyncIterator[Object]:
        """Events until the stream ends. Raises ClusterError (410: the place is forgotten), OSError, TimeoutError."""
        query = {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version, "timeoutSeconds": "270"}
        limits = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_SECONDS)
        try:
            async with self._session.get(
                self._connection.server + path, params=query, headers=self._headers(), timeout=limits
            ) as reply:
                if reply.status != 200:
                    raise ClusterError(reply.status, "", (await reply.text())[:300])
                rest = b""
                async for chunk in reply.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield json.loads(line)
        except aiohttp.ClientError as error:
            raise OSError(f"the watch ended: {error!r}") from error

    async def stream(self, path: str, **query: str) -> AsyncIterator[bytes]:
        """The bytes of an answer as they come, for as long as it takes. Raises ClusterError and OSError."""
        limits = aiohttp.ClientTimeout(total=None, sock_connect=10)
        try:
            async with self._session.get(
                self._connection.server + path, params=query, headers=self._headers(), timeout=limits
            ) as reply:
                if reply.status != 200:
                    raise ClusterError(reply.status, "", (await reply.text())[:300])
                async for chunk in reply.content.iter_any():
                    yield chunk
        except aiohttp.ClientError as error:
            raise OSError(f"the stream ended: {error!r}") from error

    def _headers(self) -> dict[str, str]:
        token = self._connection.credentials.bearer()
        return {"Authorization": f"Bearer {token}"} if token else {}


def jobs_path(namespace: str, name: str = "") -> str:
    path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/trainingjobs"
    return f"{path}/{name}" if name else path
