"""Curves for the charts of pages, read by the browser's session: the API's own document of a job, and one curve of
several jobs."""

from __future__ import annotations

import math
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from muster.web import api
from muster.web.api import ApiError, Axis, CurveQuery, ServicesDependency
from muster.web.job import JobId
from muster.web.rendering import compress
from muster.web.session import Visitor

router = APIRouter(include_in_schema=False)
_NOT_KEPT = {"Cache-Control": "no-store"}
_JOBS_MAX = 20


@router.get("/jobs/curves")
async def show_curve_of_several(
    request: Request,
    services: ServicesDependency,
    visitor: Visitor,
    jobs: Annotated[str, Query(max_length=2_000, pattern=r"^[^\x00]*$")],
    name: Annotated[str, Query(max_length=200)] = "loss",
    points: Annotated[int, Query(ge=2, le=1_000)] = 250,
) -> Response:
    """Return one curve of each of the first twenty jobs, by their ids, without those that are not there: `loss`,
    another series of the training by its name, or the `evaluation`'s loss."""
    documents = []
    for job_id in list(dict.fromkeys(jobs.split(",")))[:_JOBS_MAX]:
        try:
            row = await api.find(services, visitor, job_id)
        except ApiError as error:
            if error.code != "job_not_found":
                raise
            continue
        document = await api.curves(services, visitor, row.id, CurveQuery(points, only=name))
        documents.append({"id": row.id, "name": row.name, "live": row.live, "curves": _only(document, name)})
    return compress(request, JSONResponse(documents, headers=_NOT_KEPT))


def _only(document: dict[str, Any], name: str) -> dict[str, Any]:
    """The document of curves with one of them, by its means."""
    evaluates = name == "evaluation"
    source = document["evaluations"] if evaluates else document
    series = source["series"].get("loss" if evaluates else name)
    chosen = {"evaluationLoss" if evaluates else name: {"mean": series["mean"]}} if series else {}
    nothing: dict[str, Any] = {"axes": {axis: [] for axis in source["axes"]}, "series": {}}
    return {**document, "axes": source["axes"], "series": chosen, "evaluations": nothing}


@router.get("/jobs/{job_id}/curves")
async def show_curves(
    request: Request,
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
    return compress(request, JSONResponse(document, headers=_NOT_KEPT))
