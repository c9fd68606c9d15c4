"""Operations on jobs. Each is one transaction; the relay carries it to the cluster afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from muster.api.core.access import checked
from muster.api.core.audit import AuditedAct, record
from muster.api.core.callers import Principal
from muster.api.core.database.tables import JobRow
from muster.api.core.errors import ApiError
from muster.api.core.events import repository as events
from muster.api.core.events.types import EventType, NewEvent
from muster.api.core.jobs import repository
from muster.api.core.services import Services
from muster.words.status import Phase


async def cancel(services: Services, caller: Principal, job_id: str, reason: str = "") -> JobRow:
    """Ask for the job's end. `reason` is given where something other than the job's user asks for it."""

    def request(row: JobRow) -> NewEvent | None:
        if row.spec.get("cancel") or row.phase == Phase.CANCELLED:
            return None
        _refuse_finished(row, "can't be cancelled any more")
        row.spec = {**row.spec, "cancel": True, **({"cancelReason": reason} if reason else {})}
        words = "cancellation was asked for" + (f": {reason}" if reason else "")
        return NewEvent(EventType.JOB_CANCEL_REQUESTED, time.time(), words)

    return await _change(services, caller, job_id, request)


async def suspend(services: Services, caller: Principal, job_id: str) -> JobRow:
    def request(row: JobRow) -> NewEvent | None:
        _refuse_ended(row, "can't be suspended")
        if row.spec.get("suspend"):
            return None
        row.spec = {**row.spec, "suspend": True}
        return NewEvent(EventType.JOB_SUSPEND_REQUESTED, time.time(), "suspension was asked for")

    return await _change(services, caller, job_id, request)


async def resume(services: Services, caller: Principal, job_id: str) -> JobRow:
    def request(row: JobRow) -> NewEvent | None:
        _refuse_ended(row, "can't be resumed; run it again with `muster clone`")
        if not row.spec.get("suspend"):
            return None
        row.spec = {**row.spec, "suspend": False}
        return NewEvent(EventType.JOB_RESUME_REQUESTED, time.time(), "the job may go on")

    return await _change(services, caller, job_id, request)


async def _change(
    services: Services, caller: Principal, job_id: str, request: Callable[[JobRow], NewEvent | None]
) -> JobRow:
    """Change what is wanted of the job, with its event, in one commit.

    A request that the row holds already is handed over once more and is no event: somebody may have edited the spec in
    the cluster since, and repeating it changes nothing where nobody has.
    """
    async with services.database.write() as session:
        row = checked(caller, await repository.get(session, job_id, lock=True), job_id, act=True)
        before = _requested_flags(row)
        event = request(row)
        if event is not None:
            row.spec_version += 1
            record(session, caller, AuditedAct(event.type, row.id, row.project, before, _requested_flags(row)))
        elif row.live:
            row.relayed_version = row.spec_version - 1
        if (row.spec.get("program") or {}).get("after"):  # an evaluation, which the cluster never has
            row.relayed_version = row.spec_version
        row.relay_failures, row.relay_after = 0, 0.0
        await session.flush()
        await events.append(session, row.id, [event] if event else [])
    services.relay.wake.set()
    services.hub.tell(job_id)
    return row


def _requested_flags(row: JobRow) -> dict[str, Any]:
    return {key: bool(row.spec.get(key)) for key in ("suspend", "cancel")}


def _refuse_finished(row: JobRow, what: str) -> None:
    if not row.live:
        detail = f"Job {row.name!r} is {row.phase}, so it {what}."
        raise ApiError("job_finished", detail, extra={"jobId": row.id, "phase": row.phase})


def _refuse_ended(row: JobRow, what: str) -> None:
    _refuse_finished(row, what)
    if row.spec.get("cancel"):
        detail = f"Job {row.name!r} is being cancelled, so it {what}."
        raise ApiError("job_cancelling", detail, extra={"jobId": row.id, "phase": row.phase})
