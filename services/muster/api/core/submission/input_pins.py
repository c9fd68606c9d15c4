"""Pins of jobs' inputs: a checkpoint that a job will read is spared by retention until the job is over.

A pin is a mark in the checkpoint's folder (storage/readers.py) and a row that says which. The mark is written before
the job is stored, so that there is no moment in which retention could remove what was just promised; it lasts an hour,
and housekeeping renews it as long as the job lives. So a crash at any moment leaves at worst a mark that lapses, or a
row whose mark the next round writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog
from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.database.tables import InputPinRow, JobRow
from muster.api.core.services import Services
from muster.api.core.submission.drafts import InputCommit, SubmissionDraft, invalid_job
from muster.storage import readers
from muster.storage.errors import NotFound, StoreError
from muster.storage.listing import CommitListing
from muster.words.address import parse_address
from muster.words.base import DocumentProblem
from muster.words.checkpoint import commit_key

log = structlog.get_logger("muster.api.inputs")

# How long a mark outlives an API that is down: twice as long keeps disks full of what nobody reads, half of it loses
# inputs of queued jobs over a long weekend.
PIN_SECONDS = 7 * 86_400.0
RENEWAL_SECONDS = 86_400.0
RETRY_SECONDS = 600.0  # after a failed renewal: a folder that may not be written is asked no more often
ROWS_AT_ONCE = 100  # of a round; the next one goes on


async def reserve(services: Services, drafted: SubmissionDraft, job_id: str) -> tuple[SubmissionDraft, str]:
    """Mark the checkpoints that the job will read, and return the draft whose job keeps them, with a note on those that
    could not be kept. Raises ApiError invalid_job for a checkpoint that retention removed since it was looked for."""
    if not drafted.inputs:
        return drafted, ""
    unkept = []
    for each in drafted.inputs:
        try:
            await _in_folder(services, each.folder, _mark, each, job_id)
        except NotFound:
            await release(services, drafted, job_id)
            words = f"the checkpoint of step {each.step} in {each.folder} was just removed by retention; name another"
            raise invalid_job((DocumentProblem(f"{each.path}.step", words),)) from None
        except StoreError as error:
            unkept.append(f"the checkpoint of {each.path} can't be kept from retention yet: {error}")

    async def remember(session: AsyncSession, stored_id: str) -> None:
        rows = [
            InputPinRow(job_id=stored_id, number=number, folder=each.folder, step=each.step, renew_at=0.0)
            for number, each in enumerate(drafted.inputs)
        ]
        session.add_all(rows)
        await session.flush()

    note = "".join(f"; {words}" for words in unkept)[:800]
    return replace(drafted, companions=(*drafted.companions, remember)), note


async def release(services: Services, drafted: SubmissionDraft, job_id: str) -> None:
    """Take the marks of a job back that was not stored; what fails lapses by itself."""
    for each in drafted.inputs:
        await _release(services, each.folder, each.step, job_id)


async def keep_up(services: Services) -> None:
    """Renew the marks of jobs that live, and take those of jobs that are over back."""
    now = time.time()
    due = (
        select(InputPinRow, JobRow.live)
        .outerjoin(JobRow, JobRow.id == InputPinRow.job_id)
        .where(or_(JobRow.live.is_not(True), InputPinRow.renew_at <= now))
        .order_by(InputPinRow.renew_at)
        .limit(ROWS_AT_ONCE)
    )
    async with services.database.read() as session:
        pairs = [(row, bool(live)) for row, live in await session.execute(due)]
    renewed = dict[tuple[str, int], float | None]()
    for row, live in pairs:
        if live:
            renewed[row.job_id, row.number] = now + await _renew(services, row)
        else:
            await _release(services, row.folder, row.step, row.job_id)
            renewed[row.job_id, row.number] = None
    if not renewed:
        return
    async with services.database.write() as session:
        for key, renew_at in renewed.items():
            if (row := await session.get(InputPinRow, key)) is None:
                continue
            if renew_at is None:
                await session.delete(row)
            else:
                row.renew_at = renew_at


async def _renew(services: Services, row: InputPinRow) -> float:
    """Renew a mark; return the seconds until that is due again."""
    try:
        await _in_folder(services, row.folder, _write_mark, row.folder, row.step, row.job_id, PIN_SECONDS)
    except StoreError as error:
        log.warning("an input can't be kept from retention", job=row.job_id, step=row.step, error=str(error))
        return RETRY_SECONDS
    return RENEWAL_SECONDS


async def _release(services: Services, folder: str, step: int, job_id: str) -> None:
    try:
        await _in_folder(services, folder, _drop_mark, folder, step, job_id)
    except StoreError as error:
        log.warning("an input's mark is left to lapse", job=job_id, step=step, error=str(error))


async def _in_folder(services: Services, folder: str, work: Callable[..., None], *arguments: Any) -> None:
    await services.folders.run(parse_address(folder), work, services.commits, *arguments)


def _mark(commits: CommitListing, pin: InputCommit, job_id: str) -> None:
    _write_mark(commits, pin.folder, pin.step, job_id, readers.READ_SECONDS_MAX)
    # Retention may have looked at the marks before this one was among them.
    commits.store(parse_address(pin.folder)).about(commit_key(pin.step))


def _write_mark(commits: CommitListing, folder: str, step: int, job_id: str, seconds: float) -> None:
    readers.reserve(commits.store(parse_address(folder)), step, job_id, seconds)


def _drop_mark(commits: CommitListing, folder: str, step: int, job_id: str) -> None:
    readers.release(commits.store(parse_address(folder)), step, job_id)
