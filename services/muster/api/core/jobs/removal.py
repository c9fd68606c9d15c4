"""`DELETE /jobs/{id}`: an ended job's object, logs and record, and its commits where that is asked for."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Collection
from typing import Any

from sqlalchemy import Text, delete, select, type_coerce

from muster.api.core.access import checked, find_job
from muster.api.core.audit import AuditedAct, record
from muster.api.core.callers import Principal
from muster.api.core.database.tables import JobRow
from muster.api.core.errors import ApiError
from muster.api.core.jobs import repository
from muster.api.core.jobs.repository import folder_of
from muster.api.core.services import Services
from muster.storage.errors import StorageError
from muster.storage.listing import CommitListing
from muster.storage.pins import pinned, steps_of_pins
from muster.words.address import StorageAddress
from muster.words.base import UserError
from muster.words.checkpoint import COMMITS

GONE_SECONDS = 10.0  # for the cluster to let go of an ended job's object: its operator looks every few seconds
DELETE_SECONDS_MAX = 600.0  # of all commits of a job: thousands of objects, one after another


async def remove(services: Services, caller: Principal, job_id: str, with_commits: bool) -> None:
    """Remove the job, the record last: whatever fails before leaves a job that can be removed again.

    Raises ApiError job_not_found, forbidden, job_live, job_needed, job_leaving, storage_unavailable.
    """
    row = await find_job(services, caller, job_id, act=True)
    _refuse_live(row)
    folder = folder_of(row) if with_commits else None
    if folder is not None:
        await _refuse_dependents(services, caller, row)
        await _in_folder(services, folder, _refuse_pins, services.commits, row, folder)
    await _leave_cluster(services, row)
    if folder is not None:
        await _in_folder(services, folder, _delete_commits, services.commits, row, folder, seconds=DELETE_SECONDS_MAX)
    await asyncio.to_thread(shutil.rmtree, services.settings.layout.jobs / row.id, ignore_errors=True)
    async with services.database.write() as session:
        row = checked(caller, await repository.get(session, job_id, lock=True), job_id, act=True)
        _refuse_live(row)
        before = {"name": row.name, "owner": row.owner, "phase": row.phase}
        record(
            session, caller, AuditedAct("job.deleted", row.id, row.project, before, {"checkpoints": not with_commits})
        )
        await session.execute(delete(JobRow).where(JobRow.id == row.id))
    services.hub.tell(job_id)


async def _in_folder(
    services: Services, folder: StorageAddress, work: Callable[..., None], *arguments: Any, seconds: float | None = None
) -> None:
    try:
        await services.folders.run(folder, work, *arguments, seconds=seconds)
    except StorageError as error:
        raise _unavailable(error) from error


def _refuse_live(row: JobRow) -> None:
    if row.live:
        detail = f"Job {row.name!r} has not ended ({row.phase}): cancel it first, and delete it when it has."
        raise ApiError("job_live", detail, extra={"jobId": row.id, "phase": row.phase})


async def _refuse_dependents(services: Services, caller: Principal, row: JobRow) -> None:
    """A job that has not ended may still begin from these commits."""
    named = select(JobRow).where(JobRow.live.is_(True), type_coerce(JobRow.spec, Text).contains(row.id))
    async with services.database.read() as session:
        others = [each for each in await session.scalars(named) if row.id in _origins(each.spec)]
    if others:
        seen = [each.name for each in others if caller.role_in(each.project) is not None]
        names = ", ".join(seen[:5]) or "a job of another project"
        raise ApiError(
            "job_needed", f"The checkpoints of {row.name!r} are what {names} starts from: wait until it has ended."
        )


def _origins(spec: dict[str, Any]) -> str:
    """The folders of commits that a job reads: those that it starts from, its teacher's and its reward model's, the
    inputs of a program, and what it evaluates."""
    training = spec.get("training") or {}
    teacher = (training.get("distillation") or {}).get("teacher") or {}
    scorer = (training.get("grpo") or {}).get("rewardModel") or {}
    sources = ((each.get("from") or {}) for each in (training.get("model") or {}, teacher, scorer))
    program = spec.get("program") or {}
    inputs = (*(program.get("inputs") or {}).values(), program.get("after") or {})
    return " ".join(str(source.get("uri") or "") for source in (*sources, *inputs))


def _refuse_pins(commits: CommitListing, row: JobRow, folder: StorageAddress) -> None:
    try:
        steps = pinned(commits.store(folder))
    except (StorageError, UserError) as error:
        raise _unavailable(error) from error
    _refuse_pinned(row, steps)


def _refuse_pinned(row: JobRow, steps: Collection[int]) -> None:
    if steps:
        numbers = ", ".join(map(str, sorted(steps)[:5]))
        detail = f"Checkpoints of {row.name!r} are pinned (step {numbers}): unpin them, or delete without checkpoints."
        raise ApiError("job_needed", detail)


async def _leave_cluster(services: Services, row: JobRow) -> None:
    """Have the object removed. The record stays until then, because a job that is still in the cluster would be
    restored from it."""
    if row.status_version == 0:
        return
    deadline = asyncio.get_running_loop().time() + GONE_SECONDS
    asked = False
    while not row.deleted:
        if not asked:
            await services.cluster.discard(row.id)
            asked = True
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            detail = f"The cluster still has job {row.name!r}; it has been asked to remove it. Repeat this in a moment."
            raise ApiError("job_leaving", detail, headers={"Retry-After": "2"})
        await services.hub.wait(row.id, min(left, 0.5))
        async with services.database.read() as session:
            row = await repository.get(session, row.id) or row


def _delete_commits(commits: CommitListing, row: JobRow, folder: StorageAddress) -> None:
    """The COMMITs first: half of what they name is never taken for a commit."""
    try:
        store = commits.store(folder)
        keys = [entry.key for entry in store.objects("")]
        # A pin that was made since, or that the listing of pins did not show yet.
        _refuse_pinned(row, steps_of_pins(keys))
        for key in sorted(keys, key=lambda key: not key.startswith(f"{COMMITS}/")):
            store.delete(key)
    except (StorageError, UserError) as error:
        raise _unavailable(error) from error


def _unavailable(error: Exception) -> ApiError:
    return ApiError("storage_unavailable", f"{error}; the job's record is kept.", headers={"Retry-After": "5"})
