"""`/jobs/{id}/checkpoints`: the commits that the job's folder holds now, what each is, and whether it is pinned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path
from fastapi.responses import JSONResponse

from muster.api.core.access import find_job
from muster.api.core.audit import AuditedAct, record
from muster.api.core.callers import Caller, Principal, reads, writes
from muster.api.core.database.tables import JobRow
from muster.api.core.errors import ApiError
from muster.api.core.evaluation_rows import of_checkpoints
from muster.api.core.http.openapi import AT, UID, example_reply, problems
from muster.api.core.http.path_parts import JobId, without_action
from muster.api.core.jobs.repository import folder_of
from muster.api.core.services import Services, ServicesDependency
from muster.replies.jobs import Checkpoint, CheckpointDetail, CheckpointEvaluation, CheckpointList, Pin
from muster.replies.views import commit_view
from muster.storage.commits import InvalidCommit
from muster.storage.errors import NotFound, StorageError, StoreRefusal, UnfitObject
from muster.storage.listing import CommitListing, CommitSummary, read_commit
from muster.storage.pins import pin, pinned, unpin
from muster.words.address import StorageAddress
from muster.words.base import UserError
from muster.words.checkpoint import commit_key
from muster.words.times import rfc3339

router = APIRouter(prefix="/jobs", tags=["jobs"])

Step = Annotated[int, Path(ge=0, lt=10**18, description="Step of the checkpoint.")]


_EXAMPLE: dict[str, Any] = {
    "step": 120,
    "kind": "tensors",
    "attempt": 2,
    "committedAt": rfc3339(AT + 140),
    "worldSize": 2,
    "tokens": 1_966_080,
    "metrics": {"loss": 2.33},
    "best": False,
    "bytes": 14_680_064,
    "addedBytes": 14_680_064,
    "files": 2,
    "pinned": False,
    "evaluations": [
        {
            "evaluation": "arc",
            "evaluationId": "2f0c9a51-6f3e-4a7b-9a55-0d3a3c1f8b52",
            "jobId": "9d1f4c02-7d0b-4d1c-8a43-3b7c6a1e5f20",
            "phase": "Succeeded",
            "results": {"arc_easy/acc": 0.431},
            "reason": None,
        }
    ],
    "uri": f"file:///var/lib/muster/checkpoints/{UID}/commits/step-00000120.json",
}
_DETAIL: dict[str, Any] = {
    **_EXAMPLE,
    "job": "stdlib-60m",
    "jobUid": UID,
    "mesh": {"shard": "fsdp"},
    "files": [
        {
            "key": "step-00000120/attempt-2/shard-00000-of-00002.safetensors",
            "bytes": 7_340_032,
            "checksum": "8e1f2a90",
            "partBytes": 16_777_216,
        }
    ],
    "elements": 1_048_576,
    "tensorBytes": 14_679_040,
    "tensors": {"model/embedding.weight": {"dtype": "F32", "shape": [260, 128], "slices": 2}},
    "cursor": {"seed": 17, "epoch": 0, "sample": 7_680},
    "config": {},
    "architecture": {},
    "versions": {"muster": "0.4.0", "torch": "2.9.0"},
}
_NOT_THERE = "There is no checkpoint of step {step}; if there was one, the retention policy removed it from {folder}."
_UNUSABLE = ("job_not_found", "checkpoint_not_found", "checkpoint_unusable", "storage_unavailable")


@router.get(
    "/{job_id}/checkpoints",
    response_model=CheckpointList,
    dependencies=[reads],
    summary="List a job's checkpoints",
    responses={
        200: example_reply(
            {"uri": f"file:///var/lib/muster/checkpoints/{UID}", "items": [_EXAMPLE], "reason": None},
            "Checkpoints, by step",
        ),
        **problems("job_not_found"),
    },
)
async def list_checkpoints(services: ServicesDependency, caller: Caller, job_id: JobId) -> JSONResponse:
    """Returns the checkpoints that a job can resume or be fine-tuned from. They are read from the job's checkpoint
    folder, so that only published checkpoints are listed."""
    row = await find_job(services, caller, job_id)
    folder = folder_of(row)
    if folder is None:
        return JSONResponse({"uri": None, "items": [], "reason": "the job does not say where it commits"})
    try:
        items = await services.folders.run(folder, _list, services.commits, folder)
    except (StorageError, UserError) as error:
        seen = row.status.get("checkpoint") or {}
        newest = f"; its newest checkpoint is of step {seen['step']}" if "step" in seen else ""
        return JSONResponse({"uri": str(folder), "items": [], "reason": f"{error}{newest}"})
    evaluated = await _evaluations(services, job_id)
    items = [item | {"evaluations": evaluated.get(item["step"], [])} for item in items]
    return JSONResponse({"uri": str(folder), "items": items, "reason": None})


@router.get(
    f"/{{job_id}}/checkpoints/{without_action('step')}",
    response_model=CheckpointDetail,
    dependencies=[reads],
    summary="Inspect a checkpoint",
    responses={200: example_reply(_DETAIL, "The checkpoint"), **problems(*_UNUSABLE)},
)
async def get_checkpoint(
    services: ServicesDependency,
    caller: Caller,
    job_id: JobId,
    step: Annotated[
        str,
        Path(
            description="A step; `last`: the newest; `best`: the one marked best, or the newest where none is.",
            pattern=r"^([0-9]{1,18}|last|best)$",
        ),
    ],
) -> JSONResponse:
    """Returns the content of one checkpoint, which is read from its folder and checked."""
    row = await find_job(services, caller, job_id)
    folder = commit_folder(row)
    with explained(folder):
        detail = await services.folders.run(folder, _inspect, services.commits, row, step)
    evaluated = await _evaluations(services, job_id)
    return JSONResponse(detail | {"evaluations": evaluated.get(detail["step"], [])})


async def _evaluations(services: Services, job_id: str) -> dict[int, list[dict[str, Any]]]:
    """The evaluations of the job's checkpoints, by their steps."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    async with services.database.read() as session:
        rows = await of_checkpoints(session, job_id)
    for run, asked in rows:
        entry = CheckpointEvaluation(
            evaluation=asked.name,
            evaluation_id=asked.id,
            job_id=run.job_id,
            phase=run.phase,
            results=run.results,
            reason=run.fault,
        )
        by_step.setdefault(run.step, []).append(entry.model_dump(mode="json", by_alias=True))
    return by_step


