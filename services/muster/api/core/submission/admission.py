"""Preview of the queue's decision about a job that is not submitted yet, as its submitter may read it."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.access import named
from muster.api.core.callers import Principal
from muster.api.core.database.db import Database
from muster.api.core.jobs import repository
from muster.api.core.submission.drafts import SubmissionDraft
from muster.api.core.submission.operator_previews import NoPreview, OperatorPreviews
from muster.words.base import dump
from muster.words.preview import Preview, PreviewedEviction, PreviewQuestion

EVICTIONS_LISTED_MAX = 100


async def admission(
    database: Database, previews: OperatorPreviews, caller: Principal, drafted: SubmissionDraft
) -> dict[str, Any]:
    """The operator's answer; where there is none, `verdict` is unknown and `because` says why."""
    if drafted.spec.suspend:
        return _document("suspended", because="it would be suspended, and stand in no queue until it is resumed")
    question = PreviewQuestion(
        namespace=drafted.namespace,
        name=drafted.name,
        project=drafted.project,
        owner=caller.person,
        spec=dump(drafted.spec),
    )
    try:
        preview = await previews.ask(question)
    except NoPreview as unknown:
        return _document("unknown", because=str(unknown))
    if preview.nodes:
        return _document("starts", because=f"there is room on {', '.join(preview.nodes[:3])}", nodes=len(preview.nodes))
    if not preview.evictions:
        return _document("waits", preview.code, preview.because)
    async with database.read() as session:
        evictions = [await _eviction(session, caller, each) for each in preview.evictions[:EVICTIONS_LISTED_MAX]]
    return _preempts(drafted.project, preview, evictions)


def _preempts(project: str, preview: Preview, evictions: list[dict[str, Any]]) -> dict[str, Any]:
    allowed_by = f"the quota of project {project} (preempts)"
    return _document("preempts", preview.code, preview.because, evictions=evictions, allowedBy=allowed_by)


def _document(verdict: str, code: str = "", because: str = "", **more: Any) -> dict[str, Any]:
    empty = {"nodes": 0, "evictions": [], "allowedBy": None}
    return {"verdict": verdict, "code": code, "because": because, **empty, **more}


async def _eviction(session: AsyncSession, caller: Principal, victim: PreviewedEviction) -> dict[str, Any]:
    row = await repository.live_job(session, victim.namespace, victim.name)
    who = named(caller, row.project if row is not None else None, row.id if row is not None else "", victim.name)
    return who | {
        "gpus": victim.gpus,
        "nodes": len(victim.nodes),
        "nodesKept": victim.nodes_kept,
        "uncommittedGpuSeconds": victim.uncommitted_gpu_seconds,
        "restartGpuSeconds": victim.restart_gpu_seconds,
        "because": victim.because,
    }
