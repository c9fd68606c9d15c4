"""The webhooks' part of the app: they hear of events, waits and budgets, and send their messages."""

from __future__ import annotations

import functools
import time

import structlog
from fastapi import APIRouter

from muster.api.core.background import BackgroundWork
from muster.api.core.events.repository import listen
from muster.api.core.services import Services
from muster.api.tenants.projects.accounting import UsageAccounting
from muster.api.webhooks import routes
from muster.api.webhooks.budgets import notify_of_budgets
from muster.api.webhooks.delivering import DELIVERY_SECONDS, MEASURE_SECONDS, DeliverySender, forget_old
from muster.api.webhooks.outbox import note_events
from muster.api.webhooks.reach import NetworkReach
from muster.api.webhooks.sealing import sealing_of
from muster.api.webhooks.service import WebhookServices
from muster.api.webhooks.waits import WAIT_SECONDS, notify_of_waits
from muster.secrets.box import SecretsLocked

log = structlog.get_logger("muster.api")

ROUTERS: tuple[APIRouter, ...] = (routes.router,)


async def register(services: Services) -> None:
    settings, database = services.settings, services.database
    sealing, reach = sealing_of(settings), NetworkReach(settings.webhook_networks)
    deliveries = DeliverySender(database, sealing, reach, services.metrics.webhooks)
    webhooks = services.add(WebhookServices(deliveries, sealing, reach))
    services.background.works += [
        BackgroundWork("webhooks", deliveries.step, DELIVERY_SECONDS, wake=deliveries.freed),
        BackgroundWork("webhooks waiting", deliveries.measure, MEASURE_SECONDS),
        BackgroundWork("waits", lambda: notify_of_waits(database), WAIT_SECONDS),
    ]
    services.closing.push_async_callback(deliveries.stop)
    services.housekeeping.append(lambda: _drop_old(services))
    services[UsageAccounting].listeners.append(functools.partial(notify_of_budgets, database))
    listen(database, note_events)
    await _renew(services, webhooks)


async def _renew(services: Services, webhooks: WebhookServices) -> None:
    try:
        if lost := await webhooks.sealing.renew(services.database):
            log.warning("no key opens the secrets of these webhooks: rotate them", webhooks=", ".join(lost))
    except SecretsLocked as locked:  # all else goes on
        log.warning("secrets of webhooks can't be used", cause=str(locked))


async def _drop_old(services: Services) -> None:
    async with services.database.write() as session:
        await forget_old(session, time.time())
