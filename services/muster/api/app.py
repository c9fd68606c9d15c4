"""Composition of the app: its layers register themselves, from the core up; it is opened and closed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from muster.api.core import registration as core
from muster.api.core.background import BackgroundWork
from muster.api.core.cluster.cluster import JobCluster
from muster.api.core.cluster.opening import open_cluster
from muster.api.core.database.db import Database
from muster.api.core.database.migrate import migrate
from muster.api.core.http.middleware import BodyLimits, LoopbackGuard, RequestLog
from muster.api.core.http.openapi import describe, problems
from muster.api.core.http.parameters import known_parameters_only
from muster.api.core.http.problems import answer_errors
from muster.api.core.hub import NotificationHub
from muster.api.core.idempotency import only_where_kept
from muster.api.core.jobs.repository import live_in_cluster
from muster.api.core.observability import ApiMetrics
from muster.api.core.services import Services
from muster.api.core.settings import ApiSettings
from muster.api.core.submission import steps
from muster.api.core.submission.drafts import Step
from muster.api.core.submission.service import SubmissionService
from muster.api.data import registration as data
from muster.api.data.files.arrivals import FilePlaces
from muster.api.data.files.references import named_files
from muster.api.openai import registration as openai
from muster.api.sweeps import registration as sweeps
from muster.api.tenants import registration as tenants
from muster.api.tenants.projects.quotas import queue_limit
from muster.api.tenants.secrets.service import secret_references
from muster.api.tenants.tokens import service as tokens
from muster.api.tenants.usage.repository import UsageRecorder
from muster.api.webhooks import registration as webhooks
from muster.local.private import make_private_database, make_private_folder

HOUSEKEEPING_SECONDS = 60.0
_DESCRIPTION = (
    "Jobs go in, their history comes out. Errors are `application/problem+json` with a stable `code`. "
    "Times are RFC 3339 in UTC; durations are numbers of seconds. "
    "POSTs that describe an `Idempotency-Key` may be repeated freely with one. Those that act on what is there "
    "(cancel, suspend, pin …) may be repeated without; all others refuse the header, for they would act once more."
)


def submission_steps(files: FilePlaces) -> tuple[Step, ...]:
    """All that happens to a submission before it is stored, in this order."""
    return (
        steps.project_defaults,
        steps.platform_defaults,
        steps.process_settings,
        steps.project_namespace,
        steps.program_source,
        steps.node_volumes,
        steps.project_limits,
        named_files(files.contents),
        secret_references,
        steps.commit_origins,
        steps.evaluated_job,
        steps.warnings,
        queue_limit,
    )


def create_app(settings: ApiSettings, cluster: JobCluster | None = None) -> FastAPI:
    """Make the API, which works while its lifespan runs. `cluster` is None for the one that the settings name."""
    counted, hub = ApiMetrics(_version()), NotificationHub()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with _opened(settings, cluster, counted, hub) as services:
            app.state.services = services
            yield

    app = FastAPI(
        title="Muster",
        version=_version(),
        description=_DESCRIPTION,
        lifespan=lifespan,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        servers=[{"url": "/", "description": "Where this document was read"}],
        generate_unique_id_function=_operation_id,
        redirect_slashes=False,
    )
    app.state.hub = hub
    app.router.routes.extend(_routes())
    answer_errors(app, openai.as_openai)
    # The last one added is the outermost.
    app.add_middleware(BodyLimits, bytes_max=settings.body_bytes_max, seconds_max=settings.receive_seconds_max)
    if not settings.auth:
        app.add_middleware(LoopbackGuard)
    app.add_middleware(RequestLog, metrics=counted)
    describe(app)
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name


@functools.cache
def _routes() -> Sequence[BaseRoute]:
    """The routes, made once for all apps of a process: to read their parameters takes longer than all the rest."""
    bare = FastAPI(openapi_url=None, generate_unique_id_function=_operation_id)
    native = (*core.ROUTERS, *tenants.ROUTERS, *data.ROUTERS, *webhooks.ROUTERS, *sweeps.ROUTERS)
    bare.include_router(_joined("/api/v1", native))
    bare.include_router(_joined("/v1", openai.ROUTERS, responses={400: problems("invalid_request")[400]}))
    for router in core.ROUTERS_OF_THE_SERVER:
        bare.include_router(router)
    return bare.router.routes


def _joined(
    prefix: str, routers: Iterable[APIRouter], responses: dict[int | str, dict[str, Any]] | None = None
) -> APIRouter:
    joined = APIRouter(prefix=prefix, dependencies=[Depends(known_parameters_only), Depends(only_where_kept)])
    for router in routers:
        joined.include_router(router, responses=responses)
    return joined


@contextlib.asynccontextmanager
async def _opened(
    settings: ApiSettings, cluster: JobCluster | None, counted: ApiMetrics, hub: NotificationHub
) -> AsyncIterator[Services]:
    settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    database = Database(settings.database, settings.database_timeout_seconds)
    if settings.cluster == "local":  # in a cluster the folder is a volume, whose rights the platform decides
        make_private_folder(settings.state, settings.layout.cluster)
        if database.file is not None:
            make_private_database(database.file)

    async def live() -> set[str]:
        async with database.read() as session:
            return await live_in_cluster(session)

    async with contextlib.AsyncExitStack() as closing:
        closing.push_async_callback(database.close)
        await migrate(database)
        await tokens.ensure_first(database, settings)
        there = await closing.enter_async_context(open_cluster(settings, cluster, live))
        authentication = tenants.open_authentication(settings, database)
        services = core.open_core(settings, database, there, counted, hub, authentication, UsageRecorder(), closing)
        tenants.register(services, authentication)
        data.register(services)
        services.add(SubmissionService(services, submission_steps(services[FilePlaces])))
        openai.register(services)
        await webhooks.register(services)
        sweeps.register(services)
        services.background.works.append(
            BackgroundWork("housekeeping", lambda: _clean_up(services), HOUSEKEEPING_SECONDS)
        )
        services.background.start()
        closing.push_async_callback(services.background.stop)
        closing.callback(hub.close)
        yield services


async def _clean_up(services: Services) -> bool:
    """Each layer deletes what has expired of its own."""
    for work in services.housekeeping:
        await work()
    return False


@functools.cache
def _version() -> str:
    try:
        return version("muster-train")
    except PackageNotFoundError:
        return "0"
