"""`/healthz`, `/readyz`, `/metrics`, and what each problem code means. No token is needed."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from muster.api.core.callers import bearer
from muster.api.core.errors import KINDS, ApiError
from muster.api.core.http.openapi import example_reply, problems
from muster.api.core.http.reply import Reply, reply_of
from muster.api.core.services import Services, ServicesDependency

router = APIRouter(tags=["health"])


class Alive(Reply):
    status: str


class Check(Reply):
    ok: bool
    detail: str


class Ready(Reply):
    status: str
    checks: dict[str, Check]


class ProblemKind(Reply):
    code: str
    status: int
    title: str
    advice: str


_OK = {"status": "ok", "checks": {name: {"ok": True, "detail": ""} for name in ("database", "mirror", "relay")}}


@router.get(
    "/healthz",
    summary="Is the process alive",
    responses={200: example_reply({"status": "ok"}, "Alive")},
)
async def check_health() -> Alive:
    """Checks that the process answers. The response says nothing about its database."""
    return Alive(status="ok")


@router.get(
    "/readyz",
    summary="Can requests be served",
    responses={
        200: example_reply(_OK, "Everything works"),
        503: {"model": Ready, "description": "Something does not; checks tells what"},
    },
)
async def check_readiness(services: ServicesDependency, response: Response) -> Ready:
    """Checks that the database answers, and that the relay, the mirror, the quotas and the housekeeping make progress.
    The process becomes ready once the mirror has caught up with the cluster: before that, jobs would be shown as they
    were when an API last read them."""
    checks = {
        "database": await _database(services),
        **{work.name: _work(services, work.name) for work in services.background.works if work.needed},
    }
    ok = all(check.ok for check in checks.values())
    response.status_code = 200 if ok else 503
    return Ready(status="ok" if ok else "failing", checks=checks)


async def _database(services: Services) -> Check:
    try:
        await services.database.probe()
    except ApiError as error:
        return Check(ok=False, detail=error.detail)
    return Check(ok=True, detail="")


def _work(services: Services, name: str) -> Check:
    work = next(work for work in services.background.works if work.name == name)
    if not services.background.alive(work):
        return Check(ok=False, detail="does not run")
    behind = work.behind()
    return Check(ok=work.healthy and not behind, detail=work.error or behind)


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={
        200: {"description": "Text exposition format", "content": {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}}
    },
)
async def scrape_metrics(request: Request, services: ServicesDependency) -> Response:
    """Returns the `muster_api_*` metrics of requests, submissions, the relay and the mirror. With a token of an admin,
    of any scope, the response also includes the spending of each project."""
    page = generate_latest(services.metrics.registry)
    if services.settings.metrics_public or await _is_admin(request, services):
        page += generate_latest(services.metrics.of_projects)
    return Response(page, media_type=CONTENT_TYPE_LATEST)


async def _is_admin(request: Request, services: Services) -> bool:
    """Raises ApiError unauthorized for a token that opens nothing, so that whoever set it up hears of that."""
    given = await bearer(request)
    if given is None and services.settings.auth:
        return False
    caller = await services.authenticator.authenticate(request, given)
    return caller.admin and caller.project is None


@router.get(
    "/api/v1/problems/{code}",
    summary="Explain a problem code",
    responses={
        200: example_reply(
            {"code": "name_taken", "status": 409, "title": "A live job has this name", "advice": "…"}, "The code"
        ),
        **{status: reply for status, reply in problems("not_found").items() if status in (404, 422, 500)},
    },
)
async def explain_problem(code: Annotated[str, Path(max_length=64)]) -> ProblemKind:
    """Explains the problem that an error's `type` refers to."""
    kind = KINDS.get(code)
    if kind is None:
        raise ApiError("not_found", f"There is no problem code {code!r}.")
    return reply_of(ProblemKind, kind, code=code)
