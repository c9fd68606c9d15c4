"""One kind of object, listed and then watched for ever: what the API server says, and nothing lost in between.

A stream is believed dead when it is silent for longer than bookmarks let it be; it is then opened again where it ended.
Only when the server has forgotten that place (410) is everything listed again, and what is missing then was deleted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Protocol

from pydantic_core import from_json

from muster.kube.client import ApiClient, Object
from muster.kube.errors import ApiError
from muster.kube.fields import Fields, decoder

STREAM_SECONDS = 290  # the server ends the stream then; it does so at a random moment in any case
SILENCE_SECONDS = 90.0  # bookmarks come about once a minute
RETRY_SECONDS_MAX = 30.0


class ObjectCache(Protocol):
    """Store for objects of one kind. It is called from one task only."""

    def put(self, item: Object) -> None:
        """Store a new or changed object."""

    def drop(self, item: Object) -> None:
        """Remove a deleted object; this was its last state."""

    def keep_only(self, uids: set[str]) -> None:
        """A fresh list had these and no others."""


class Reflector:
    """Reflector of the collection at `path`, as far as the selectors in `query` select it.

    `on_error` is called with each failure; then it is tried again. `silence_seconds` is how long a stream may be silent
    before it is believed dead. Of each object only `fields` are decoded, if they are named; metadata.uid and
    .resourceVersion must be among them. `before_list` is awaited before each list begins. `version` is the
    resourceVersion of what was seen last; None has everything listed anew.
    """

    def __init__(
        self,
        client: ApiClient,
        path: str,
        cache: ObjectCache,
        on_error: Callable[[str, Exception], None],
        silence_seconds: float = SILENCE_SECONDS,
        fields: Fields | None = None,
        before_list: Callable[[], Awaitable[None]] | None = None,
        **query: str,
    ) -> None:
        self._decode = decoder(fields) if fields else from_json
        self._client, self._path, self._cache, self._query = client, path, cache, query
        self._on_error, self._silence_seconds, self._before_list = on_error, silence_seconds, before_list
        self.version: str | None = None
        self.listed = asyncio.Event()
        self.lists = 0

    async def run(self) -> None:
        """Run forever."""
        failures = 0
        while True:
            try:
                if self.version is None:
                    await self._list()
                await self._follow()
                failures = 0
            except ApiError as error:
                if error.status == 410:
                    self.version = None
                    continue
                failures += 1
                self._on_error(self._path, error)
            except TimeoutError:
                continue  # silent: open it again where it ended
            except (OSError, ValueError) as error:
                failures += 1
                self._on_error(self._path, error)
            if failures:
                pause = min(RETRY_SECONDS_MAX, 0.25 * 2.0 ** min(failures, 10))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _list(self) -> None:
        if self._before_list is not None:
            await self._before_list()
        uids: set[str] = set()
        version = ""
        async for page in self._client.pages(self._path, decode=self._decode, **self._query):
            for item in page.get("items") or ():
                self._cache.put(item)
                uids.add(item["metadata"]["uid"])
            version = page["metadata"]["resourceVersion"]
        self.version = version
        self._cache.keep_only(uids)
        self.lists += 1
        self.listed.set()

    async def _follow(self) -> None:
        assert self.version is not None
        seconds = str(random.randint(STREAM_SECONDS - 60, STREAM_SECONDS))
        stream = self._client.watch(
            self._path, self.version, self._silence_seconds, self._decode, timeoutSeconds=seconds, **self._query
        )
        async for event in stream:
            item = event["object"]
            if event["type"] == "ERROR":
                raise ApiError(item.get("code", 500), item.get("reason", ""), item.get("message", ""))
            if event["type"] == "DELETED":
                self._cache.drop(item)
            elif event["type"] != "BOOKMARK":
                self._cache.put(item)
            self.version = item["metadata"]["resourceVersion"]
