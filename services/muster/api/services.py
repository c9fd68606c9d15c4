"""Services that a request finds in its app: opened once at start, closed at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends, Request

from muster.api.background import Background, Work
from muster.api.cluster import Cluster
from muster.api.db import Database
from muster.api.exports.making import Exports
from muster.api.files.arrivals import Files
from muster.api.folder_threads import FolderThreads
from muster.api.hub import Hub
from muster.api.metrics.steps import StepLogs
from muster.api.notifications import Notifications
from muster.api.observability import Metrics
from muster.api.openai.chat.pool import WorkerPool
from muster.api.openai.models.base_models import BaseModels
from muster.api.operator_previews import OperatorPreviews
from muster.api.rates import RateLimits
from muster.api.recent import Recent
from muster.api.settings import Settings
from muster.api.streams import OpenStreams
from muster.contract.prices import Prices
from muster.storage.listing import CommitListing

if TYPE_CHECKING:  # they stand on what stands on this
    from muster.api.auth import Principal
    from muster.api.data.inspections import Inspections
    from muster.api.jobs.storing import JobWriter
    from muster.api.jobs.submission import Placed
    from muster.api.signin.service import SignIn
    from muster.api.webhooks.service import Webhooks


@dataclass
class Services:
    settings: Settings
    database: Database
    cluster: Cluster
    hub: Hub
    notifications: Notifications | None  # None: SQLite, where one process writes
    metrics: Metrics
    step_logs: StepLogs
    relay: Work
    mirror: Work
    sweeps: Work
    background: Background
    prices: Prices
    base_models: BaseModels
    chat: WorkerPool
    commits: CommitListing
    folders: FolderThreads
    jobs: JobWriter
    files: Files
    exports: Exports
    inspections: Inspections
    rates: RateLimits
    streams: OpenStreams
    callers: Recent[Principal]  # by the hash of what they show
    projects: Recent[Placed]
    previews: OperatorPreviews
    webhooks: Webhooks
    sign_in: SignIn | None  # None: tokens alone
    token_uses: dict[str, float]  # token id → when it was last used, until housekeeping writes it down


async def services_of(request: Request) -> Services:  # not def: each request would ask a thread for it
    return cast(Services, request.app.state.services)


ServicesDependency = Annotated[Services, Depends(services_of)]
