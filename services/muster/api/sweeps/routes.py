"""`/sweeps`: create, list, get, cancel."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import JSONResponse

from muster.api.core.callers import Caller, Principal, Scope, needs
from muster.api.core.database.tables import SweepRow
from muster.api.core.http.body import read_body
from muster.api.core.http.openapi import body, example_reply, problems
from muster.api.core.http.paging import cursor_of, seq_of
from muster.api.core.idempotency import IdempotencyKey, attempted
from muster.api.core.services import Services, ServicesDependency
from muster.api.sweeps import examples, repository, service
from muster.api.sweeps.repository import SweepFilter
from muster.api.sweeps.schemas import SweepDocument, sweep_document, sweep_summary
from muster.replies.sweeps import SweepDetail, SweepList

router = APIRouter(prefix="/sweeps", tags=["sweeps"])
reads, writes = Depends(needs(Scope.READ)), Depends(needs(Scope.WRITE))

NO_NUL = r"^[^\x00]*$"  # PostgreSQL has no such text
SweepId = Annotated[str, Path(description="The sweep's id.", min_length=1, max_length=64, pattern=NO_NUL)]
_REFUSED = (
    "invalid_document",
    "invalid_sweep",
    "sweep_name_taken",
    "project_not_found",
    "body_too_large",
    "unsupported_media_type",
    "idempotency_key_reused",
)
_NOTE = "A TrainingJob's document, and above its spec what to try. Every trial is checked."


@router.post(
    "",
    status_code=201,
    response_model=SweepDetail,
    dependencies=[writes],
    summary="Create a sweep",
    responses={201: example_reply(examples.DETAIL, "Stored"), **problems(*_REFUSED)},
    openapi_extra=body(SweepDocument, examples.EXAMPLE_SWEEP, note=_NOTE),
)
async def create_sweep(
    request: Request, services: ServicesDependency, caller: Caller, key: IdempotencyKey
) -> JSONResponse:
    """Creates a sweep. Its trials are submitted as jobs of the caller, at most as many at once as the sweep says. With
    an Idempotency-Key, the request can be repeated safely."""
    document = await read_body(request, lambda read: read)
    created = await service.create(services, caller, document, attempted(key, "POST /sweeps", document.data))
    headers = {"Location": f"/api/v1/sweeps/{created.row.id}"}
    if created.replayed:
        headers["Idempotency-Replayed"] = "true"
    return JSONResponse(await _document(services, caller, created.row), status_code=201, headers=headers)


@router.get(
    "",
    response_model=SweepList,
    dependencies=[reads],
    summary="List sweeps",
    responses={
        200: example_reply({"items": [examples.SUMMARY], "nextCursor": None}, "A page, newest first"),
        **problems("invalid_cursor", "invalid_parameter"),
    },
)
async def list_sweeps(
    services: ServicesDependency,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=500, description="Sweeps per page.")] = 50,
    cursor: Annotated[str | None, Query(max_length=200, description="`nextCursor` of the page before.")] = None,
    project: Annotated[str | None, Query(max_length=64, pattern=NO_NUL, description="Only of this project.")] = None,
    name: Annotated[str | None, Query(max_length=64, pattern=NO_NUL, description="Exactly this name.")] = None,
    live: Annotated[bool | None, Query(description="Only sweeps that have not ended (true) or have (false).")] = None,
) -> JSONResponse:
    """Returns the sweeps of the projects that the caller may see, newest first."""
    before = seq_of(cursor) if cursor else None
    chosen = SweepFilter(caller.visible_projects, project, name, live)
    async with services.database.read() as session:
        rows = await repository.page(session, chosen, before, limit + 1)
    more = cursor_of(rows[limit - 1].seq) if len(rows) > limit else None
    return JSONResponse({"items": [sweep_summary(row) for row in rows[:limit]], "nextCursor": more})


@router.get(
    "/{sweep_id}",
    response_model=SweepDetail,
    dependencies=[reads],
    summary="Get a sweep",
    responses={200: example_reply(examples.DETAIL, "The sweep with its trials"), **problems("sweep_not_found")},
)
async def get_sweep(services: ServicesDependency, caller: Caller, sweep_id: SweepId) -> JSONResponse:
    """Returns a sweep: what it tries, each trial with its job and its results, and the best checkpoint."""
    return JSONResponse(await _document(services, caller, await service.find(services, caller, sweep_id)))


@router.post(
    "/{sweep_id}:cancel",
    response_model=SweepDetail,
    dependencies=[writes],
    summary="Cancel a sweep",
    responses={
        200: example_reply(examples.DETAIL, "The sweep, whose trials are being cancelled"),
        **problems("sweep_not_found", "sweep_finished"),
    },
)
async def cancel_sweep(services: ServicesDependency, caller: Caller, sweep_id: SweepId) -> JSONResponse:
    """Cancels a sweep. No more trials start, and running trials are cancelled; their checkpoints are kept. Repeating
    the request is harmless."""
    return JSONResponse(await _document(services, caller, await service.cancel(services, caller, sweep_id)))


async def _document(services: Services, caller: Principal, row: SweepRow) -> dict[str, object]:
    async with services.database.read() as session:
        trials = await repository.trials(session, row.id)
    return sweep_document(row, trials, caller.person)
