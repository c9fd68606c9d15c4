"""`/compare?jobs=a,b`: several jobs' curves over one another, what they differ in and which did best."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from markupsafe import Markup

from muster.charts import svg
from muster.web import api
from muster.web.api import ApiError, CurveQuery, JobRow, Principal, Services, ServicesDependency
from muster.web.chart_data import sources
from muster.web.comparing import differences, scores
from muster.web.rendering import clip, page
from muster.web.session import Visitor

router = APIRouter(include_in_schema=False)

JOBS_MAX = 20  # eight colours, and their lines in up to three kinds of dashes
_POINTS = 3_200  # of all jobs together, so that the page stays light
_POINTS_MAX = 400  # of one


@router.get("/compare")
async def compare(
    request: Request,
    services: ServicesDependency,
    visitor: Visitor,
    jobs: Annotated[
        list[str] | None, Query(description="Names or ids, with commas or blanks between them or repeated.")
    ] = None,
) -> Response:
    """A job that is not there, or that one may not see, is said to be not found, and the others are shown."""
    asked = list(dict.fromkeys(name for part in jobs or [] for name in re.split(r"[,\s]+", part) if name))
    rows, missing = await _rows_of(services, visitor, asked[:JOBS_MAX])
    documents = [api.document(services, visitor, row) for row in rows]
    points = min(_POINTS_MAX, _POINTS // max(1, len(rows)))
    curves = await asyncio.gather(*(api.curves(services, visitor, row.id, CurveQuery(points)) for row in rows))
    results = [await api.results(services, row) for row in rows]
    return page(
        request,
        "compare.html",
        visitor,
        current="compare",
        asked=[*await _names(services, visitor, rows), *missing, *asked[JOBS_MAX:]],
        jobs=documents,
        missing=missing,
        left_out=asked[JOBS_MAX:],
        shared=",".join(row.id for row in rows),
        differences=differences([document["spec"] for document in documents]),
        scores=scores(documents, curves, results),
        sources=sources([(row, each) for row, each in zip(rows, curves, strict=True)]),
        stills=[_still(row, each) for row, each in zip(rows, curves, strict=True)],
        live=any(row.live for row in rows),
    )


async def _names(services: Services, visitor: Principal, rows: list[JobRow]) -> list[str]:
    """Return what to write for each job: its name where that means this very job, or else its id."""
    meant = [await api.find_visible(services, visitor, row.name) for row in rows]
    return [row.name if newest.id == row.id else row.id for row, newest in zip(rows, meant, strict=True)]


def _still(row: JobRow, curves: dict[str, Any]) -> Markup:
    """The loss for who has no scripts."""
    return Markup(svg.curve(curves, "loss", f"Loss of {clip(row.name)}"))  # noqa: S704


async def _rows_of(services: Services, visitor: Principal, asked: list[str]) -> tuple[list[JobRow], list[str]]:
    rows: dict[str, JobRow] = {}
    missing: list[str] = []
    for name in asked:
        try:
            if not name.isprintable() or len(name) > 255:
                raise ApiError("job_not_found", "That is nobody's name.")
            row = await api.find_visible(services, visitor, name)
        except ApiError as error:
            if error.code != "job_not_found":
                raise
            missing.append(name)
        else:
            rows.setdefault(row.id, row)
    return list(rows.values()), missing
