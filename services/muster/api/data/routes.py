"""`/jobs/{id}/data`: what became of the job's data, as its first rank found it when it prepared them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from muster.api.auth import Caller
from muster.api.errors import ApiError
from muster.api.jobs import service
from muster.api.jobs.routes import JobId, reads
from muster.api.jobs.submission import folder_of
from muster.api.openapi import problems, shown
from muster.api.services import ServicesDependency
from muster.contract.address import Address
from muster.contract.base import UserError
from muster.contract.data_report import DATA_REPORT_KEY, DataReport
from muster.storage.errors import NotFound, StorageError
from muster.storage.listing import CommitListing

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
    response_model=DataReport,
    dependencies=[reads],
    summary="Inspect a job's data",
    responses={
        200: shown(_EXAMPLE, "The report"),
        **problems("job_not_found", "data_report_not_found", "storage_unavailable"),
    },
)
async def get_data_report(services: ServicesDependency, caller: Caller, job_id: JobId) -> JSONResponse:
    """Documents, tokens and lengths of each source, what is left out and why. It lies in the job's checkpoint folder
    once the data are prepared."""
    row = await service.find(services, caller, job_id)
    folder = folder_of(row)
    if folder is None:
        raise ApiError("data_report_not_found", f"Job {row.name!r} does not say where it commits.")
    try:
        return JSONResponse(await services.folders.run(folder, _read, services.commits, folder))
    except StorageError as error:
        raise ApiError("storage_unavailable", str(error), headers={"Retry-After": "5"}) from error


def _read(commits: CommitListing, folder: Address) -> Any:
    try:
        text = commits.store(folder).read(DATA_REPORT_KEY, REPORT_BYTES_MAX)
        return DataReport.model_validate_json(text).model_dump(mode="json", by_alias=True)
    except NotFound:
        raise ApiError("data_report_not_found", f"{folder} holds no {DATA_REPORT_KEY} yet.") from None
    except ValidationError as error:
        raise ApiError(
            "data_report_not_found", f"{folder}/{DATA_REPORT_KEY} is damaged: {error.errors()[0]['msg']}"
        ) from None
    except (StorageError, UserError) as error:
        raise ApiError("storage_unavailable", str(error), headers={"Retry-After": "5"}) from error
