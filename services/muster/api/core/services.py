"""Services that a request finds in its app: opened once at start, closed at the end.

The fields are what the core itself stands on. What stands on the core adds a service for each of its nouns, which is
found by its class: `services[Files]`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Request

from muster.api.core.background import BackgroundWork, BackgroundWorks
from muster.api.core.callers import CallerAuthenticator
from muster.api.core.cluster.cluster import JobCluster
from muster.api.core.database.db import Database
from muster.api.core.folder_threads import FolderThreads
from muster.api.core.http.streams import OpenStreams
from muster.api.core.hub import NotificationHub
from muster.api.core.observability import ApiMetrics
from muster.api.core.settings import ApiSettings
from muster.storage.listing import CommitListing
from muster.words.prices import Prices

T = TypeVar("T")


@dataclass
class Services:
    settings: ApiSettings
    database: Database
    cluster: JobCluster
    authenticator: CallerAuthenticator
    hub: NotificationHub
    metrics: ApiMetrics
    background: BackgroundWorks
    mirror: BackgroundWork
    relay: BackgroundWork
    prices: Prices
    commits: CommitListing
    folders: FolderThreads
    streams: OpenStreams
    housekeeping: list[Callable[[], Awaitable[None]]] = field(default_factory=list)  # done once a minute, in this order
    closing: AsyncExitStack = field(default_factory=AsyncExitStack)  # what is stopped at the end, in the reverse order
    _added: dict[type[Any], Any] = field(default_factory=dict)

    def add(self, service: T) -> T:
        assert type(service) not in self._added, f"there is a {type(service).__name__} already"
        self._added[type(service)] = service
        return service

    def __getitem__(self, kind: type[T]) -> T:
        return cast(T, self._added[kind])

    def get(self, kind: type[T]) -> T | None:
        """The service of that class, where there may be none."""
        return cast(T | None, self._added.get(kind))


async def services_of(request: Request) -> Services:  # not def: each request would ask a thread for it
    return cast(Services, request.app.state.services)


ServicesDependency = Annotated[Services, Depends(services_of)]
