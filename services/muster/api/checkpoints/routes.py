"""`/jobs/{id}/checkpoints`: the commits that the job's folder holds now."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from muster.api.jobs import service
from muster.api.jobs.examples import AT, UID
from muster.api.jobs.routes import JobId, reads
from muster.api.jobs.submission import folder_of
from muster.api.openapi import problems, shown
from muster.api.reply import Reply
from muster.api.services import ServicesDependency
from muster.contract.address import Address
from muster.contract.base import UserError
from muster.contract.checkpoint import commit_key
from muster.storage.errors import StorageError
from muster.storage.listing import CommitSummary

router = APIRouter(prefix="/jobs", tags=["jobs"])


class Checkpoint(Reply):
    """committed_at: seconds since the epoch. bytes: of all files of the commit. tokens: trained until then."""

    step: int
    attempt: int
    committed_at: float
    world_size: int
    tokens: int
    metrics: dict[str, float]
    best: bool
    bytes: int
    files: int
    uri: str


class CheckpointList(Reply):
    """uri: the job's folder. reason: why the folder could not be looked into."""

    uri: str | None
    items: list[Checkpoint]
    reason: str | None


_EXAMPLE: dict[str, Any] = {
    "step": 120,
    "attempt": 2,
    "committedAt": AT + 140,
    "worldSize": 2,
    "tokens": 1_966_080,
    "metrics": {"loss": 2.33},
    "best": False,
    "bytes": 14_680_064,
    "files": 2,
    "uri": f"file:///var/lib/muster/checkpoints/{UID}/commits/step-00000120.json",
}


@router.get(
    "/{job_id}/checkpoints",
    response_model=CheckpointList,
    dependencies=[reads],
    summary="List a job's checkpoints",
    responses={
        200: shown(
            {"uri": f"file:///var/lib/muster/checkpoints/{UID}", "items": [_EXAMPLE], "reason": None},
            "Commits, by step",
        ),
        **problems("job_not_found"),
    },
)
async def list_checkpoints(services: ServicesDependency, job_id: JobId) -> JSONResponse:
    """What could be resumed or fine-tuned from. Read from the folder itself: only what is committed there exists."""
    row = await service.find(services, job_id)
    folder = folder_of(row)
    if folder is None:
        return JSONResponse({"uri": None, "items": [], "reason": "the job does not say where it commits"})
    try:
        commits = await asyncio.to_thread(services.commits.read, folder)
    except (StorageError, UserError) as error:
        seen = row.status.get("checkpoint") or {}
        newest = f"; its newest commit is of step {seen['step']}" if "step" in seen else ""
        return JSONResponse({"uri": str(folder), "items": [], "reason": f"{error}{newest}"})
    return JSONResponse({"uri": str(folder), "items": [_document(folder, c) for c in commits], "reason": None})


def _document(folder: Address, commit: CommitSummary) -> dict[str, Any]:
    shown = Checkpoint(
        step=commit.step,
        attempt=commit.attempt,
        committed_at=commit.committed_at,
        world_size=commit.world_size,
        tokens=commit.tokens,
        metrics=commit.metrics,
        best=commit.best,
        bytes=commit.bytes,
        files=commit.files,
        uri=str(folder.child(commit_key(commit.step))),
    )
    return shown.model_dump(by_alias=True)
