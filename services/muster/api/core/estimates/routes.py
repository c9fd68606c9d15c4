"""`POST /jobs:estimate`: memory by part, the cheapest gang that fits, time and price, before anything is submitted."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from muster.api.core.callers import Caller, Scope, needs
from muster.api.core.estimates.service import estimate
from muster.api.core.http.body import read_body
from muster.api.core.http.openapi import EXAMPLE_JOB, body, example_reply, problems
from muster.api.core.services import ServicesDependency
from muster.api.core.submission.drafts import parse_submission
from muster.api.core.submission.schemas import JobDocument
from muster.documents.prices import load_prices
from muster.plan.estimate import Estimate
from muster.recipe.document import parse_job
from muster.storage.estimating import estimate_with_storage
from muster.words.base import dump

router = APIRouter(prefix="/jobs", tags=["jobs"])

_EXAMPLE = dump(estimate_with_storage(parse_job(EXAMPLE_JOB).spec, load_prices(), machine_bytes=16 * 2**30))


@router.post(
    ":estimate",
    response_model=Estimate,
    dependencies=[Depends(needs(Scope.WRITE))],
    summary="Estimate a job",
    operation_id="estimate_job",
    responses={
        200: example_reply(_EXAMPLE, "Bytes, seconds and money; nothing was stored"),
        **problems(
            "invalid_document",
            "body_too_large",
            "unsupported_media_type",
            "invalid_job",
            "project_not_found",
            "model_unreadable",
        ),
    },
    openapi_extra=body(JobDocument, EXAMPLE_JOB, note="The TrainingJob as it would be submitted."),
)
async def estimate_job(request: Request, services: ServicesDependency, caller: Caller) -> JSONResponse:
    """Estimates a job: the memory of a rank by part, whether it fits and, if not, the smallest change that would make
    it fit; the cheapest gang of the priced instance types; the time, from measurements of this server's jobs or else
    from published figures; the size of checkpoints; and warnings. Of a model's folder only the headers are read."""
    submission = await read_body(request, parse_submission)
    return JSONResponse(dump(await estimate(services, caller, submission)))
