"""Curves of one job for whoever may see it: thinned records, and where its attempts begin on every axis."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from starlette.concurrency import run_in_threadpool

from muster.api.core.access import find_job
from muster.api.core.callers import Principal
from muster.api.core.database.tables import AttemptRow
from muster.api.core.metrics.curves import CurveQuery, curves_document
from muster.api.core.metrics.steps import StepHistory, StepLogs
from muster.api.core.services import Services
from muster.words.times import epoch_seconds, rfc3339_or_none


async def curves(services: Services, caller: Principal, job_id: str, query: CurveQuery) -> dict[str, Any]:
    """Raises ApiError job_not_found."""
    await find_job(services, caller, job_id)
    async with services.database.read() as session:
        query_attempts = select(AttemptRow.body).where(AttemptRow.job_id == job_id).order_by(AttemptRow.number)
        attempts = list((await session.scalars(query_attempts)).all())
    return await run_in_threadpool(_document, services, job_id, query, attempts)


def _document(services: Services, job_id: str, query: CurveQuery, attempts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    history = services[StepLogs].history(job_id)
    boundaries = [_boundary(attempt, history) for attempt in attempts]
    return {"startedAt": rfc3339_or_none(history.started), **curves_document(history, query), "attempts": boundaries}


def _boundary(attempt: dict[str, Any], history: StepHistory) -> dict[str, Any]:
    """Return the boundary of an attempt, which starts at the step that it resumes from and at the time of its
    creation."""
    step, created = int(attempt.get("resumeStep") or 0), epoch_seconds(attempt.get("createdAt") or 0.0)
    return {
        "number": attempt.get("number"),
        "at": rfc3339_or_none(created),
        "step": step,
        "tokens": tokens_at(history, step),
        "seconds": None if history.started is None else round(created - history.started, 3),
        "outcome": str(attempt.get("outcome") or ""),
        "cause": attempt.get("cause"),
        "message": str(attempt.get("message") or ""),
        "lostSteps": int(attempt.get("lostSteps") or 0),
    }


def tokens_at(history: StepHistory, step: int) -> int:
    """Return the tokens that were trained up to and including the step."""
    for span in reversed(history.trained):
        index = bisect.bisect_right(span.table.steps, step, span.begin, span.end) - 1
        if index >= span.begin:
            return int(span.value("tokens", index))
    return 0
