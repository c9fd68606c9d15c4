"""`/compare?jobs=a,b`: several jobs' curves over one another, what they differ in and which did best."""

from __future__ import annotations

import asyncio
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

JOBS_MAX = 8  # as many as there are colours that everybody can tell apart
_POINTS = 400


@router.get("/compare")
async def compare(
    request: Request,
    services: ServicesDependency,
    visitor: Visitor,
    jobs: Annotated[list[str] | None, Query(description="Names or ids, with commas between them or repeated.")] = None,
) -> Response:
    """A job that is not there, or that one may not see, is said to be not found, and the others are shown."""
    asked = list(dict.fromkeys(name.strip() for part in jobs or [] for name in part.split(",") if name.strip()))
    rows, missing = await _found(services, visitor, asked[:JOBS_MAX])
    documents = [api.document(services, visitor, row) for row in rows]
    curves = await asyncio.gather(*(api.curves(services, visitor, row.id, CurveQuery(_POINTS)) for row in rows))
    results = [await api.results(services, row) for row in rows]
    return page(
        request,
        "compare.html",
        visitor,
        current="compare",
        asked=asked,
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


def _still(row: JobRow, curves: dict[str, Any]) -> Markup:
    """The loss for who has no scripts."""
    return Markup(svg.curve(curves, "loss", f"Loss of {clip(row.name)}"))  # noqa: S704


async def _found(services: Services, visitor: Principal, asked: list[str]) -> tuple[list[JobRow], list[str]]:
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
