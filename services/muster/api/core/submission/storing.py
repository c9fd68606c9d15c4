"""New jobs into the database. Those that arrive while others are being committed are committed together: the exchanges
with the server, and its wait for the disk, are paid once for all of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core import idempotency
from muster.api.core.audit import AuditedAct, act_values
from muster.api.core.callers import Principal
from muster.api.core.database.db import Database
from muster.api.core.database.tables import AuditRow, Table
from muster.api.core.events.types import EventType, NewEvent
from muster.api.core.idempotency import AttemptedRequest
from muster.api.core.jobs import repository
from muster.api.core.jobs.repository import NewJob
from muster.api.core.jobs.schemas import job_document
from muster.api.core.submission.drafts import SubmissionDraft
from muster.words.base import dump
from muster.words.prices import Prices
from muster.words.status import JobStatus, Phase

# How many are committed together. More take hardly less of the processor each, and all of them wait for the last.
GROUP_MAX = 20
# Between two groups, where one waits already. A commit takes 2 ms of the processor for one job, 3.4 ms for sixteen: at
# 200 jobs a second this halves how many there are. Twice as long would show in the time of a reply.
PAUSE_SECONDS = 0.01


@dataclass(frozen=True)
class ExtraRows:
    """Extra rows that another module keeps for a job, by the job's id. They are stored in the same transaction, in the
    order in which they refer to each other. `data` and `note` are part of the job's first event."""

    rows: Callable[[str], Sequence[Table]] | None = None
    data: dict[str, Any] = field(default_factory=dict)
    note: str = ""


NO_EXTRA_ROWS = ExtraRows()


@dataclass(frozen=True)
class AcceptedJob:
    """A job that may be stored, with its first event, its line of the audit and the reply to whoever submitted it."""

    job: NewJob
    created: NewEvent
    audit: dict[str, Any]
    document: dict[str, Any]
    caller: Principal
    drafted: SubmissionDraft
    attempted: AttemptedRequest | None
    extra: ExtraRows

    @property
    def needs_more(self) -> bool:
        """Return whether storing the job reads, locks or writes more than every job does."""
        return bool(self.drafted.conditions or self.drafted.companions) or self.extra.rows is not None


def accepted(
    caller: Principal, drafted: SubmissionDraft, attempted: AttemptedRequest | None, extra: ExtraRows, job_id: str
) -> AcceptedJob:
    now = time.time()
    program = drafted.spec.program
    after = program.after if program is not None else None
    if after is None:
        status = JobStatus(code="Submitted", because="waiting to be handed to the operator", queued_at=now, since=now)
    else:
        status = JobStatus(
            phase=Phase.RUNNING,
            code="Evaluating",
            because=f"looks for the checkpoints of job {after.job}",
            queued_at=now,
            started_at=now,
            since=now,
        )
    job = NewJob(
        id=job_id,
        namespace=drafted.namespace,
        name=drafted.name,
        project=drafted.project,
        owner=caller.person,
        labels=drafted.labels,
        spec=dump(drafted.spec),
        priority=drafted.spec.priority,
        created_at=now,
        status=dump(status),
        relayed_version=0 if after is None else 1,  # an evaluation is the API's own, and never handed over
    )
    data = {"name": job.name, "namespace": job.namespace} | extra.data
    created = NewEvent(EventType.JOB_CREATED, now, f"job {job.name} was submitted{extra.note}", data=data)
    audit = act_values(caller, AuditedAct("job.submitted", job.id, job.project, after=data))
    document = job_document(repository.new_row(job), Prices(), caller.person)  # nothing has been spent yet
    return AcceptedJob(job, created, audit, document, caller, drafted, attempted, extra)


class JobWriter:
    """Stores jobs, each of them wholly or not at all, and answers when that is durable."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: deque[tuple[AcceptedJob, asyncio.Future[None]]] = deque()
        self._writing: asyncio.Task[None] | None = None

    async def store(self, new: AcceptedJob) -> None:
        """Raises IntegrityError where its key was used before, or its name is a live job's; ApiError of its
        conditions and companions. Then nothing was stored."""
        if new.needs_more:
            await self._commit([new])
            return
        stored = asyncio.get_running_loop().create_future()
        self._waiting.append((new, stored))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        await stored

    async def _write(self) -> None:
        """Commit what waits, group after group, until nothing does."""
        try:
            while self._waiting:
                size = min(GROUP_MAX, len(self._waiting))
                await self._store_group([self._waiting.popleft() for _ in range(size)])
                if self._waiting:
                    await asyncio.sleep(PAUSE_SECONDS)
        finally:
            self._writing = None

    async def _store_group(self, group: Sequence[tuple[AcceptedJob, asyncio.Future[None]]]) -> None:
        try:
            await self._commit([new for new, _ in group])
        except IntegrityError as error:
            if len(group) > 1:  # of one of them, and each alone shows of which
                await asyncio.gather(*(self._store_group([each]) for each in group))
                return
            _end(group, error)
        except BaseException as error:
            _end(group, error)
            if not isinstance(error, Exception):
                raise
        else:
            _end(group, None)

    async def _commit(self, group: Sequence[AcceptedJob]) -> None:
        async with self._database.write() as session:
            await _store(session, group)


def _end(group: Sequence[tuple[AcceptedJob, asyncio.Future[None]]], error: BaseException | None) -> None:
    for _, stored in group:
        if stored.done():  # whoever waited was cancelled
            continue
        if error is None:
            stored.set_result(None)
        elif isinstance(error, Exception):
            stored.set_exception(error)
        else:
            stored.cancel()


async def _store(session: AsyncSession, group: Sequence[AcceptedJob]) -> None:
    """Store the jobs. All processes take the names in one order, and then the keys: else two groups could wait for each
    other."""
    for new in group:
        for condition in new.drafted.conditions:
            await condition(session)
    await repository.insert(session, sorted(((new.job, new.created) for new in group), key=lambda pair: pair[0].key))
    for new in group:
        for more in new.extra.rows(new.job.id) if new.extra.rows is not None else ():
            session.add(more)
            await session.flush()
        for companion in new.drafted.companions:
            await companion(session, new.job.id)
    await session.execute(insert(AuditRow.__table__), [new.audit for new in group])  # type: ignore[arg-type]
    await idempotency.remember(
        session, [(new.attempted, new.job.id, new.document) for new in group if new.attempted is not None]
    )
