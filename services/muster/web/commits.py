"""`/jobs/{id}/checkpoints`: a job's commits. One is kept, read again, fetched as a model, or asked in a chat."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from muster.web import api
from muster.web.api import ApiError, ServicesDependency
from muster.web.job import JobId, show
from muster.web.notes import PageNote, go_on
from muster.web.session import Posted, Visitor

router = APIRouter(prefix="/jobs/{job_id}/checkpoints", include_in_schema=False)
chat_router = APIRouter(prefix="/jobs/{job_id}/chat", include_in_schema=False)

LOOK_AGAIN_SECONDS = 2  # while a model is made
_StepNumber = Annotated[int, Path(ge=0, lt=10**18)]


@router.get("")
async def show_commits(request: Request, services: ServicesDependency, visitor: Visitor, job_id: JobId) -> Response:
    row = await api.find(services, visitor, job_id)
    listing = await api.commits(services, visitor, job_id)
    names = sorted({name for commit in listing["items"] for name in commit["metrics"]})[:3]
    evaluated = any(commit["evaluations"] for commit in listing["items"])
    return await show(
        request, services, visitor, row, "checkpoints", commits=listing, metric_names=names, evaluated=evaluated
    )


@chat_router.get("")
async def show_chat(
    request: Request,
    services: ServicesDependency,
    visitor: Visitor,
    job_id: JobId,
    step: Annotated[str, Query(pattern=r"^[0-9]{0,18}$")] = "",
) -> Response:
    """Ask a checkpoint, or two of them side by side. The page's script asks `/v1`, by the session of the browser."""
    row = await api.find(services, visitor, job_id)
    listing = await api.commits(services, visitor, job_id)
    able = [commit for commit in listing["items"] if commit["kind"] != "folder"]
    best = next((commit["step"] for commit in reversed(able) if commit["best"]), able[-1]["step"] if able else None)
    chosen = next((commit["step"] for commit in able if str(commit["step"]) == step), best)
    training = row.spec.get("training") or {}
    return await show(
        request,
        services,
        visitor,
        row,
        "chat",
        commits=list(reversed(able)),
        chosen=chosen,
        continues=training.get("task", "pretrain") == "pretrain",
        models=services.settings.chat_workers,
        reason=listing["reason"],
        fault=api.chat_fault(services),
    )


@router.get("/{step}")
async def show_commit(
    request: Request,
    services: ServicesDependency,
    visitor: Visitor,
    job_id: JobId,
    step: Annotated[str, Path(pattern=r"^([0-9]{1,18}|last|best)$")],
) -> Response:
    """Show one checkpoint, read from its folder and checked as it is read."""
    row = await api.find(services, visitor, job_id)
    view = await api.commit(services, visitor, job_id, step)
    return await show(request, services, visitor, row, "commit", commit=view)


@router.get("/{step}/export")
async def export_commit(
    request: Request, services: ServicesDependency, visitor: Visitor, job_id: JobId, step: _StepNumber
) -> Response:
    """The model as an archive. While it is being made, a page that says how far that is and looks again by itself."""
    row = await api.find(services, visitor, job_id)
    reply = await api.fetch_export(request, services, visitor, job_id, step)
    if reply.status_code != 202:
        return reply
    page = await show(request, services, visitor, row, "export", 202, step=step, making=api.document_of(reply))
    page.headers["Refresh"] = str(LOOK_AGAIN_SECONDS)
    return page


@router.post("/{step}/{verb}")
async def act_on_commit(
    services: ServicesDependency,
    form: Posted,
    job_id: JobId,
    step: _StepNumber,
    verb: Annotated[str, Path(pattern="^(pin|unpin|verify)$")],
) -> Response:
    onward = f"/jobs/{job_id}/checkpoints"
    if verb == "verify":
        try:
            bytes_read, seconds = await api.verify_commit(services, form.caller, job_id, step)
        except ApiError as error:
            if error.code not in ("checkpoint_unusable", "storage_unavailable"):
                raise
            return go_on(f"{onward}/{step}", [PageNote(False, error.detail)])
        words = f"Every file of step {step:,} is as it was committed ({bytes_read:,} bytes in {seconds:.1f} s)."
        return go_on(f"{onward}/{step}", [PageNote(True, words)])
    try:
        await api.mark(services, form.caller, job_id, step, verb == "pin")
    except ApiError as error:
        if error.code != "checkpoint_not_found":
            raise
        return go_on(onward, [PageNote(False, error.detail)])  # retention was faster than the reader of the list
    words = "is kept, whatever the retention policy says" if verb == "pin" else "is left to the retention policy again"
    return go_on(onward, [PageNote(True, f"The checkpoint of step {step:,} {words}.")])
