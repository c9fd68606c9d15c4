"""Projects as the core sees them: rows that it reads. The layer above makes and changes them."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.callers import Principal
from muster.api.core.database.tables import ProjectRow
from muster.api.core.limits import ProjectLimits
from muster.words.quotas import ProjectQuota

DEFAULT_NAMESPACE = "default"


def namespace_of(project: ProjectRow) -> str:
    """Return the namespace of the project's secrets in a cluster, and of its jobs that name no other."""
    return project.namespace or DEFAULT_NAMESPACE


def quota_of(project: ProjectRow) -> ProjectQuota:
    return ProjectLimits.model_validate(project.limits).quota


async def visible(session: AsyncSession, caller: Principal) -> list[ProjectRow]:
    """Return the projects that the caller may see, by name."""
    query = select(ProjectRow).order_by(ProjectRow.name)
    if caller.visible_projects is not None:
        query = query.where(ProjectRow.name.in_(caller.visible_projects))
    return list((await session.scalars(query)).all())
