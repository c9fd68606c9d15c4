"""The core's part of the app: its routes, its services and its background work."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import structlog
from fastapi import APIRouter

from muster.api.core import idempotency
from muster.api.core.attempts import routes as attempts
from muster.api.core.background import BackgroundWork, BackgroundWorks
from muster.api.core.callers import CallerAuthenticator
from muster.api.core.checkpoints import routes as checkpoints
from muster.api.core.cluster.cluster import JobCluster
from muster.api.core.database.db import Database
from muster.api.core.database.notifications import NotificationChannel
from muster.api.core.estimates import routes as estimates
from muster.api.core.evaluations import controller as evaluations
from muster.api.core.events import routes as events
from muster.api.core.fleet import routes as fleet
from muster.api.core.folder_threads import FolderThreads
from muster.api.core.health import routes as health
from muster.api.core.http import documents, pages
from muster.api.core.http.streams import OpenStreams
from muster.api.core.hub import NotificationHub
from muster.api.core.jobs import retention
from muster.api.core.jobs import routes as jobs
from muster.api.core.logs import routes as logs
from muster.api.core.metrics import curve_routes as curves
from muster.api.core.metrics import routes as metrics
from muster.api.core.metrics.steps import StepLogs
from muster.api.core.mirror import ClusterMirror, MirrorListener
from muster.api.core.observability import ApiMetrics
from muster.api.core.planning import routes as planning
from muster.api.core.profiles import routes as profiles
from muster.api.core.relay import JobRelay
from muster.api.core.services import Services
from muster.api.core.settings import ApiSettings
from muster.api.core.submission import input_pins
from muster.api.core.waits.estimates import StartEstimates
from muster.api.core.why import routes as why
from muster.documents.prices import load_prices
from muster.storage.listing import CommitListing

log = structlog.get_logger("muster.api")

RELAY_SECONDS_MIN = 0.1  # a single job is handed over at once, the jobs of a burst together
ROUTERS: tuple[APIRouter, ...] = tuple(
    module.router
    for module in (
        estimates, planning, jobs, attempts, events, checkpoints, metrics, curves, profiles, logs, why, fleet
    )
)  # fmt: skip
ROUTERS_OF_THE_SERVER: tuple[APIRouter, ...] = (health.router, pages.router, documents.router)


def open_core(
    settings: ApiSettings,
    database: Database,
    cluster: JobCluster,
    counted: ApiMetrics,
    hub: NotificationHub,
    authenticator: CallerAuthenticator,
    listener: MirrorListener,
    closing: AsyncExitStack,
) -> Services:
    mirror = ClusterMirror(database, cluster, hub, counted, listener)
    relay = JobRelay(database, cluster, hub, counted, lambda: mirror.caught_up)
    services = Services(
        settings=settings,
        database=database,
        cluster=cluster,
        authenticator=authenticator,
        hub=hub,
        metrics=counted,
        background=BackgroundWorks([]),
        mirror=BackgroundWork("mirror", mirror.step, settings.mirror_seconds, behind=mirror.behind),
        relay=BackgroundWork("relay", relay.step, settings.relay_seconds, RELAY_SECONDS_MIN),
        prices=load_prices(settings.prices_file),
        commits=CommitListing(),
        folders=FolderThreads(),
        streams=OpenStreams(settings.streams_per_person_max),
        closing=closing,
    )
    services.add(mirror)
    services.add(StepLogs(settings.layout))
    services.add(StartEstimates())
    mirror.waiting.append(services.relay.wake)
    evaluating = evaluations.EvaluationWork(
        "evaluations", lambda: evaluations.step(services), evaluations.EVALUATION_SECONDS
    )
    services.background.works += [services.mirror, services.relay, services.add(evaluating)]
    if not database.is_sqlite:  # where several processes may write
        notifications = NotificationChannel(database, hub)
        services.background.works.append(notifications.work)
        closing.push_async_callback(notifications.close)
    services.housekeeping += [lambda: input_pins.keep_up(services), lambda: _drop_old(services)]
    return services


async def _drop_old(services: Services) -> None:
    """Delete kept replies, and the events and logs of old jobs."""
    settings, database = services.settings, services.database
    async with database.write() as session:
        await idempotency.forget(session, time.time() - settings.idempotency_days * 86_400)
    if settings.history_days is not None:
        before = time.time() - settings.history_days * 86_400
        for job_id in await retention.drop_old(database, settings.layout, before):
            log.info("an old job's events and logs are dropped", job=job_id)
        await retention.drop_left(database, settings.layout, before)