async def mark_commit(services: Services, caller: Principal, job_id: str, step: int, pin: bool) -> dict[str, Any]:
    """Pin, or take the pin back. Raises ApiError as the routes say."""
    row = await find_job(services, caller, job_id, act=True)
    folder = commit_folder(row)
    with explained(folder):
        marked = await services.folders.run(folder, _mark, services.commits, row, step, pin)
    if marked["changed"]:
        done = "pinned" if pin else "unpinned"
        async with services.database.write() as session:
            record(session, caller, AuditedAct(f"checkpoint.{done}", row.id, row.project, after={"step": step}))
    return marked


def _add_verb(verb: Literal["pin", "unpin"], summary: str, story: str) -> None:
    async def act(services: ServicesDependency, caller: Caller, job_id: JobId, step: Step) -> JSONResponse:
        return JSONResponse(await mark_commit(services, caller, job_id, step, verb == "pin"))

    router.post(
        f"/{{job_id}}/checkpoints/{{step}}:{verb}",
        response_model=Pin,
        dependencies=[writes],
        summary=summary,
        description=story,
        operation_id=f"{verb}_checkpoint",
        responses={
            200: example_reply({"step": 120, "pinned": verb == "pin", "changed": True}, "The pin"),
            **problems(*_UNUSABLE),
        },
    )(act)


_add_verb("pin", "Keep a checkpoint", "Keep a checkpoint whatever the retention policy says. Repeating it is harmless.")
_add_verb("unpin", "Take a pin back", "Leave a checkpoint to the retention policy again. Repeating it is harmless.")


def _list(commits: CommitListing, folder: StorageAddress) -> list[dict[str, Any]]:
    commit_list, pins = commits.read(folder), pinned(commits.store(folder))
    return [_document(folder, commit, commit.step in pins) for commit in commit_list]


def _inspect(commits: CommitListing, row: JobRow, chosen: str) -> dict[str, Any]:
    folder = commit_folder(row)
    with explained(folder):
        step = int(chosen) if chosen.isdigit() else _newest(commits.read(folder), chosen == "best", folder)
        store = commits.store(folder)
        best = any(commit.step == step and commit.best for commit in commits.read(folder))
        view = commit_view(read_commit(store, step), best)
        return view | {"pinned": step in pinned(store), "uri": str(folder.child(commit_key(step)))}


def _mark(commits: CommitListing, row: JobRow, step: int, is_pin: bool) -> dict[str, Any]:
    folder = commit_folder(row)
    store = commits.store(folder)
    with explained(folder):
        if not is_pin:
            return {"step": step, "pinned": False, "changed": unpin(store, step)}
        changed = False
        try:
            store.about(commit_key(step))
            changed = pin(store, step)
            store.about(commit_key(step))  # retention may have looked at the pins before this one was among them
        except NotFound as error:
            if changed:
                unpin(store, step)
            raise ApiError("checkpoint_not_found", _NOT_THERE.format(step=step, folder=folder)) from error
        return {"step": step, "pinned": True, "changed": changed}


def _newest(commits: tuple[CommitSummary, ...], best: bool, folder: StorageAddress) -> int:
    if not commits:
        raise ApiError("checkpoint_not_found", f"{folder} holds no checkpoint yet.")
    return next((commit.step for commit in reversed(commits) if commit.best or not best), commits[-1].step)


def commit_folder(row: JobRow) -> StorageAddress:
    if (folder := folder_of(row)) is None:
        raise ApiError("checkpoint_not_found", f"Job {row.name!r} does not say where it commits.")
    return folder


@contextlib.contextmanager
def explained(folder: StorageAddress) -> Iterator[None]:
    """Raise what storage says as the API's refusals."""
    try:
        yield
    except NotFound as error:
        raise ApiError("checkpoint_not_found", str(error)) from error
    except (InvalidCommit, UnfitObject, StoreRefusal, UserError) as error:
        where = "" if str(folder) in str(error) else f"{folder}: "
        raise ApiError("checkpoint_unusable", f"{where}{error}") from error
    except StorageError as error:
        raise ApiError("storage_unavailable", str(error), headers={"Retry-After": "5"}) from error


def _document(folder: StorageAddress, commit: CommitSummary, is_pinned: bool) -> dict[str, Any]:
    checkpoint = Checkpoint(
        step=commit.step,
        kind=commit.kind,
        attempt=commit.attempt,
        committed_at=commit.committed_at,
        world_size=commit.world_size,
        tokens=commit.tokens,
        metrics=commit.metrics,
        best=commit.best,
        bytes=commit.bytes,
        added_bytes=commit.added_bytes,
        files=commit.files,
        pinned=is_pinned,
        evaluations=[],
        uri=str(folder.child(commit_key(commit.step))),
    )
    return checkpoint.model_dump(mode="json", by_alias=True)
