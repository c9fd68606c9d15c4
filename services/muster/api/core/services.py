"""Services that a request finds in its app: opened once at start, closed at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends, Request

from muster.api.core.background import Background, Work
from muster.api.core.cluster.cluster import Cluster
from muster.api.core.database.db import Database
from muster.api.core.database.notifications import Notifications
from muster.api.core.database.recent import Recent
from muster.api.core.folder_threads import FolderThreads
from muster.api.core.http.streams import OpenStreams
from muster.api.core.hub import Hub
from muster.api.core.metrics.steps import StepLogs
from muster.api.core.observability import Metrics
from muster.api.core.settings import Settings
from muster.api.core.submission.operator_previews import OperatorPreviews
from muster.api.data.exports.making import Exports
from muster.api.data.files.arrivals import Files
from muster.api.openai.chat.pool import WorkerPool
from muster.api.openai.models.base_models import BaseModels
from muster.api.tenants.rates import RateLimits
from muster.contract.prices import Prices
from muster.storage.listing import CommitListing

if TYPE_CHECKING:  # they stand on what stands on this
    from muster.api.core.callers import Principal
    from muster.api.core.submission.drafts import Placed
    from muster.api.core.submission.storing import JobWriter
    from muster.api.data.inspections.service import Inspections
    from muster.api.tenants.signin.service import SignIn
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
