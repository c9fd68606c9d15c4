"""`/jobs/{id}/attempts`."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from sqlalchemy import select

from muster.api.jobs import service
from muster.api.jobs.examples import ATTEMPTS
from muster.api.jobs.routes import JobId, reads
from muster.api.openapi import problems, shown
from muster.api.reply import Reply
from muster.api.services import Here
from muster.api.tables import AttemptRow
from muster.contract.base import dump
from muster.contract.status import Attempt

router = APIRouter(prefix="/jobs", tags=["jobs"])


class AttemptList(Reply):
    items: list[Attempt]


@router.get(
    "/{job_id}/attempts",
    response_model=AttemptList,
    dependencies=[reads],
    summary="List a job's attempts",
    responses={
        200: shown({"items": [dump(attempt) for attempt in ATTEMPTS]}, "Every attempt, oldest first"),
        **problems("job_not_found"),
    },
)
async def attempts(here: Here, job_id: JobId) -> JSONResponse:
    """Each life of the gang: where it ran, from which step, how it ended, what it cost. The status keeps only fifty."""
    await service.find(here, job_id)
    async with here.database.read() as session:
        rows = (
            await session.scalars(select(AttemptRow).where(AttemptRow.job_id == job_id).order_by(AttemptRow.number))
        ).all()
    return JSONResponse({"items": [{**_EMPTY, **row.body} for row in rows]})


_EMPTY = Attempt(number=0, created_at=0.0).model_dump(mode="json", by_alias=True)
