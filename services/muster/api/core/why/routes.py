"""`/jobs/{id}/why`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from muster.api.core.access import find_job
from muster.api.core.callers import Caller, Principal, reads
from muster.api.core.database.tables import JobRow
from muster.api.core.http.openapi import AT, UID, example_reply, problems
from muster.api.core.http.path_parts import JobId
from muster.api.core.jobs import repository
from muster.api.core.jobs.examples import FAILURE
from muster.api.core.metrics.steps import StepLogs
from muster.api.core.metrics.tables import finite
from muster.api.core.mirror import status_of
from muster.api.core.services import Services, ServicesDependency
from muster.api.core.waits.estimates import StartEstimates
from muster.api.core.waits.starts import holder_documents, wait_words
from muster.plan.advice import advice, unreadable
from muster.plan.outcome import best_checkpoint, outcome_warnings
from muster.recipe.document import JobSpec
from muster.replies.jobs import Why
from muster.replies.views import with_times
from muster.words.base import dump
from muster.words.status import Phase, Restarts
from muster.words.times import rfc3339

router = APIRouter(prefix="/jobs", tags=["jobs"])


_EXAMPLE: dict[str, Any] = {
    "id": UID,
    "name": "stdlib-60m",
    "phase": "Restarting",
    "code": "Backoff",
    "because": "attempt 1 failed (infrastructure: worker 1 was killed by signal 9); attempt 2 starts in 1 s",
    "since": rfc3339(AT + 95),
    "attempt": 1,
    "queue": None,
    "lastFailure": dump(FAILURE),
    "retryAt": rfc3339(AT + 96),
    "restarts": {"total": 1, "byCause": {"infrastructure": 1}, "recent": [], "withoutProgress": 0},
    "best": "",
    "warnings": [],
    "next": ["Nothing now: the job restarts by itself."],
}


@router.get(
    "/{job_id}/why",
    response_model=Why,
    dependencies=[reads],
    summary="Explain a job's state",
    responses={200: example_reply(_EXAMPLE, "The reason"), **problems("job_not_found")},
)
async def explain_job(services: ServicesDependency, caller: Caller, job_id: JobId) -> JSONResponse:
    """Returns why a job waits, restarts or failed, and what to do about it."""
    row = await find_job(services, caller, job_id)
    async with services.database.read() as session:
        ahead, queued = await repository.queue_ahead(session, row) if row.phase == Phase.QUEUED else (0, 0)
    waits = row.phase == Phase.QUEUED and row.live
    queue: dict[str, Any] | None = None
    if waits:
        queue = {"position": ahead + 1, "ahead": ahead, "queued": queued}
        queue |= await _expected(services, caller, row, ahead)
    document = _document(row, queue, ahead, services.settings.cluster == "local")
    if row.phase == Phase.SUCCEEDED and row.spec.get("training"):
        document |= await run_in_threadpool(_outcome, services, row)
    return JSONResponse(document)


async def _expected(services: Services, caller: Principal, row: JobRow, ahead: int) -> dict[str, Any]:
    """Return when a queued job is expected to start, and the jobs that it waits for."""
    start = (await services[StartEstimates].of(services)).get(row.id)
    if start is None:  # it waits for something else than nodes
        return {"startsInSeconds": None, "expected": "", "holders": []}
    holders = holder_documents(start, caller, time.time())
    return {"startsInSeconds": start.seconds, "expected": wait_words(start, holders, ahead), "holders": holders}


def _outcome(services: Services, row: JobRow) -> dict[str, Any]:
    """Return what is to be said of a training that succeeded; nothing of one that a newer Muster wrote."""
    status = status_of(row.status)
    try:
        training = JobSpec.model_validate(row.spec).training
    except ValidationError:
        return {}
    if training is None or status is None:
        return {}
    history = services[StepLogs].history(row.id)
    evaluations = [
        (int(record["step"]), loss)
        for span in history.evaluated
        for record in span.records(range(span.begin, span.end))
        if (loss := finite(record.get("evaluationLoss"))) is not None
    ]
    return {
        "best": best_checkpoint(training, status, evaluations),
        "warnings": [*outcome_warnings(training, status, evaluations)],
    }


def _document(row: JobRow, queue: dict[str, Any] | None, ahead: int, one_machine: bool) -> dict[str, Any]:
    status, raw = status_of(row.status), with_times(row.status)
    flags: dict[str, Any] = {
        "suspend": bool(row.spec.get("suspend")),
        "cancel": bool(row.spec.get("cancel")),
        "handed_over": row.relayed_version >= row.spec_version,
    }
    return {
        "id": row.id,
        "name": row.name,
        "phase": row.phase,
        "code": raw.get("code", ""),
        "because": raw.get("because", ""),
        "since": raw.get("since", rfc3339(row.created_at)),
        "attempt": raw.get("attempt", 0),
        "queue": queue,
        "lastFailure": raw.get("lastFailure"),
        "retryAt": raw.get("retryAt"),
        "restarts": raw.get("restarts") or Restarts().model_dump(mode="json", by_alias=True),
        "best": "",
        "warnings": [],
        "next": unreadable(raw)
        if status is None
        else advice(status, **flags, ahead=ahead, spec=row.spec, name=row.name, one_machine=one_machine),
    }
