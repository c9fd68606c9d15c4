"""Quotas of projects: the cluster learns of them from the rows, and the queue is counted when a job is submitted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.admission_policy import LimitedProject, limit_entries
from muster.api.core.cluster.cluster import JobCluster
from muster.api.core.database.db import Database
from muster.api.core.database.tables import JobRow, ProjectRow, SecretRow
from muster.api.core.errors import ApiError
from muster.api.core.limits import ProjectLimits
from muster.api.core.projects import quota_of
from muster.api.core.submission.drafts import SubmissionDraft
from muster.api.core.submission.facts import SubmissionFacts
from muster.words.address import StorageAddress
from muster.words.quotas import MonthSpent, ProjectQuota
from muster.words.status import Phase
from muster.words.text import plural

QUOTA_SECONDS = 5.0  # admission, which looks every 15 s, hears of a changed quota hardly later than of anything else


class QuotaWriter:
    """Hands the quotas and limits of all projects over to the cluster, where operator and admission policy keep them:
    the rows are the outbox."""

    def __init__(
        self,
        database: Database,
        cluster: JobCluster,
        spent: Callable[[], Mapping[str, MonthSpent] | None],
        files: StorageAddress | None = None,
    ) -> None:
        """`spent` gives what each project used this month, None before it has been counted: what the cluster knows of
        a budget is left as it is until then. `files` is where uploaded files are kept."""
        self._database, self._cluster, self._spent, self._files = database, cluster, spent, files
        self._written: dict[str, ProjectQuota | None] = {}
        self._limits: dict[str, str] | None = None

    async def step(self) -> bool:
        """Write what changed since the last round, in the first one everything; False: there is no more to do."""
        async with self._database.read() as session:
            rows = (await session.scalars(select(ProjectRow))).all()
            secrets: dict[str, list[str]] = {}
            for secret in await session.execute(select(SecretRow.project, SecretRow.name).order_by(SecretRow.name)):
                secrets.setdefault(secret.project, []).append(secret.name)
        spent = self._spent()
        quotas = {row.name: quota_of(row) for row in rows}
        target = dict.fromkeys(self._written.keys() - quotas.keys())
        for name, quota in quotas.items():
            if not quota.has_month_budget:
                target[name] = _for_the_operator(quota)
            elif spent is not None:
                target[name] = _for_the_operator(quota.model_copy(update={"spent": spent.get(name)}))
        changed = {
            name: quota for name, quota in target.items() if name not in self._written or self._written[name] != quota
        }
        if changed:
            await self._cluster.write_quotas(changed)
            self._written |= changed
        limits = limit_entries(
            LimitedProject(
                row.name,
                row.namespace,
                ProjectLimits.model_validate(row.limits),
                str(self._files.child(row.name)) if self._files is not None else None,
                tuple(secrets.get(row.name, ())),
            )
            for row in rows
        )
        if limits != self._limits:
            await self._cluster.write_limits(limits)
            self._limits = limits
        return False


def queue_limit(draft: SubmissionDraft, facts: SubmissionFacts) -> SubmissionDraft:
    """Have the queue counted when the job is stored, where it is limited: a step of its submission."""
    if not facts.limits.quota.bounds_queue:
        return draft
    condition = functools.partial(refuse_full_queue, project=draft.project, owner=facts.caller.person)
    return replace(draft, conditions=(*draft.conditions, condition))


async def refuse_full_queue(session: AsyncSession, project: str, owner: str) -> None:
    """Raises ApiError queue_full where one more queued job would be too many for the project or for its owner.

    Whoever submits to a project whose queue is limited waits here for others who do, so that they are counted.
    """
    row = await session.get(ProjectRow, project)
    quota = quota_of(row) if row is not None else ProjectQuota()
    if not quota.bounds_queue:
        return
    await session.get(ProjectRow, project, with_for_update=True)
    for whose, limit, owners in (
        (f"project {project!r}", quota.queued_jobs, ()),
        (f"{owner} in project {project!r}", quota.person.queued_jobs, (JobRow.owner == owner,)),
    ):
        queued = select(func.count()).select_from(JobRow).where(JobRow.project == project, JobRow.live.is_(True))
        queued = queued.where(JobRow.phase == Phase.QUEUED.value, *owners)
        if limit is not None and (count := int((await session.execute(queued)).scalar_one())) >= limit:
            detail = f"{whose} has {plural(count, 'queued job')} and may have {limit}: submit again when one has begun."
            raise ApiError("queue_full", detail[0].upper() + detail[1:])


def _for_the_operator(quota: ProjectQuota) -> ProjectQuota | None:
    """Return the part of the quota that the operator enforces, or None if there is none."""
    person = quota.person.model_copy(update={"queued_jobs": None})
    kept = quota.model_copy(update={"queued_jobs": None, "person": person})
    return None if kept == ProjectQuota() else kept
