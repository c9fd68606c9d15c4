"""`/jobs/{id}/curves`: every series over the same axes, thinned on the server, for charts."""

from __future__ import annotations

import math
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from pydantic import Field

from muster.api.core.callers import Caller, reads
from muster.api.core.http.openapi import AT, example_reply, problems
from muster.api.core.http.path_parts import JobId
from muster.api.core.http.reply import Reply
from muster.api.core.metrics import service
from muster.api.core.metrics.curves import CurveQuery
from muster.api.core.metrics.steps import Axis
from muster.api.core.services import ServicesDependency
from muster.words.base import Time
from muster.words.times import rfc3339

router = APIRouter(prefix="/jobs", tags=["jobs"])


class CurveAxes(Reply):
    """Coordinates of the points: the step, the tokens trained up to it, and the seconds since the job's first
    record."""

    step: list[float]
    tokens: list[float]
    seconds: list[float]


class CurveSeries(Reply):
    """A value for each point of the axes, null where there is none. `min` and `max` are there where a point stands for
    several records."""

    mean: list[float | None]
    min: list[float | None] | None = None
    max: list[float | None] | None = None


class EvaluationCurves(Reply):
    axes: CurveAxes
    series: dict[str, CurveSeries]


class AttemptBoundary(Reply):
    """Start of an attempt on each axis, and its outcome. `seconds` is null before the job's first record."""

    number: int
    at: Time | None
    step: int
    tokens: int
    seconds: float | None
    outcome: str
    cause: str | None
    message: str
    lost_steps: int


class Curves(Reply):
    """`total` is how many records the asked part has. While `unread` is not 0, so many bytes of records have not been
    read yet: ask again, and more is there. Series that an objective reports by name begin with `values.`."""

    started_at: Time | None
    total: int
    thinned: bool
    unread: int
    axes: CurveAxes
    series: dict[str, CurveSeries]
    evaluations: EvaluationCurves
    attempts: list[AttemptBoundary] = Field(description="Every attempt, oldest first.")


_EXAMPLE: dict[str, Any] = {
    "startedAt": rfc3339(AT + 9),
    "total": 1_000_000,
    "thinned": True,
    "unread": 0,
    "axes": {"step": [500, 1500], "tokens": [8_192_000, 24_576_000], "seconds": [450.1, 1350.2]},
    "series": {"loss": {"mean": [2.31, 2.02], "min": [2.12, 1.9], "max": [2.6, 2.2]}},
    "evaluations": {
        "axes": {"step": [1000], "tokens": [16_384_000], "seconds": [900.4]},
        "series": {"loss": {"mean": [2.2]}},
    },
    "attempts": [
        {
            "number": 1,
            "at": rfc3339(AT + 1),
            "step": 0,
            "tokens": 0,
            "seconds": -8.0,
            "outcome": "running",
            "cause": None,
            "message": "",
            "lostSteps": 0,
        }
    ],
}


@router.get(
    "/{job_id}/curves",
    response_model=Curves,
    dependencies=[reads],
    summary="Get a job's curves",
    responses={200: example_reply(_EXAMPLE, "Series over steps, tokens and time"), **problems("job_not_found")},
)
async def read_curves(
    services: ServicesDependency,
    caller: Caller,
    job_id: JobId,
    points: Annotated[int, Query(ge=2, le=2_000, description="At most about so many of each series.")] = 500,
    axis: Annotated[Axis, Query(description="What `from` and `to` speak of.")] = "step",
    begin: Annotated[float | None, Query(alias="from", allow_inf_nan=False, description="Only from here on.")] = None,
    end: Annotated[float | None, Query(alias="to", allow_inf_nan=False, description="Only up to here.")] = None,
) -> JSONResponse:
    """Returns the curves of all attempts as one history. A step that was trained again appears as it was trained last.

    A point stands for as many records as are needed to keep within `points`: it gives their mean, minimum and maximum,
    so that no spike is lost. Request a part of the axis to get it in more detail.
    """
    low, high = -math.inf if begin is None else begin, math.inf if end is None else end
    return JSONResponse(await service.curves(services, caller, job_id, CurveQuery(points, axis, low, high)))
