"""Rows to cluster. The row is the outbox: what it wants is repeated, harmlessly, until the cluster has it.

A job that was in the cluster once is never made again: the mirror catches up with the cluster's history before the
relay starts, so a row knows whether its job has been there, whatever crashed in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog
from sqlalchemy import bindparam, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.clock import now_in
from muster.api.core.cluster.cluster import ApplyOutcome, ApplyResult, DesiredJob, JobCluster
from muster.api.core.database.db import Database
from muster.api.core.database.tables import JobFileRow, JobRow
from muster.api.core.events import repository as events
from muster.api.core.events.types import EventType, NewEvent
from muster.api.core.hub import NotificationHub
from muster.api.core.observability import ApiMetrics
from muster.recipe.document import JobSpec
from muster.recipe.job_inputs import with_addresses
from muster.words.base import InvalidDocument, parse
from muster.words.names import Label
from muster.words.redaction import redact_values, secrets_in
from muster.words.status import Phase
from muster.words.times import rfc3339

log = structlog.get_logger("muster.api.relay")

BATCH = 100
BACKOFF_SECONDS = 0.2
BACKOFF_SECONDS_MAX = 30.0


class JobRelay:
    """Hands rows over to the cluster once the mirror has `caught_up`, that is, has read all that the cluster has."""

    def __init__(
        self,
        database: Database,
        cluster: JobCluster,
        hub: NotificationHub,
        metrics: ApiMetrics,
        caught_up: Callable[[], bool],
    ) -> None:
        self._database, self._cluster, self._hub, self._metrics = database, cluster, hub, metrics
        self._caught_up = caught_up

    async def step(self) -> bool:
        """Hand over one batch; True when there may be more."""
        if not self._caught_up():
            return False
        rows = await self._waiting()
        self._metrics.relay_waiting.set(len(rows))
        if not rows:
            return False
        results = await self._apply(rows)
        by_id = {row.id: row for row in rows}
        lost_names = await self._names(by_id, results)
        async with self._database.write() as session:
            await _note_done(
                session, [by_id[a.uid] for a in results if a.outcome in (ApplyOutcome.DONE, ApplyOutcome.GONE)]
            )
            for result in results:
                if result.uid in lost_names:
                    await _fail(session, by_id[result.uid], result.holder)
                elif result.outcome in (ApplyOutcome.RETRY, ApplyOutcome.NAME_HELD):
                    await self._later(session, by_id[result.uid], result)
        self._metrics.relayed.inc(sum(result.outcome == ApplyOutcome.DONE for result in results))
        for result in results:
            self._hub.tell(result.uid)
        return len(rows) == BATCH

    async def _apply(self, rows: Sequence[JobRow]) -> list[ApplyResult]:
        """A row whose spec can't be read, which somebody made in the cluster, does not keep the others waiting."""
        desired, unreadable = [], []
        async with self._database.read() as session:
            files = await _file_addresses(session, [row.id for row in rows])
        for row in rows:
            try:
                desired.append(_desired_job(row, files.get(row.id, {})))
            except InvalidDocument as invalid:
                unreadable.append(
                    ApplyResult(row.id, ApplyOutcome.RETRY, error=f"its spec can't be read: {invalid}"[:300])
                )
        return [*unreadable, *await self._cluster.apply(desired)]

    async def _waiting(self) -> list[JobRow]:
        async with self._database.read() as session:
            query = (
                select(JobRow)
                .where(JobRow.relayed_version < JobRow.spec_version, JobRow.relay_after <= now_in(session))
                .order_by(JobRow.seq)
                .limit(BATCH)
            )
            return list((await session.scalars(query)).all())

    async def _names(self, rows: dict[str, JobRow], results: Sequence[ApplyResult]) -> set[str]:
        """The ids of jobs that lost their name to a live one. A holder that has ended is asked to make room."""
        lost: set[str] = set()
        for result in results:
            if result.outcome != ApplyOutcome.NAME_HELD:
                continue
            async with self._database.read() as session:
                holder = (await session.scalars(select(JobRow).where(JobRow.id == result.holder))).one_or_none()
            if holder is not None and holder.phase in [phase for phase in Phase if phase.terminal]:
                await self._cluster.discard(holder.id)
            elif holder is not None:
                lost.add(result.uid)
        return lost

    async def _later(self, session: AsyncSession, row: JobRow, result: ApplyResult) -> None:
        self._metrics.relay_failures.inc()
        seconds = min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS * 2 ** min(row.relay_failures, 20))
        values = {"relay_failures": row.relay_failures + 1, "relay_after": now_in(session) + seconds}
        await session.execute(update(JobRow).where(JobRow.id == row.id).values(values))
        if result.error:
            error = redact_values(result.error, secrets_in({"spec": row.spec}))
            because = f"the cluster has not taken the job yet: {error}; the API asks again every half minute"
            await _say(session, row, because)
        log.warning(
            "hand-over will be retried", job=row.id, outcome=result.outcome, error=result.error, retry_seconds=seconds
        )


