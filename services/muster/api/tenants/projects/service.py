"""Projects and members in the database. Functions on a session: who opens it also commits it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field
from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.callers import Principal
from muster.api.core.cluster.cluster import JobCluster
from muster.api.core.database.tables import FileRow, JobRow, MemberRow, ProjectRow, SweepRow, TokenRow
from muster.api.core.errors import ApiError
from muster.api.core.limits import ProjectLimits
from muster.api.core.roles import Role
from muster.api.tenants.people import service as people
from muster.api.tenants.secrets import service as secrets
from muster.words.base import Spec, dump
from muster.words.names import DEFAULT_PROJECT, JOB_NAME

ProjectName = Annotated[str, Field(pattern=f"^{JOB_NAME.pattern}$")]


class ProjectRequest(Spec):
    """A project as it is to be. Its namespace is its jobs' alone, and can't be changed."""

    namespace: ProjectName | None = None
    """Left out, it is named as the project."""
    limits: ProjectLimits = ProjectLimits()


class MemberRequest(Spec):
    """The role that somebody is to have in a project."""

    role: Literal["viewer", "member", "maintainer"]


async def put(
    session: AsyncSession, name: str, body: ProjectRequest, is_system: Callable[[str], bool]
) -> tuple[ProjectRow, dict[str, Any] | None]:
    """The project, and its limits before; None for a new one. `is_system` says of a namespace that it is never a job's.
    Raises ApiError namespace_taken, invalid_project."""
    if name != DEFAULT_PROJECT and body.limits.namespaces is not None:
        detail = f"Project {name!r} has one namespace: limits.namespaces is for project {DEFAULT_PROJECT!r} alone."
        raise ApiError("invalid_project", detail)
    row = await session.get(ProjectRow, name, with_for_update=True)
    if row is not None:
        if body.namespace not in (None, row.namespace):
            current = "none of its own" if row.namespace is None else repr(row.namespace)
            detail = f"Project {name!r} has the namespace {current}, which can't be changed: leave it out."
            raise ApiError("invalid_project", detail)
        before, row.limits = row.limits, dump(body.limits)
        return row, before
    namespace = body.namespace or name
    if is_system(namespace):
        detail = f"Namespace {namespace!r} is the platform's or Kubernetes' own, and never a project's: choose another."
        raise ApiError("namespace_taken", detail)
    await _refuse_taken_namespace(session, namespace, name)
    row = ProjectRow(name=name, namespace=namespace, limits=dump(body.limits), created_at=time.time())
    session.add(row)
    await session.flush()
    return row, None


async def _refuse_taken_namespace(session: AsyncSession, namespace: str, name: str) -> None:
    """Refuse a namespace that is not free for a project that is to be created as `name`. If the project has been
    created meanwhile, the insert reports it."""
    holder = (await session.scalars(select(ProjectRow.name).where(ProjectRow.namespace == namespace))).one_or_none()
    if holder not in (None, name):
        raise ApiError("namespace_taken", f"Namespace {namespace!r} is that of project {holder!r}: choose another.")
    here = select(func.count()).select_from(JobRow).where(JobRow.namespace == namespace, JobRow.live.is_(True))
    jobs = int((await session.execute(here)).scalar_one())
    if jobs or namespace == DEFAULT_PROJECT:
        detail = (
            f"Namespace {namespace!r} is used by project {DEFAULT_PROJECT!r}, which has {jobs} live jobs there: "
            "choose another, or wait until they have ended."
        )
        raise ApiError("namespace_taken", detail)


async def remove(session: AsyncSession, cluster: JobCluster, name: str) -> bool:
    """Delete the project, revoke its tokens and delete its secrets. Return False if there is no such project.

    Raises ApiError project_in_use, secrets_unavailable.
    """
    row = await session.get(ProjectRow, name, with_for_update=True)
    if row is None:
        return False
    jobs = select(func.count()).select_from(JobRow).where(JobRow.project == name)
    count = int((await session.execute(jobs)).scalar_one())
    if count or name == DEFAULT_PROJECT:
        why = f"has {count} jobs, whose records go with it" if count else "is there for jobs that name no project"
        raise ApiError("project_in_use", f"Project {name!r} {why}, so it is not deleted.")
    if files := int((await session.execute(select(func.count()).where(FileRow.project == name))).scalar_one()):
        raise ApiError("project_in_use", f"Project {name!r} has {files} files: delete them first.")
    tokens = update(TokenRow).where(TokenRow.project == name, TokenRow.revoked_at.is_(None))
    await session.execute(tokens.values(revoked_at=time.time()))
    await secrets.remove_all(session, cluster, name)
    await session.execute(delete(SweepRow).where(SweepRow.project == name))  # without a job, nothing to sweep
    await session.delete(row)
    return True


async def members(session: AsyncSession, project: str) -> list[MemberRow]:
    query = select(MemberRow).where(MemberRow.project == project).order_by(MemberRow.person)
    return list((await session.scalars(query)).all())


async def put_member(session: AsyncSession, caller: Principal, project: str, person: str, role: Role) -> str | None:
    """The role before, None for none. An admin's word makes the person too. Raises ApiError person_not_found."""
    if caller.rules:
        await people.ensure(session, person)
    await people.require_person(session, person)
    row = await session.get(MemberRow, (project, person))
    before = row.role if row is not None else None
    if row is None:
        session.add(MemberRow(project=project, person=person, role=str(role)))
    else:
        row.role = str(role)
    await session.flush()
    return before


async def remove_member(session: AsyncSession, project: str, person: str) -> str | None:
    """The role that they had; None where nobody of that name is a member."""
    gone = delete(MemberRow).where(MemberRow.project == project, MemberRow.person == person).returning(MemberRow.role)
    return (await session.execute(gone)).scalar_one_or_none()
