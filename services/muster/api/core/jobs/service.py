"""Operations on jobs. Each is one transaction; the relay carries it to the cluster afterwards."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core import idempotency
from muster.api.core.access import checked
from muster.api.core.audit import Act, record
from muster.api.core.callers import Principal
from muster.api.core.database.tables import JobRow
from muster.api.core.errors import ApiError, database_unavailable
from muster.api.core.events import repository as events
from muster.api.core.events.types import EventType, NewEvent
from muster.api.core.idempotency import Attempted
from muster.api.core.jobs import repository
from muster.api.core.jobs.schemas import finding, plan_document
from muster.api.core.services import Services
from muster.api.core.submission.admission import admission
from muster.api.core.submission.drafts import Draft, draft, invalid_job
from muster.api.core.submission.storing import ALONE, Beside, accepted
from muster.api.tenants.projects.quotas import refuse_full_queue
from muster.contract.names import JOB_NAME
from muster.contract.spec import Submission
from muster.contract.status import Phase

_TRIES = 3  # a lost race against another process is looked at anew; the second look finds who won
_NAME_LENGTH_MAX = 48


@dataclass(frozen=True)
class Submitted:
    """A job that was stored. `replayed` says that an earlier request with the same Idempotency-Key stored it."""

    document: dict[str, Any]
    replayed: bool


async def plan(services: Services, caller: Principal, submission: Submission) -> dict[str, Any]:
    """Return what a submission would do, also to other jobs, and why it would be refused. Nothing is written."""
    drafted = await draft(services, caller, submission)
    refusals = [finding("invalid_job", fault) for fault in drafted.faults]
    async with services.database.read() as session:
        taken = await repository.live_with_name(session, drafted.namespace, drafted.name)
        try:
            await refuse_full_queue(session, drafted.project, caller.person)
        except ApiError as full:
            refusals.append({"code": full.code, "path": "metadata.labels", "message": full.detail})
    if taken:
        refusals.append({"code": "name_taken", "path": "metadata.name", "message": _name_taken(drafted, taken).detail})
    return plan_document(drafted, refusals, None if refusals else await admission(services, caller, drafted))


async def submit(
    services: Services, caller: Principal, submission: Submission, attempted: Attempted | None, beside: Beside = ALONE
) -> Submitted:
    """Store the job, its first event and the reply in one commit. Raises ApiError; then nothing was stored."""
    drafted = await draft(services, caller, submission)
    if drafted.faults:
        # What was right when the request first came may be wrong when it is repeated: the first answer holds.
        return await _replay(services, attempted) or _refuse(drafted)
    for _ in range(_TRIES):
        new = accepted(caller, drafted, attempted, beside)
        try:
            await services.jobs.store(new)
        except IntegrityError:  # of the key, which a first try has stored, or of the name
            if replayed := await _replay(services, attempted):
                return replayed
            await _refuse_taken_name(services, drafted)
            continue  # whoever was in the way is gone already
        services.metrics.submissions.inc()
        services.relay.wake.set()
        return Submitted(new.document, replayed=False)
    raise database_unavailable()


async def _replay(services: Services, attempted: Attempted | None) -> Submitted | None:
    """The first reply to this request, if it has been answered before."""
    if attempted is None:
        return None
    async with services.database.read() as session:
        reply = await idempotency.recall(session, attempted)
    return Submitted(reply, replayed=True) if reply is not None else None


def _refuse(drafted: Draft) -> NoReturn:
    raise invalid_job(drafted.faults)


async def _refuse_taken_name(services: Services, drafted: Draft) -> None:
    async with services.database.read() as session:
        holder = await repository.live_with_name(session, drafted.namespace, drafted.name)
    if holder is not None:
        raise _name_taken(drafted, holder)


def _name_taken(drafted: Draft, holder: str) -> ApiError:
    detail = (
        f"Namespace {drafted.namespace!r} has a live job named {drafted.name!r} ({holder}). "
        "Choose another name, or wait for that job or cancel it."
    )
    return ApiError("name_taken", detail, extra={"jobId": holder})


async def find(services: Services, caller: Principal, job_id: str, act: bool = False) -> JobRow:
    """The job, if the caller may see it and, where that is asked for, act on it. Raises ApiError as access.checked."""
    async with services.database.read() as session:
        row = await repository.get(session, job_id)
    return checked(caller, row, job_id, act)


async def cancel(services: Services, caller: Principal, job_id: str) -> JobRow:
    def request(row: JobRow) -> NewEvent | None:
        if row.spec.get("cancel") or row.phase == Phase.CANCELLED:
            return None
        _refuse_finished(row, "can't be cancelled any more")
        row.spec = {**row.spec, "cancel": True}
        return NewEvent(EventType.JOB_CANCEL_REQUESTED, time.time(), "cancellation was asked for")

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
            record(session, caller, Act(event.type, row.id, row.project, before, _requested_flags(row)))
        elif row.live:
            row.relayed_version = row.spec_version - 1
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


async def free_name(session: AsyncSession, row: JobRow) -> str:
    """Return the first free name in the namespace: `demo` → `demo-2`, `demo-2` → `demo-3` …"""
    stem = re.sub(r"-\d{1,6}$", "", row.name)
    taken = await repository.names_like(session, row.namespace, stem[: _NAME_LENGTH_MAX - 7])
    match = re.search(r"-(\d{1,6})$", row.name)
    number = int(match[1]) + 1 if match else 2
    while True:
        suffix = f"-{number}"
        name = stem[: _NAME_LENGTH_MAX - len(suffix)].rstrip("-") + suffix
        if name not in taken and JOB_NAME.fullmatch(name):
            return name
        number += 1
