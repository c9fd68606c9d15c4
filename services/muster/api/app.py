"""Assembly of the app: it is opened, its modules are joined, and it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import PackageNotFoundError, version

import structlog
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute

from muster.api.core import idempotency
from muster.api.core.attempts import routes as attempts
from muster.api.core.background import Background, Work
from muster.api.core.callers import Principal
from muster.api.core.checkpoints import routes as checkpoints
from muster.api.core.cluster.cluster import Cluster, Local
from muster.api.core.database.db import Database
from muster.api.core.database.migrate import migrate
from muster.api.core.database.notifications import Notifications
from muster.api.core.database.recent import Recent
from muster.api.core.database.tables import MemberRow, PersonRow, ProjectRow, TokenRow
from muster.api.core.errors import ACTIONS, COMMIT_ACTIONS, ApiError, job_not_found, problem_response
from muster.api.core.estimates import routes as estimates
from muster.api.core.events import routes as events
from muster.api.core.fleet import routes as fleet
from muster.api.core.folder_threads import FolderThreads
from muster.api.core.health import routes as health
from muster.api.core.http import pages
from muster.api.core.http.middleware import BodyLimits, LoopbackGuard, RequestLog
from muster.api.core.http.openapi import describe, problems
from muster.api.core.http.parameters import known_parameters_only
from muster.api.core.http.streams import OpenStreams
from muster.api.core.hub import Hub
from muster.api.core.idempotency import only_where_kept
from muster.api.core.jobs import retention
from muster.api.core.jobs import routes as jobs
from muster.api.core.jobs.repository import live_in_cluster
from muster.api.core.logs import routes as logs
from muster.api.core.metrics import curve_routes as curves
from muster.api.core.metrics import routes as metrics
from muster.api.core.metrics.steps import StepLogs
from muster.api.core.mirror import Mirror
from muster.api.core.observability import Metrics
from muster.api.core.profiles import routes as profiles
from muster.api.core.relay import Relay
from muster.api.core.services import Services
from muster.api.core.settings import Settings
from muster.api.core.submission.drafts import Placed
from muster.api.core.submission.operator_previews import OperatorPreviews
from muster.api.core.submission.storing import JobWriter
from muster.api.core.why import routes as why
from muster.api.data.exports import routes as exports
from muster.api.data.exports.making import Exports
from muster.api.data.files import routes as files
from muster.api.data.files.arrivals import Files, drop_expired, open_files
from muster.api.data.inspections import routes as data
from muster.api.data.inspections.service import Inspections
from muster.api.data.samples import routes as samples
from muster.api.openai.chat import routes as chat
from muster.api.openai.chat.pool import REAP_SECONDS, WorkerPool
from muster.api.openai.files import routes as openai_files
from muster.api.openai.files import upload_routes as openai_uploads
from muster.api.openai.fine_tuning import routes as fine_tuning
from muster.api.openai.models import routes as models
from muster.api.openai.models.base_models import load_models
from muster.api.openai.requests import invalid_request
from muster.api.sweeps import controller as sweep_controller
from muster.api.sweeps import routes as sweeps
from muster.api.tenants.audit import routes as audit
from muster.api.tenants.people import routes as people
from muster.api.tenants.projects import routes as projects
from muster.api.tenants.projects.accounting import ACCOUNTING_SECONDS, Accounting, spent_of
from muster.api.tenants.projects.quotas import QUOTA_SECONDS, QuotaWriter
from muster.api.tenants.rates import RateLimits
from muster.api.tenants.secrets import routes as secrets
from muster.api.tenants.sessions import service as sessions
from muster.api.tenants.signin import routes as signin
from muster.api.tenants.signin.provider import Provider
from muster.api.tenants.signin.service import SignIn
from muster.api.tenants.tokens import routes as tokens
from muster.api.tenants.tokens import service as token_service
from muster.api.tenants.usage import routes as usage
from muster.api.webhooks import routes as webhooks
from muster.api.webhooks.delivering import DELIVERY_SECONDS, MEASURE_SECONDS, Deliveries, forget_old
from muster.api.webhooks.reach import Reach
from muster.api.webhooks.sealing import sealing_of
from muster.api.webhooks.service import Webhooks
from muster.api.webhooks.waits import WAIT_SECONDS, notify_of_waits
from muster.contract.base import Problem
from muster.documents.prices import load_prices
from muster.local.cluster import LocalCluster
from muster.local.private import make_private_database, make_private_folder
from muster.secrets.box import SecretBox, SecretsLocked
from muster.storage.listing import CommitListing

log = structlog.get_logger("muster.api")

HOUSEKEEPING_SECONDS = 60.0
RELAY_SECONDS_MIN = 0.1  # a single job is handed over at once, the jobs of a burst together
_DESCRIPTION = (
    "Jobs go in, their history comes out. Errors are `application/problem+json` with a stable `code`. "
    "Times are RFC 3339 in UTC; durations are numbers of seconds. "
    "POSTs that describe an `Idempotency-Key` may be repeated freely with one. Those that act on what is there "
    "(cancel, suspend, pin …) may be repeated without; all others refuse the header, for they would act once more."
)


def create_app(settings: Settings, cluster: Cluster | None = None) -> FastAPI:
    """Make the API, which works while its lifespan runs. `cluster` is None for the one that the settings name."""
    counted, hub = Metrics(_version()), Hub()

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
    _answer_errors(app)
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
    for router in (_api(), _openai(), health.router, pages.router):
        bare.include_router(router)
    return bare.router.routes


def _api() -> APIRouter:
    api = APIRouter(prefix="/api/v1", dependencies=[Depends(known_parameters_only), Depends(only_where_kept)])
    of_jobs = (jobs, attempts, events, checkpoints, exports, data, metrics, curves, samples, profiles, logs, why)
    of_all = (projects, files, sweeps, secrets, webhooks, usage, fleet, signin, people, tokens, audit)
    for room in (estimates, *of_jobs, *of_all):
        api.include_router(room.router)
    return api


def _openai() -> APIRouter:
    """Return the router of the OpenAI-compatible API, which uses the same services."""
    api = APIRouter(prefix="/v1", dependencies=[Depends(known_parameters_only), Depends(only_where_kept)])
    for room in (openai_files, openai_uploads, fine_tuning, models, chat):
        api.include_router(room.router, responses={400: problems("invalid_request")[400]})
    return api


@contextlib.asynccontextmanager
async def _opened(settings: Settings, cluster: Cluster | None, counted: Metrics, hub: Hub) -> AsyncIterator[Services]:
    settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    database = Database(settings.database, settings.database_timeout_seconds)
    if settings.cluster == "local":  # in a cluster the folder is a volume, whose rights the platform decides
        make_private_folder(settings.state, settings.layout.cluster)
        if database.file is not None:
            make_private_database(database.file)
    try:
        await migrate(database)
        await token_service.ensure_first(database, settings)
        async with _reached(settings, database, cluster) as there:
            services = _assemble(settings, database, there, counted, hub)
            await _renew_webhooks(services)
            services.background.start()
            try:
                yield services
            finally:
                hub.close()
                await services.background.stop()
                if services.notifications is not None:
                    await services.notifications.close()
                await services.webhooks.deliveries.stop()
                await services.chat.close()
                await services.exports.stop()
                await services.inspections.stop()
                if services.files.arrivals is not None:
                    await services.files.arrivals.stop()
    finally:
        await database.close()


@contextlib.asynccontextmanager
async def _reached(settings: Settings, database: Database, cluster: Cluster | None) -> AsyncIterator[Cluster]:
    if cluster is not None or settings.cluster == "local":
        yield cluster or _local_cluster(settings)
        return
    from muster.api.core.cluster.kubernetes_cluster import KubernetesCluster
    from muster.kube.client import Client
    from muster.kube.connection import connect

    async def live() -> set[str]:
        async with database.read() as session:
            return await live_in_cluster(session)

    # Any number of connections: each log that is followed holds one.
    async with Client(connect(settings.kubeconfig), "muster-api", at_once=0) as client:
        there = KubernetesCluster(client, live, settings.layout, settings.watch_namespace)
        try:
            yield there
        finally:
            await there.close()


def _local_cluster(settings: Settings) -> Local:
    box = SecretBox(settings.secret_key_file or settings.layout.secret_key, settings.secret_kms_key_id)
    local = Local(LocalCluster(settings.layout.cluster), box)
    try:
        if lost := local.renew_secrets():
            log.warning("no key opens these secrets: set them anew, or put their key back", secrets=", ".join(lost))
    except SecretsLocked as locked:  # jobs without secrets go on
        log.warning("secrets can't be used", cause=str(locked))
    return local


async def _renew_webhooks(services: Services) -> None:
    try:
        if lost := await services.webhooks.sealing.renew(services.database):
            log.warning("no key opens the secrets of these webhooks: rotate them", webhooks=", ".join(lost))
    except SecretsLocked as locked:  # all else goes on
        log.warning("secrets of webhooks can't be used", cause=str(locked))


def _assemble(settings: Settings, database: Database, cluster: Cluster, counted: Metrics, hub: Hub) -> Services:
    mirror = Mirror(database, cluster, hub, counted)
    relay = Relay(database, cluster, hub, counted, lambda: mirror.caught_up)
    uses: dict[str, float] = {}
    pool = WorkerPool(settings.chat_workers)
    callers, placed = Recent[Principal](TokenRow, PersonRow, MemberRow), Recent[Placed](ProjectRow)
    callers.watch(database.sessions)
    placed.watch(database.sessions)
    prices = load_prices(settings.prices_file)
    kept = open_files(database, settings.layout.uploads, settings.files_place, settings.uploads_bytes_max)
    made = Exports(settings.layout.exports)
    works = [
        Work("mirror", mirror.step, settings.mirror_seconds, behind=mirror.behind),
        Work("relay", relay.step, settings.relay_seconds, RELAY_SECONDS_MIN),
        Work("housekeeping", lambda: _clean_up(settings, database, uses, kept, made), HOUSEKEEPING_SECONDS),
        *([kept.arrivals.work] if kept.arrivals is not None else []),
    ]
    accounting = Accounting(database, prices, counted, lambda: works[0].healthy and mirror.caught_up)
    counting = Work("accounting", accounting.step, ACCOUNTING_SECONDS)
    mirror.waiting += [works[1].wake, counting.wake]
    quotas = QuotaWriter(database, cluster, lambda: spent_of(accounting.counted), settings.files_place)
    sealing, reach = sealing_of(settings), Reach(settings.webhook_networks)
    told = Webhooks(Deliveries(database, sealing, reach, counted.webhooks), sealing, reach)
    works += [
        Work("webhooks", told.deliveries.step, DELIVERY_SECONDS, wake=told.deliveries.freed),
        Work("webhooks waiting", told.deliveries.measure, MEASURE_SECONDS),
        Work("waits", lambda: notify_of_waits(database), WAIT_SECONDS),
        counting,
        Work("quotas", quotas.step, QUOTA_SECONDS),
        Work("chat", pool.reap, REAP_SECONDS),
        Work("sweeps", lambda: sweep_controller.step(services), sweep_controller.SWEEP_SECONDS),
    ]
    notifications = None if database.is_sqlite else Notifications(database, hub)
    services = Services(
        settings=settings,
        database=database,
        cluster=cluster,
        hub=hub,
        metrics=counted,
        step_logs=StepLogs(settings.layout),
        mirror=works[0],
        relay=works[1],
        sweeps=works[-1],
        background=Background([*works, *([notifications.work] if notifications is not None else [])]),
        notifications=notifications,
        prices=prices,
        chat=pool,
        base_models=load_models(settings.base_models_file),
        commits=CommitListing(),
        folders=FolderThreads(),
        jobs=JobWriter(database),
        files=kept,
        exports=made,
        inspections=Inspections(),
        rates=RateLimits(settings.requests_per_second, settings.requests_burst),
        streams=OpenStreams(settings.streams_per_person_max),
        callers=callers,
        projects=placed,
        previews=OperatorPreviews(settings),
        webhooks=told,
        sign_in=SignIn(settings, database, Provider(settings)) if settings.oidc_issuer else None,
        token_uses=uses,
    )
    return services


async def _clean_up(settings: Settings, database: Database, uses: dict[str, float], kept: Files, made: Exports) -> bool:
    """Record when tokens were last used, and delete what has expired: Idempotency-Keys, sessions, files, the history of
    old jobs, old webhook deliveries and unused exports."""
    noted = dict(uses)
    async with database.write() as session:
        await token_service.note_uses(session, noted)
        await idempotency.forget(session, time.time() - settings.idempotency_days * 86_400)
        await sessions.forget_expired(session, time.time())
        await forget_old(session, time.time())
    for token_id, at in noted.items():
        if uses.get(token_id) == at:
            del uses[token_id]
    if settings.history_days is not None:
        before = time.time() - settings.history_days * 86_400
        for job_id in await retention.drop_old(database, settings.layout, before):
            log.info("an old job's events and logs are dropped", job=job_id)
        await retention.drop_left(database, settings.layout, before)
    for file_id in await drop_expired(database, kept):
        log.info("a file's time is over", file=file_id)
    await asyncio.to_thread(made.drop_old)
    return False


def _answer_errors(app: FastAPI) -> None:
    async def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        if error.code == "invalid_parameter" and request.url.path.startswith("/v1/"):
            error = invalid_request(error.errors)  # a 400, as OpenAI's clients know it
        if error.status >= 500:
            log.warning("request refused", code=error.code, cause=str(error.__cause__ or "")[:500])
        return problem_response(request, error)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        faults = tuple(_fault(dict(entry)) for entry in error.errors())
        return await refused(request, ApiError("invalid_parameter", f"{faults[0]}", errors=faults))

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return problem_response(request, _of_http(request, error))

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _fault(entry: dict[str, object]) -> Problem:
    place = ".".join(str(part) for part in entry["loc"])  # type: ignore[attr-defined]
    message = str(entry["msg"])
    return Problem(place, message[0].lower() + message[1:])


def _of_http(request: Request, error: HTTPException) -> ApiError:
    """Convert an error that Starlette raised by itself."""
    headers = dict(error.headers or {})
    path, method = request.url.path[:200], request.method
    job, colon, action = path.removeprefix("/api/v1/jobs/").partition(":")
    known = COMMIT_ACTIONS if "/checkpoints/" in job else ACTIONS
    if colon and path.startswith("/api/v1/jobs/") and action not in known and error.status_code in (404, 405):
        return job_not_found(f"{job}:{action}")
    if error.status_code == 404:
        return ApiError(
            "not_found", f"There is nothing at {path}; /api/v1/openapi.json lists the addresses.", headers=headers
        )
    if error.status_code == 405:
        allowed = headers.get("Allow", headers.get("allow", ""))
        return ApiError("method_not_allowed", f"{path} does not know {method}; it knows {allowed}.", headers=headers)
    if error.status_code == 408:
        return ApiError("body_too_slow", str(error.detail), headers={**headers, "Connection": "close"})
    if error.status_code == 413:
        return ApiError("body_too_large", str(error.detail), headers={**headers, "Connection": "close"})
    return ApiError("invalid_document", f"The request can't be read: {error.detail}", headers=headers)


def _version() -> str:
    try:
        return version("muster-train")
    except PackageNotFoundError:
        return "0"
