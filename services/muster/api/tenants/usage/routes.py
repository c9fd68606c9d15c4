"""`/projects/{project}/usage`: what a project used, as JSON or CSV."""

from __future__ import annotations

import csv
import io
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse

from muster.api.core.access import project_not_found, project_role
from muster.api.core.callers import Caller, Scope, needs
from muster.api.core.database.tables import ProjectRow
from muster.api.core.errors import ApiError
from muster.api.core.http.openapi import example_reply, problems
from muster.api.core.http.path_parts import ProjectName
from muster.api.core.roles import Role
from muster.api.core.services import Services, ServicesDependency
from muster.api.tenants.usage import repository
from muster.plan.usage import COLUMNS, HeldNodes, Usage, usage
from muster.words.base import DocumentProblem
from muster.words.months import month_of, month_range
from muster.words.prices import InstancePrice, Prices
from muster.words.times import epoch_seconds

DAYS_MAX = 400  # of a report: over a year, so that one can be compared with the last
router = APIRouter(prefix="/projects", tags=["projects"])


class ProjectUsage(Usage):
    """The usage of one project."""

    project: str


_EXAMPLE_NODES = HeldNodes(
    "6d4b4c1e-5b6e-4a0e-9a3e-0c8f7c1f2a11", "chat-sft", "ann", 1_793_530_000.0, 1_793_537_200.0, 2, 8, 0.0
)
_TABLE = Prices(region="us-east-1", types={"*": InstancePrice(gpus=8, on_demand=55.04)})


def _document(project: str, made: Usage) -> dict[str, Any]:
    return {"project": project, **made.model_dump(mode="json", by_alias=True)}


_EXAMPLE = _document("nlp", usage([_EXAMPLE_NODES], _TABLE, *month_range("2026-11"), 1_793_600_000.0))
_CSV = {"schema": {"type": "string"}, "example": f"{','.join(COLUMNS)}\n"}


@router.get(
    "/{project}/usage",
    response_model=ProjectUsage,
    dependencies=[Depends(needs(Scope.READ))],
    summary="Show what a project used",
    responses={
        200: {"description": "Usage", "content": example_reply(_EXAMPLE)["content"] | {"text/csv": _CSV}},
        **problems("project_not_found"),
    },
)
async def read_usage(
    request: Request,
    services: ServicesDependency,
    caller: Caller,
    project: ProjectName,
    month: Annotated[str | None, Query(max_length=7, description="A month in UTC, such as 2026-11.")] = None,
    since: Annotated[str | None, Query(max_length=40, description="Or a range: from this time, RFC 3339.")] = None,
    until: Annotated[str | None, Query(max_length=40, description="Until this time; left out, until now.")] = None,
    form: Annotated[
        Literal["json", "csv"] | None, Query(alias="format", description="Left out, what `Accept` asks for.")
    ] = None,
) -> Response:
    """Returns the GPU-hours and CPU-hours, their price, what spot nodes saved and what failures lost, by month (UTC),
    person and job.

    Without a month or a range, the response is for the current month. Jobs whose records are deleted are included. CSV
    contains only the lines.
    """
    project_role(caller, project, Role.VIEWER)
    now = time.time()
    begins, ends = _range(month, since, until, now)
    async with services.database.read() as session:
        if await session.get(ProjectRow, project) is None:
            raise project_not_found(project)
        spans = await repository.held_by(session, project, begins, ends)
    made = _with_lag(services, usage(spans, services.prices, begins, ends, now))
    headers = {"Vary": "Accept"}
    if form == "csv" or (form is None and "text/csv" in request.headers.get("accept", "")):
        return Response(_csv(project, made), media_type="text/csv", headers=headers)
    return JSONResponse(_document(project, made), headers=headers)


def _range(month: str | None, since: str | None, until: str | None, now: float) -> tuple[float, float]:
    """The first moment and the one after the last. Raises ApiError invalid_parameter."""
    if month is not None and (since, until) != (None, None):
        raise _refused("month", "stands for a range of its own: leave it or since and until out")
    if month is not None or since is None:
        if until is not None:
            raise _refused("until", "needs since beside it")
        try:
            return month_range(month or month_of(now))
        except ValueError as error:
            raise _refused("month", str(error)) from None
    begins, ends = _time("since", since), _time("until", until) if until is not None else now
    if not begins < ends:
        raise _refused("since", "must be before until")
    if ends - begins > DAYS_MAX * 86_400:
        raise _refused("since", f"may be at most {DAYS_MAX} days before until: ask for the years one by one")
    return begins, ends


def _time(name: str, text: str) -> float:
    try:
        return epoch_seconds(text)
    except ValueError as error:
        raise _refused(name, str(error)) from None


def _refused(name: str, words: str) -> ApiError:
    fault = DocumentProblem(f"query.{name}", words)
    return ApiError("invalid_parameter", f"{fault}", errors=(fault,))


def _with_lag(services: Services, made: Usage) -> Usage:
    if services.mirror.healthy:
        return made
    late = "the cluster has not been heard of for a while, so what ended or began since is not in here"
    return made.model_copy(update={"notes": (late, *made.notes)})


def _csv(project: str, made: Usage) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for line in made.lines:
        cells = {**line.model_dump(), "project": project}
        writer.writerow(cells[column] for column in COLUMNS)
    return text.getvalue()
