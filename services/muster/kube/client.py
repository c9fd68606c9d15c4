"""HTTP to the API server: raw dicts in and out, errors as one type, every call with a deadline.

Whatever fails is an OSError: ApiError where the server refused, TimeoutError where it was silent.

Not the official client: its typed models cost 90 MB of memory, and a watch of it without a socket time-out can hang for
ever (docs/decisions/0010).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

import aiohttp
from aiohttp.helpers import proxies_from_env
from pydantic_core import from_json, to_json

from muster.kube.connection import ApiConnection
from muster.kube.errors import ApiError

Object = dict[str, Any]

CALL_SECONDS = 30.0
PAGE = 500  # objects of a list that are in memory at once
TRIES = 4  # of a call that the server asked to repeat (429, 503 with Retry-After), or whose connection broke unsent
RETRY_SECONDS_MAX = 5.0
KEPT_ALIVE_SECONDS = 75.0  # the API server keeps an idle connection for 90; a new one costs both sides a TLS handshake
STREAM_BYTES = 1 << 20  # of a watch that may wait to be read: the API server ends a stream that stands still

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
# Of a list, and of one object: no more than the metadata.
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


class ApiClient:
    """Use it within `async with`. `agent` is who we say we are. So many connections may be open as `at_once` says; 0
    means any number. `calls` counts what was asked, by verb and resource (`pods`, `trainingjobs/status`).
    """

    def __init__(self, connection: ApiConnection, agent: str, at_once: int = 96) -> None:
        self.connection = connection
        self.calls: Counter[tuple[str, str]] = Counter()
        self._agent, self._at_once = agent, at_once
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ApiClient:
        connector = aiohttp.TCPConnector(
            ssl=self.connection.tls, limit=self._at_once, keepalive_timeout=KEPT_ALIVE_SECONDS
        )
        # Uncompressed, as Kubernetes' own controllers ask: to pack a list costs the API server more than to send it.
        headers = {"User-Agent": self._agent, "Accept": "application/json", "Accept-Encoding": "identity"}
        # Not by trust_env, which reads environment and netrc anew, in a thread, at every call.
        server = urlsplit(self.connection.server)
        proxy_settings = None if proxy_bypass(server.hostname or "") else proxies_from_env().get(server.scheme)
        proxy, proxy_auth = (proxy_settings.proxy, proxy_settings.proxy_auth) if proxy_settings else (None, None)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, proxy=proxy, proxy_auth=proxy_auth)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, **query: str) -> Object:
        return await self._call("GET", path, query=query)

    async def pages(
        self, path: str, accept: str = "", decode: Callable[[bytes], Any] = from_json, **query: str
    ) -> AsyncIterator[Object]:
        """Read a list page by page, so that a large one is never in memory as a whole.

        `accept` is METADATA_LIST where the metadata of the items will do, or empty for whole items.
        """
        following: str | None = ""
        while following is not None:
            asked = {**query, "limit": str(PAGE), "continue": following}
            page = decode(await self._send("GET", path, query=asked, verb="LIST", accept=accept))
            yield page
            following = page.get("metadata", {}).get("continue") or None

    async def create(self, path: str, body: Object, accept: str = "") -> Object:
        """Make an object, and return it as the API server has it.

        `accept` is METADATA where its metadata will do, or empty for the whole object.
        """
        return await self._call("POST", path, body, accept=accept)

    async def put(self, path: str, body: Object, accept: str = "") -> Object:
        return await self._call("PUT", path, body, accept=accept)

    async def patch(self, path: str, body: object, kind: str = MERGE, accept: str = "", **query: str) -> Object:
        return await self._call("PATCH", path, body, query, content=kind, accept=accept)

    async def delete(self, path: str, body: Object | None = None, **query: str) -> Object:
        return await self._call("DELETE", path, body, query)

    async def remove(self, path: str, body: Object) -> None:
        """Do as `delete`, for callers that do not read what was deleted."""
        await self._send("DELETE", path, body, accept=METADATA)

    async def delete_all(self, path: str, **query: str) -> None:
        """Delete what the selectors match in a collection, in one request, without reading the deleted objects back."""
        # With a body, for without one the server reads options of the deletion from the same query.
        await self._send("DELETE", path, {}, query, verb="DELETECOLLECTION", accept=METADATA_LIST)

    async def watch(
        self,
        path: str,
        version: str,
        silence_seconds: float,
        decode: Callable[[bytes], Any] = from_json,
        **query: str,
    ) -> AsyncIterator[Object]:
        """Yield events from `version` on, until the server ends the stream. Raises ApiError (410: relist), OSError, and
        TimeoutError when nothing, not even a bookmark, was heard for so long."""
        asked = {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version, **query}
        rest: list[bytes] = []
        # Whole lines of any length: aiohttp's own readline refuses long ones, and an object may have a megabyte.
        async for chunk in self._chunks("WATCH", path, asked, silence_seconds):
            head, *tail = chunk.split(b"\n")
            rest.append(head)
            for line in tail:
                if whole := b"".join(rest):
                    yield decode(whole)
                rest = [line]

    async def stream(self, path: str, **query: str) -> AsyncIterator[bytes]:
        """The bytes of an answer as they come, for as long as it takes (a pod's log that is followed)."""
        async for chunk in self._chunks("STREAM", path, query, None):
            yield chunk

    async def _chunks(
        self, verb: str, path: str, query: Mapping[str, str], silence_seconds: float | None
    ) -> AsyncIterator[bytes]:
        assert self._session is not None, "used outside `async with`"
        limits = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=silence_seconds)
        self.calls[verb, resource(path)] += 1
        try:
            async with self._session.get(
                self.connection.server + path,
                params=query,
                headers=await self._headers(),
                timeout=limits,
                read_bufsize=STREAM_BYTES,
            ) as reply:
                if reply.status != 200:
                    raise self._error(reply, await reply.read())
                async for chunk in reply.content.iter_any():
                    yield chunk
        except TimeoutError:
            raise  # some of aiohttp's are ClientErrors, too
        except aiohttp.ClientError as error:
            raise OSError(f"the stream of {path} ended: {error!r}") from error

    async def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
        accept: str = "",
    ) -> Object:
        document: Object = from_json(await self._send(method, path, body, query, content, accept=accept))
        return document

    async def _send(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
        verb: str = "",
        accept: str = "",
    ) -> bytes:
        data = None if body is None else to_json(body)
        headers = ({"Content-Type": content} if data is not None else {}) | ({"Accept": accept} if accept else {})
        params = {key: value for key, value in (query or {}).items() if value}
        for attempt in range(1, TRIES + 1):
            try:
                return await self._once(method, path, data, params, headers, verb or method)
            except ApiError as error:
                if attempt == TRIES or (error.status not in (401, 429) and not error.retry_after):
                    raise
                if error.status == 401:
                    self.connection.credentials.forget()
                await asyncio.sleep(min(error.retry_after or 0.2, RETRY_SECONDS_MAX))
            except aiohttp.ClientConnectorError as error:  # nothing was sent
                if attempt == TRIES:
                    raise OSError(f"the API server {self.connection.server} does not answer: {error}") from error
                await asyncio.sleep(0.1 * 2**attempt)
            except aiohttp.ClientError as error:
                if method != "GET" or attempt == TRIES:
                    raise OSError(f"{method} {path}: {error!r}") from error
        raise AssertionError("unreachable")

    async def _once(
        self, method: str, path: str, data: bytes | None, params: Mapping[str, str], headers: dict[str, str], verb: str
    ) -> bytes:
        assert self._session is not None, "used outside `async with`"
        self.calls[verb, resource(path)] += 1
        async with self._session.request(
            method,
            self.connection.server + path,
            params=params,
            data=data,
            headers=await self._headers() | headers,
            timeout=aiohttp.ClientTimeout(total=CALL_SECONDS),
        ) as reply:
            answer = await reply.read()
            if reply.status >= 400:
                raise self._error(reply, answer)
            return answer

    async def _headers(self) -> dict[str, str]:
        credentials = self.connection.credentials
        token = await asyncio.to_thread(credentials.bearer) if credentials.slow else credentials.bearer()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _error(self, reply: aiohttp.ClientResponse, answer: bytes) -> ApiError:
        try:
            status = from_json(answer)
        except ValueError:
            status = {}
        if not isinstance(status, dict):
            status = {}
        wait = reply.headers.get("Retry-After", "")
        text = status.get("message") or answer[:300].decode(errors="replace") or reply.reason or ""
        return ApiError(reply.status, status.get("reason", ""), text, float(wait) if wait.isdecimal() else 0.0)


def resource(path: str) -> str:
    """Return the resource of a path, such as `pods` or `trainingjobs/status`, without names and namespaces."""
    words = path.strip("/").split("/")
    words = words[2:] if words[0] == "api" else words[3:]
    if words[:1] == ["namespaces"] and len(words) > 2:
        words = words[2:]
    return "/".join([words[0], *words[2:]]) if words else "groups"
