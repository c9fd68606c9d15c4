"""`/jobs/{id}/data`: what became of the job's data, as its first rank found it when it prepared them; and
`/jobs:inspect`: what would become of them, before anything is submitted."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from muster.api.core.access import find_job
from muster.api.core.callers import Caller, Scope, needs, reads
from muster.api.core.errors import ApiError
from muster.api.core.http.body import read_body
from muster.api.core.http.openapi import EXAMPLE_JOB, body, example_reply, problems
from muster.api.core.http.path_parts import JobId
from muster.api.core.jobs.repository import folder_of
from muster.api.core.services import ServicesDependency
from muster.api.core.submission.drafts import invalid_job, parse_submission
from muster.api.core.submission.schemas import JobDocument
from muster.api.core.submission.service import SubmissionService
from muster.api.data.inspections.service import DataInspections, Inspection, refuse_what_the_api_may_not_read, with_ids
from muster.recipe.job_inputs import with_addresses
from muster.storage.errors import NotFound, StorageError
from muster.storage.listing import CommitListing
from muster.words.address import StorageAddress
from muster.words.base import DocumentProblem, UserError, dump
from muster.words.data_report import DATA_REPORT_KEY, DataReport
from muster.words.program import NO_DATA_TO_INSPECT

router = APIRouter(prefix="/jobs", tags=["jobs"])

REPORT_BYTES_MAX = 16 << 20  # thousands of sources

_EXAMPLE: dict[str, Any] = {
    "sequenceLength": 2048,
    "samplesPerEpoch": 1_204,
    "samplesPerStep": 32,
    "sources": [
        {
            "source": "s3://data/chat.jsonl",
            "use": "training",
            "format": "openai-chat",
            "documents": 4_800,
            "tokens": 2_419_000,
            "learnt": 1_102_000,
            "lengths": [{"first": 256, "last": 511, "documents": 4_800}],
            "truncated": 12,
            "samples": 1_204,
            "filled": 0.981,
            "looks": {},
            "leftOut": [],
        }
    ],
    "warnings": [],
}


@router.get(
    "/{job_id}/data",
    dependencies=[reads],
    summary="Inspect a job's data",
    responses={
        200: example_reply(_EXAMPLE, "The report"),
        **problems("job_not_found", "data_report_not_found", "storage_unavailable"),
    },
)
async def get_data_report(services: ServicesDependency, caller: Caller, job_id: JobId) -> DataReport:
    """Returns the data report of a job: documents, tokens and lengths of each source, and what is left out and why. The
    report is in the job's checkpoint folder once the data are prepared."""
    row = await find_job(services, caller, job_id)
    folder = folder_of(row)
    if folder is None:
        raise ApiError("data_report_not_found", f"Job {row.name!r} does not say where it commits.")
    try:
        return await services.folders.run(folder, _read, services.commits, folder)
    except StorageError as error:
        raise ApiError("storage_unavailable", str(error), headers={"Retry-After": "5"}) from error


@router.post(
    ":inspect",
    response_model=Inspection,
    dependencies=[Depends(needs(Scope.WRITE))],
    summary="Inspect the data of a job before it is submitted",
    operation_id="inspect_job_data",
    responses={
        200: example_reply({"state": "ready", "report": _EXAMPLE}, "The report; nothing was stored"),
        202: {**example_reply({"state": "reading"}, "They are being read: ask again"), "model": Inspection},
        **problems(
            "invalid_document",
            "body_too_large",
            "unsupported_media_type",
            "invalid_job",
            "project_not_found",
            "inspection_unavailable",
            "storage_unavailable",
        ),
    },
    openapi_extra=body(JobDocument, EXAMPLE_JOB, note="The TrainingJob as it would be submitted."),
)
async def inspect_job_data(request: Request, services: ServicesDependency, caller: Caller) -> JSONResponse:
    """Prepares the data as the job would, and returns its report: counts, lengths, what is left out and why, and the
    first samples as the model would see them. Uploaded files and files under the project's `dataPrefixes` can be read.
    An inspection that takes longer than a request is answered with 202; repeat the request to get the report."""
    submission = await read_body(request, parse_submission)
    drafted = await services[SubmissionService].draft(caller, submission)
    if drafted.faults:
        raise invalid_job(drafted.faults)
    if drafted.spec.program is not None:
        raise invalid_job((DocumentProblem("spec.program", NO_DATA_TO_INSPECT),))
    await refuse_what_the_api_may_not_read(services, drafted)
    spec = with_addresses(drafted.spec, drafted.files)
    ids = {address: file_id for file_id, address in drafted.files.items()}
    try:
        report = await services[DataInspections].look(drafted.project, dump(spec.training_config))
    except ApiError as refused:
        raise with_ids(refused, ids) from None
    if report is None:
        return JSONResponse({"state": "reading"}, status_code=202, headers={"Retry-After": "1"})
    sources = [{**each, "source": ids.get(each["source"], each["source"])} for each in report["sources"]]
    return JSONResponse({"state": "ready", "report": {**report, "sources": sources}})


def _read(commits: CommitListing, folder: StorageAddress) -> DataReport:
    try:
        text = commits.store(folder).read(DATA_REPORT_KEY, REPORT_BYTES_MAX)
        return DataReport.model_validate_json(text)
    except NotFound:
        raise ApiError("data_report_not_found", f"{folder} holds no {DATA_REPORT_KEY} yet.") from None
    except ValidationError as error:
        raise ApiError(
            "data_report_not_found", f"{folder}/{DATA_REPORT_KEY} is damaged: {error.errors()[0]['msg']}"
        ) from None
    except (StorageError, UserError) as error:
        raise ApiError("storage_unavailable", str(error), headers={"Retry-After": "5"}) from error
