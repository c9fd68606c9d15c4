"""`/jobs/{id}/attempts`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from sqlalchemy import select

from muster.api.core.access import find_job
from muster.api.core.callers import Caller, reads
from muster.api.core.database.tables import AttemptRow, JobRow
from muster.api.core.http.openapi import example_reply, problems
from muster.api.core.http.path_parts import JobId
from muster.api.core.jobs.examples import ATTEMPTS, ROW
from muster.api.core.jobs.schemas import cost_document
from muster.api.core.services import ServicesDependency
from muster.documents.prices import load_prices
from muster.replies.jobs import AttemptList
from muster.replies.views import with_times
from muster.words.base import dump
from muster.words.prices import Prices
from muster.words.status import Attempt

router = APIRouter(prefix="/jobs", tags=["jobs"])


_EMPTY = Attempt(number=0, created_at=0.0).model_dump(mode="json", by_alias=True)


def _document(job: JobRow, attempts: list[dict[str, Any]], prices: Prices) -> dict[str, Any]:
    return {
        "items": [{**_EMPTY, **with_times(attempt)} for attempt in attempts],
        "costs": [cost_document(job.status, [attempt], prices) for attempt in attempts],
        "cost": cost_document(job.status, attempts, prices),
    }


@router.get(
    "/{job_id}/attempts",
    response_model=AttemptList,
    dependencies=[reads],
    summary="List a job's attempts",
    responses={
        200: example_reply(
            _document(ROW, [dump(each) for each in ATTEMPTS], load_prices()), "Every attempt, oldest first"
        ),
        **problems("job_not_found"),
    },
)
async def list_attempts(services: ServicesDependency, caller: Caller, job_id: JobId) -> JSONResponse:
    """Returns the attempts of a job: where each ran, from which step, how it ended and what it cost. The job's status
    keeps only the newest fifty."""
    job = await find_job(services, caller, job_id)
    async with services.database.read() as session:
        rows = (
            await session.scalars(select(AttemptRow).where(AttemptRow.job_id == job_id).order_by(AttemptRow.number))
        ).all()
    return JSONResponse(_document(job, [row.body for row in rows], services.prices))
