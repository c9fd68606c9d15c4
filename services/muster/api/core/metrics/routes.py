"""`/jobs/{id}/metrics`: the loss curve and its companions, over all attempts."""

from __future__ import annotations

import math
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from muster.api.core.access import find_job
from muster.api.core.callers import Caller, reads
from muster.api.core.http.openapi import AT, example_reply, problems
from muster.api.core.http.path_parts import JobId
from muster.api.core.metrics.steps import Record, StepLogs, finite_only, thinned
from muster.api.core.services import Services, ServicesDependency
from muster.replies.jobs import History
from muster.replies.views import with_times
from muster.words.times import rfc3339, rfc3339_or_none

router = APIRouter(prefix="/jobs", tags=["jobs"])


_POINT = {
    "type": "step",
    "attempt": 2,
    "step": 124,
    "steps": 200,
    "at": rfc3339(AT + 142),
    "loss": 2.31,
    "gradNorm": 0.84,
    "lr": 0.00021,
    "tokens": 16_384,
    "tokensPerSecond": 18_200.0,
    "stepSeconds": 0.9,
    "dataWaitSeconds": 0.002,
    "memoryBytes": 412_000_000,
}
_EXAMPLE = {
    "points": [_POINT],
    "evaluations": [{"step": 100, "attempt": 2, "loss": 2.4, "at": rfc3339(AT + 120)}],
    "total": 1,
    "downsampled": False,
}


@router.get(
    "/{job_id}/metrics",
    response_model=History,
    dependencies=[reads],
    summary="Get a job's metrics",
    responses={200: example_reply(_EXAMPLE, "Steps, ascending"), **problems("job_not_found")},
)
async def read_metrics(
    services: ServicesDependency,
    caller: Caller,
    job_id: JobId,
    points: Annotated[
        int, Query(ge=1, le=10_000, description="Maximum number of points, evenly spaced, with the first and the last.")
    ] = 500,
    after_step: Annotated[int, Query(alias="afterStep", ge=0, le=2**62, description="Only steps after this one.")] = 0,
) -> JSONResponse:
    """Returns the steps of all attempts as one history. A step that was lost and trained again appears as it was
    trained last.

    Evaluations are downsampled separately. A client that polls with `afterStep` must read again from the resumed step
    when `attempt` grows.
    """
    await find_job(services, caller, job_id)
    return JSONResponse(await run_in_threadpool(_history, services, job_id, points, after_step))


def _history(services: Services, job_id: str, points: int, after_step: int) -> dict[str, Any]:
    history = services[StepLogs].history(job_id)
    # A step 0 is no step: it is the evaluation before training, which is there unless somebody asks for what is new.
    trained, evaluated = history.trained, history.evaluated
    if after_step:
        trained = tuple(span.between("step", after_step + 1, math.inf) for span in trained)
        evaluated = tuple(span.between("step", after_step + 1, math.inf) for span in evaluated)
    total = sum(len(span) for span in trained)
    records = thinned(trained, points)
    return {
        "points": [with_times({**finite_only(record), "attempt": attempt}) for attempt, record in records],
        "evaluations": [_evaluation(attempt, finite_only(record)) for attempt, record in thinned(evaluated, points)],
        "total": total,
        "downsampled": len(records) < total,
    }


def _evaluation(attempt: int, record: Record) -> dict[str, Any]:
    loss, at = record.get("evaluationLoss"), rfc3339_or_none(record.get("at"))
    values = record.get("evaluationValues") or {}
    return {"step": record.get("step"), "attempt": attempt, "loss": loss, "values": values, "at": at}