async def _file_addresses(session: AsyncSession, job_ids: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the address where the workers of each job read each file that it names, by job and file."""
    query = select(JobFileRow).where(JobFileRow.job_id.in_(job_ids))
    addresses: dict[str, dict[str, str]] = {}
    for row in await session.scalars(query):
        addresses.setdefault(row.job_id, {})[row.file_id] = row.address
    return addresses


def _desired_job(row: JobRow, files: Mapping[str, str]) -> DesiredJob:
    """`files` are the addresses of the uploaded files that the job names."""
    spec = with_addresses(parse(JobSpec, row.spec), files)
    labels = {**row.labels, Label.PROJECT: row.project, Label.OWNER: row.owner}
    return DesiredJob(row.id, row.name, row.namespace, labels, spec, seen=row.status_version > 0)


async def _note_done(session: AsyncSession, rows: Sequence[JobRow]) -> None:
    """A job whose row was changed meanwhile stays to be handed over: its version is newer than the one noted here."""
    if not rows:
        return
    connection = await session.connection()
    done = (
        update(JobRow.__table__)  # type: ignore[arg-type]
        .where(JobRow.id == bindparam("row_id"), JobRow.relayed_version < bindparam("version"))
        .values(relayed_version=bindparam("version"), relay_failures=0, relay_after=0.0)
    )
    await connection.execute(done, [{"row_id": row.id, "version": row.spec_version} for row in rows])
    for row in rows:
        if row.relay_failures:  # what was said then holds no longer
            await _say(session, row, "handed to the operator, which has not looked at it yet")


async def _say(session: AsyncSession, row: JobRow, because: str) -> None:
    """Until the cluster has a status of the job: it may have one by now, also where its answer to us was lost."""
    own = update(JobRow).where(JobRow.id == row.id, JobRow.status_version == 0)
    await session.execute(own.values(status={**row.status, "because": because}))


async def _fail(session: AsyncSession, row: JobRow, holder: str) -> None:
    now = time.time()
    message = f"the cluster has another live job of this name ({holder}); submit this one under another name"
    status = {
        **row.status,
        "phase": Phase.FAILED,
        "code": "NameTaken",
        "because": message,
        "since": rfc3339(now),
        "finishedAt": rfc3339(now),
    }
    values = {
        "status": status,
        "phase": Phase.FAILED,
        "live": False,
        "finished_at": now,
        "relayed_version": row.spec_version,
    }
    # Another process may have found the same: who comes second tells nothing.
    failed = update(JobRow).where(JobRow.id == row.id, JobRow.relayed_version < row.spec_version).values(values)
    if (await session.execute(failed.returning(JobRow.id))).one_or_none() is None:
        return
    await events.append(session, row.id, [NewEvent(EventType.JOB_FAILED, now, message, data={"code": "NameTaken"})])
