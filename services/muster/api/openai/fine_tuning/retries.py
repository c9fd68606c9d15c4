"""Requests of OpenAI's clients, which send no Idempotency-Key but number their retries: known again by their bodies.

Of equal bodies each request that is no retry asks for a job of its own; a retry asks for the newest of them. A request
may also be overtaken by its own retry (the client gave up on a connection that still delivered): what comes soon after
a job that a retry made is taken for the request that the retry repeats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Header
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.callers import Principal
from muster.api.core.database.tables import FineTuneRow, IdempotencyRow
from muster.api.core.idempotency import AttemptedRequest

ROUTE: Final = "POST /v1/fine_tuning/jobs"
# A client retries twice, each time after at most ten minutes without an answer. Half of this would forget the job
# before the last retry; twice as much would answer more requests that mean a new job, and whose first try never came.
RETRY_SECONDS: Final = 1_800.0
# As long as a request may be on its way behind its own retry: the 20 s that a body may take, and a proxy's buffering.
LATE_SECONDS: Final = 60.0
_NUMBER_DIGITS: Final = 8

RetryCount = Annotated[
    int,
    Header(alias="x-stainless-retry-count", ge=0, le=1_000, description="How often OpenAI's client tried before."),
]


@dataclass(frozen=True)
class RepeatableRequest:
    """A request without an Idempotency-Key. `retry` says that its client has sent it before."""

    caller: Principal
    body_hash: str
    retry: bool


@dataclass(frozen=True)
class RequestSlot:
    """Place of a request among those with the same body: the job that it repeats or, if `job_id` is None, the key under
    which it creates its own."""

    job_id: str | None
    attempted: AttemptedRequest


async def slot_of(session: AsyncSession, request: RepeatableRequest, now: float) -> RequestSlot:
    """Two requests that find the same free slot at one moment make one job: the slot's key is unique."""
    prefix = f"body:{request.body_hash}:"
    of_body = (
        IdempotencyRow.owner == request.caller.token,
        IdempotencyRow.route == ROUTE,
        IdempotencyRow.key.startswith(prefix, autoescape=True),
    )
    last = (await session.execute(select(func.max(IdempotencyRow.key)).where(*of_body))).scalar_one_or_none()
    number = int(last.removeprefix(prefix)) + 1 if last else 1
    free = AttemptedRequest(request.caller.token, ROUTE, f"{prefix}{number:0{_NUMBER_DIGITS}}", request.body_hash)
    if last is None:
        return RequestSlot(None, free)
    query = (
        select(IdempotencyRow.job_id, IdempotencyRow.created_at, FineTuneRow.retried)
        .join(FineTuneRow, FineTuneRow.job_id == IdempotencyRow.job_id)
        .where(*of_body, IdempotencyRow.key == last)
    )
    row = (await session.execute(query)).one_or_none()
    if row is None:  # the job was deleted in this moment
        return RequestSlot(None, free)
    job_id, created_at, retried = row
    within = RETRY_SECONDS if request.retry else LATE_SECONDS if retried else -1.0
    return RequestSlot(job_id if now - created_at <= within else None, free)


async def arrived(session: AsyncSession, job_id: str) -> bool:
    """The request that a retry overtook has come. False where another one was taken for it already."""
    seen = update(FineTuneRow).where(FineTuneRow.job_id == job_id, FineTuneRow.retried.is_(True)).values(retried=False)
    return bool((await session.execute(seen.returning(FineTuneRow.job_id))).scalar_one_or_none())
