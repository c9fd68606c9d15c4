"""The operator's report of the nodes, the live jobs, and what both tell of the queue."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import structlog
from sqlalchemy import and_, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.database.recent import RecentAnswers
from muster.api.core.database.tables import AttemptRow, JobRow
from muster.api.core.services import Services
from muster.api.core.waits.live import LiveJob
from muster.api.core.waits.starts import ExpectedStart, expected_starts
from muster.words.fleet import SILENT_SECONDS, FleetReport
from muster.words.status import Phase

log = structlog.get_logger("muster.api.fleet")
QUEUED = and_(JobRow.live.is_(True), JobRow.phase == Phase.QUEUED)
_ESTIMATED_MAX = 200  # queued jobs: those behind them wait for what nobody knows


class StartEstimates:
    """Expected starts of the jobs at the beginning of the queue, kept for a second: every look at a list of jobs asks
    for them, and they hang on all that run."""

    def __init__(self) -> None:
        self._recent = RecentAnswers[dict[str, ExpectedStart]]()

    async def of(self, services: Services) -> dict[str, ExpectedStart]:
        return await self._recent.ask("starts", lambda: self._estimate(services)) or {}

    async def _estimate(self, services: Services) -> dict[str, ExpectedStart]:
        report, _ = await fleet_report(services)
        if report is None:
            return {}
        query = select(JobRow.seq).where(QUEUED).order_by(JobRow.priority.desc(), JobRow.seq).limit(_ESTIMATED_MAX)
        async with services.database.read() as session:
            jobs = await live_jobs(session, list((await session.scalars(query)).all()))
        return expected_starts(report, jobs, time.time())


async def start_seconds(services: Services, rows: Iterable[JobRow]) -> dict[str, float | None]:
    """Return in how many seconds each of these jobs that waits for nodes is expected to start, None where that is not
    known."""
    if all(row.phase != Phase.QUEUED for row in rows):
        return {}
    return {job_id: start.seconds for job_id, start in (await services[StartEstimates].of(services)).items()}


async def fleet_report(services: Services) -> tuple[FleetReport | None, str]:
    """The operator's newest report, and what to say of it."""
    try:
        report = await services.cluster.nodes()
    except Exception as error:  # of the cluster's client, or a report of a newer Muster
        log.warning("what the operator tells of nodes can't be read", error=f"{type(error).__name__}: {error}"[:500])
        return None, "what the operator tells of the nodes can't be read now; the API's log says why"
    if report is None:
        return None, "the operator has told nothing of its nodes yet: is it running, and of this version?"
    age = time.time() - report.at
    return (
        report,
        f"the operator last told of its nodes {age:.0f} s ago: is it running?" if age > SILENT_SECONDS else "",
    )


async def live_jobs(session: AsyncSession, waiting: Sequence[int] | None = None) -> list[LiveJob]:
    """The live jobs of all projects: positions and what is free hang on those of others too. Of those in the queue that
    have no attempt, and so neither hold nor avoid a node, only `waiting`, where it is given."""
    columns = [getattr(JobRow, name) for name in LiveJob.__dataclass_fields__ if hasattr(JobRow, name)]
    query = select(*columns).where(JobRow.live.is_(True))
    if waiting is not None:
        tried = JobRow.id.in_(select(AttemptRow.job_id))
        query = query.where(or_(JobRow.phase != Phase.QUEUED, tried, JobRow.seq.in_(waiting)))
    return [LiveJob(*row) for row in await session.execute(query)]
