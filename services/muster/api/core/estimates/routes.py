"""`POST /jobs:estimate`: memory by part, the cheapest gang that fits, time and price, before anything is submitted."""

from __future__ import annotations

import functools
import os

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from muster.api.core.callers import Caller, Principal, Scope, needs
from muster.api.core.errors import ApiError
from muster.api.core.estimates.records import measured
from muster.api.core.http.body import read_body
from muster.api.core.http.openapi import EXAMPLE_JOB, body, problems, shown
from muster.api.core.services import Services, ServicesDependency
from muster.api.core.submission.drafts import invalid_job, parse_submission
from muster.api.core.submission.schemas import JobDocument
from muster.api.core.submission.service import Submissions
from muster.contract.address import parse_address
from muster.contract.base import Problem, UserError, dump
from muster.contract.estimate import NO_ESTIMATE, Estimate
from muster.contract.job_inputs import with_addresses
from muster.contract.spec import Submission, parse_job
from muster.contract.training import TrainingConfig
from muster.documents.prices import load_prices
from muster.storage.errors import StorageError
from muster.storage.estimating import estimate_with_storage

router = APIRouter(prefix="/jobs", tags=["jobs"])

# A model's headers are some requests to its storage. A client waits 20 seconds for an answer.
SECONDS_MAX = 15.0
_EXAMPLE = dump(estimate_with_storage(parse_job(EXAMPLE_JOB).spec, load_prices(), machine_bytes=16 * 2**30))


@router.post(
    ":estimate",
    response_model=Estimate,
    dependencies=[Depends(needs(Scope.WRITE))],
    summary="Estimate a job",
    operation_id="estimate_job",
    responses={
        200: shown(_EXAMPLE, "Bytes, seconds and money; nothing was stored"),
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


async def estimate(services: Services, caller: Principal, submission: Submission) -> Estimate:
    """Raises ApiError invalid_job and model_unreadable, and what `draft` raises."""
    drafted = await services[Submissions].draft(caller, submission)
    if drafted.faults:
        raise invalid_job(drafted.faults)
    if drafted.spec.training is None:
        raise invalid_job((Problem("spec.program", NO_ESTIMATE),))
    source = drafted.spec.training.model.source
    if source and services.settings.cluster == "kubernetes" and parse_address(source).scheme == "file":
        raise ApiError("model_unreadable", f"{source} lies on the workers' disks, which the API does not see.")
    records = await measured(services.database, caller)
    machine = _machine_bytes() if services.settings.cluster == "local" else None
    spec = with_addresses(drafted.spec, drafted.files)
    folder = parse_address(source or spec.training_config.data.train[0].source)
    work = functools.partial(estimate_with_storage, spec, services.prices, records, machine)
    try:
        return await services.folders.run(folder, work, seconds=SECONDS_MAX)
    except UserError as error:
        raise invalid_job((Problem(_place(drafted.spec.training), str(error)),)) from None
    except StorageError as error:
        raise ApiError("model_unreadable", f"{error}") from None


def _place(training: TrainingConfig) -> str:
    return "spec.training.adapter" if training.adapter and training.model.shape else "spec.training.model"


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
