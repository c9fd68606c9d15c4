"""`/jobs/{id}/samples`: what the model wrote at its evaluations."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import ValidationError

from muster.api.core.access import find_job
from muster.api.core.callers import Caller, reads
from muster.api.core.errors import ApiError
from muster.api.core.http.openapi import AT, example_reply, problems
from muster.api.core.http.path_parts import JobId
from muster.api.core.jobs.repository import folder_of
from muster.api.core.services import ServicesDependency
from muster.replies.jobs import SamplesReply
from muster.storage.errors import NotFound, StorageError, UnfitObject
from muster.storage.listing import CommitListing
from muster.words.address import StorageAddress
from muster.words.base import UserError
from muster.words.samples import SAMPLES, Samples, samples_key, step_of_samples
from muster.words.times import rfc3339

router = APIRouter(prefix="/jobs", tags=["jobs"])

SAMPLES_BYTES_MAX = 4 << 20  # 32 prompts with their answers, several times

_EXAMPLE: dict[str, Any] = {
    "items": [
        {
            "step": 200,
            "attempt": 1,
            "at": rfc3339(AT),
            "samples": [{"prompt": "What is a gang?", "text": "Workers that run together.", "finished": True}],
        }
    ],
    "total": 6,
}


@router.get(
    "/{job_id}/samples",
    dependencies=[reads],
    summary="Read what a job's model wrote",
    responses={200: example_reply(_EXAMPLE, "The samples"), **problems("job_not_found", "storage_unavailable")},
)
async def list_samples(
    services: ServicesDependency,
    caller: Caller,
    job_id: JobId,
    limit: Annotated[int, Query(ge=1, le=100, description="Maximum number of evaluations, newest first.")] = 10,
) -> SamplesReply:
    """Returns the model's continuations of the prompts of `evaluation.generate`, from the newest evaluations. They are
    read from the job's checkpoint folder."""
    row = await find_job(services, caller, job_id)
    folder = folder_of(row)
    if folder is None:
        return SamplesReply(items=[], total=0)
    return await asyncio.to_thread(_read, services.commits, folder, limit)


def _read(commits: CommitListing, folder: StorageAddress, limit: int) -> SamplesReply:
    try:
        store = commits.store(folder)
        steps = sorted(step for entry in store.objects(SAMPLES) if (step := step_of_samples(entry.key)) is not None)
        items = []
        for step in steps[-limit:]:
            try:
                samples = Samples.model_validate_json(store.read(samples_key(step), SAMPLES_BYTES_MAX))
            except (
                NotFound,
                UnfitObject,
                ValidationError,
            ):  # removed since then, or damaged: the others are still worth showing
                continue
            items.append(samples)
        return SamplesReply(items=items, total=len(steps))
    except (StorageError, UserError) as error:
        raise ApiError("storage_unavailable", str(error), headers={"Retry-After": "5"}) from error
