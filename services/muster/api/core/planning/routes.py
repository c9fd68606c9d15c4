"""`POST /jobs` and `POST /jobs/{id}:clone`: what becomes a job, and what would become of it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from muster.api.core.callers import Caller, writes
from muster.api.core.http.body import read_body
from muster.api.core.http.openapi import EXAMPLE_JOB, body, example_reply, problems
from muster.api.core.http.path_parts import JobId
from muster.api.core.idempotency import IdempotencyKey, attempted
from muster.api.core.jobs import examples
from muster.api.core.planning.whole_plan import whole_plan
from muster.api.core.services import ServicesDependency
from muster.api.core.submission import clone as cloning
from muster.api.core.submission.drafts import SubmissionDraft, parse_submission
from muster.api.core.submission.schemas import CloneRequest, JobDocument, plan_document
from muster.api.core.submission.service import SubmissionService, SubmittedJob
from muster.replies.jobs import Job, Plan

router = APIRouter(prefix="/jobs", tags=["jobs"])

_REFUSED = (
    "invalid_document",
    "name_taken",
    "queue_full",
    "project_not_found",
    "body_too_large",
    "unsupported_media_type",
    "invalid_job",
    "idempotency_key_reused",
)
_NOTE = "The whole TrainingJob. Unknown keys are refused with their path."
_PLAN: dict[str, Any] = plan_document(
    SubmissionDraft(
        examples.EXAMPLE_SUBMISSION.name,
        "default",
        "default",
        examples.EXAMPLE_SUBMISSION.labels,
        examples.EXAMPLE_SUBMISSION.spec,
    ),
    [],
    {
        "verdict": "preempts",
        "code": "AwaitingPreemption",
        "because": "gang needs 2 nodes with 1 GPU each; a gang of another project is asked to commit and make room",
        "nodes": 0,
        "allowedBy": "the quota of project default (preempts)",
        "evictions": [
            {
                "project": "another project",
                "id": None,
                "job": None,
                "gpus": 2,
                "nodes": 2,
                "nodesKept": 0,
                "uncommittedGpuSeconds": 90.0,
                "restartGpuSeconds": 240.0,
                "because": "which has priority 0 where this job has 5",
            }
        ],
    },
)


@router.post(
    "",
    status_code=201,
    response_model=Job,
    dependencies=[writes],
    summary="Submit a job",
    responses={
        200: {**example_reply(_PLAN, "Dry run"), "model": Plan},
        201: example_reply(examples.JOB, "Stored"),
        **problems(*_REFUSED),
    },
    openapi_extra=body(JobDocument, EXAMPLE_JOB, note=_NOTE),
)
async def submit_job(
    request: Request,
    services: ServicesDependency,
    caller: Caller,
    key: IdempotencyKey,
    dry_run: Annotated[
        bool,
        Query(
            alias="dryRun",
            description="Only say what would happen: the resolved spec, sizes, refusals, what would end the job at its "
            "start, warnings, whether it would start, wait or have others make room, and what it needs, takes and "
            "costs. Some records of its data and the headers of its model are read for it.",
        ),
    ] = False,
) -> JSONResponse:
    """Submits a job. The operator starts it when there is room. With an Idempotency-Key, the request can be repeated
    safely."""
    document, submission = await read_body(request, lambda read: (read.data, parse_submission(read)))
    if dry_run:
        return JSONResponse(await whole_plan(services, caller, submission))
    again = attempted(key, "POST /jobs", document)
    return _created(await services[SubmissionService].submit(caller, submission, again))


def _created(submitted: SubmittedJob) -> JSONResponse:
    headers = {"Location": f"/api/v1/jobs/{submitted.document['id']}"}
    if submitted.replayed:
        headers["Idempotency-Replayed"] = "true"
    return JSONResponse(submitted.document, status_code=201, headers=headers)


@router.post(
    "/{job_id}:clone",
    status_code=201,
    response_model=Job,
    dependencies=[writes],
    summary="Clone a job",
    operation_id="clone_job",
    responses={201: example_reply(examples.JOB, "The new job"), **problems("job_not_found", *_REFUSED)},
    openapi_extra=body(
        CloneRequest, {"name": "stdlib-60m-hot", "spec": {"training": {"optimizer": {"lr": 0.001}}}}, required=False
    ),
)
async def clone_job(
    request: Request, services: ServicesDependency, caller: Caller, job_id: JobId, key: IdempotencyKey
) -> JSONResponse:
    """Submits a new job like this one, with the changes of the body. It starts from scratch, with its own checkpoint
    folder. Values of `runtime.env` are not copied from another person's job: give them again in the body."""
    changes = await read_body(request, cloning.parse_request, optional=True)
    again = attempted(key, "POST /jobs:clone", job_id, changes)
    return _created(await cloning.clone(services, caller, job_id, changes, again))
