"""A job's curves for the charts of its pages: the API's own document, read by the browser's session."""

from __future__ import annotations

import math
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response

from muster.web import api
from muster.web.api import Axis, CurveQuery, ServicesDependency
from muster.web.job import JobId
from muster.web.session import Visitor

router = APIRouter(prefix="/jobs/{job_id}", include_in_schema=False)
_NOT_KEPT = {"Cache-Control": "no-store"}


@router.get("/curves")
async def show_curves(
    services: ServicesDependency,
    visitor: Visitor,
    job_id: JobId,
    points: Annotated[int, Query(ge=2, le=2_000)] = 500,
    axis: Axis = "step",
    begin: Annotated[float | None, Query(alias="from", allow_inf_nan=False)] = None,
    end: Annotated[float | None, Query(alias="to", allow_inf_nan=False)] = None,
) -> Response:
    """Return the same as `GET /api/v1/jobs/{id}/curves`."""
    low, high = -math.inf if begin is None else begin, math.inf if end is None else end
    document = await api.curves(services, visitor, job_id, CurveQuery(points, axis, low, high))
    return JSONResponse(document, headers=_NOT_KEPT)
