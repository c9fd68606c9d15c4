"""The part of the app for data that go into jobs and models that come out of them."""

from __future__ import annotations

import asyncio

import structlog
from fastapi import APIRouter

from muster.api.core.services import Services
from muster.api.data.exports import routes as exports
from muster.api.data.exports.making import ModelExports
from muster.api.data.files import routes as files
from muster.api.data.files.arrivals import FilePlaces, drop_expired, open_files
from muster.api.data.inspections import routes as inspections
from muster.api.data.inspections.service import DataInspections
from muster.api.data.samples import routes as samples

log = structlog.get_logger("muster.api")

ROUTERS: tuple[APIRouter, ...] = tuple(module.router for module in (exports, inspections, samples, files))


def register(services: Services) -> None:
    settings, database, closing = services.settings, services.database, services.closing
    kept = services.add(open_files(database, settings.layout.uploads, settings.files_place, settings.uploads_bytes_max))
    if kept.arrivals is not None:
        services.background.works.append(kept.arrivals.work)
        closing.push_async_callback(kept.arrivals.stop)
    closing.push_async_callback(services.add(DataInspections()).stop)
    closing.push_async_callback(services.add(ModelExports(settings.layout.exports)).stop)
    services.housekeeping.append(lambda: _drop_expired(services))


async def _drop_expired(services: Services) -> None:
    for file_id in await drop_expired(services.database, services[FilePlaces]):
        log.info("a file's time is over", file=file_id)
    await asyncio.to_thread(services[ModelExports].drop_old)
