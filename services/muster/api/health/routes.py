"""`/healthz`, `/readyz`, `/metrics`, and what each problem code means. No token is needed."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from muster.api.errors import KINDS, ApiError
from muster.api.openapi import problems, shown
from muster.api.reply import Reply
from muster.api.services import Services, ServicesDependency

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
    "/healthz", response_model=Alive, summary="Is the process alive", responses={200: shown({"status": "ok"}, "Alive")}
)
async def check_health() -> JSONResponse:
    """The process answers; says nothing about its database."""
    return JSONResponse({"status": "ok"})


@router.get(
    "/readyz",
    response_model=Ready,
    summary="Can requests be served",
    responses={
        200: shown(_OK, "Everything works"),
        503: {"model": Ready, "description": "Something does not; checks tells what"},
    },
)
async def check_readiness(services: ServicesDependency) -> JSONResponse:
    """The database answers, and relay, mirror, quotas and housekeeping make progress. The mirror has caught up with the
    cluster once: before that, jobs would be shown as they were when an API last looked."""
    checks = {
        "database": await _database(services),
        **{work.name: _work(services, work.name) for work in services.background.works if work.needed},
    }
    ok = all(check["ok"] for check in checks.values())
    return JSONResponse({"status": "ok" if ok else "failing", "checks": checks}, status_code=200 if ok else 503)


async def _database(services: Services) -> dict[str, Any]:
    try:
        await services.database.probe()
    except ApiError as error:
        return {"ok": False, "detail": error.detail}
    return {"ok": True, "detail": ""}


def _work(services: Services, name: str) -> dict[str, Any]:
    work = next(work for work in services.background.works if work.name == name)
    if not services.background.alive(work):
        return {"ok": False, "detail": "does not run"}
    behind = work.behind()
    return {"ok": work.healthy and not behind, "detail": work.error or behind}


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={
        200: {"description": "Text exposition format", "content": {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}}
    },
)
async def scrape_metrics(services: ServicesDependency) -> Response:
    """muster_api_*: requests, submissions, relay and mirror."""
    return Response(generate_latest(services.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get(
    "/api/v1/problems/{code}",
    response_model=ProblemKind,
    summary="Explain a problem code",
    responses={
        200: shown(
            {"code": "name_taken", "status": 409, "title": "A live job has this name", "advice": "…"}, "The code"
        ),
        **{status: reply for status, reply in problems("not_found").items() if status in (404, 422, 500)},
    },
)
async def explain_problem(code: Annotated[str, Path(max_length=64)]) -> JSONResponse:
    """What a problem's `type` points at."""
    kind = KINDS.get(code)
    if kind is None:
        raise ApiError("not_found", f"There is no problem code {code!r}.")
    return JSONResponse({"code": code, "status": kind.status, "title": kind.title, "advice": kind.advice})
