"""Authorization. A resource that the caller may not see is answered with 404, like one that does not exist."""

from __future__ import annotations

import contextlib

from sqlalchemy import select

from muster.api.core.callers import Principal
from muster.api.core.database.tables import JobRow
from muster.api.core.errors import ApiError, job_not_found
from muster.api.core.roles import Role
from muster.api.core.services import Services

HIDDEN = "another project"


async def find_job(services: Services, caller: Principal, job_id: str, act: bool = False) -> JobRow:
    """The job, if the caller may see it and, where that is asked for, act on it. Raises ApiError as `checked`."""
    async with services.database.read() as session:
        row = (await session.scalars(select(JobRow).where(JobRow.id == job_id))).one_or_none()
    return checked(caller, row, job_id, act)


def checked(caller: Principal, row: JobRow | None, job_id: str, act: bool = False) -> JobRow:
    """The job, if the caller may see it and, where that is asked for, act on it.

    Raises ApiError job_not_found, or forbidden for a job that the caller sees and may not act on.
    """
    role = caller.role_in(row.project) if row is not None else None
    if row is None or role is None:
        raise job_not_found(job_id)
    if act and not may_act(caller, row.project, row.owner):
        detail = (
            f"Job {row.name!r} is {row.owner}'s; in project {row.project!r} you are a {role}. Its owner or a "
            "maintainer may do that; `muster clone JOB` makes a job of your own, if you are a member."
        )
        raise ApiError("forbidden", detail)
    return row


def may_act(caller: Principal, project: str, owner: str) -> bool:
    """Return whether the caller may act on the resources of `owner` in the project: maintainers may act on everybody's,
    and members on their own."""
    role = caller.role_in(project)
    return role is not None and (role.covers(Role.MAINTAINER) or (role.covers(Role.MEMBER) and caller.person == owner))


def named(caller: Principal, project: str | None, job_id: str, name: str) -> dict[str, str | None]:
    """Return how another resource's document names a job. For a job that the caller may not see, even the project is
    hidden.

    `project` is None for a job that the API does not know, which nobody may see.
    """
    if project is None or caller.role_in(project) is None:
        return {"project": HIDDEN, "id": None, "job": None}
    return {"project": project, "id": job_id, "job": name}


def owns(caller: Principal, row: JobRow) -> bool:
    return caller.person == row.owner


def project_role(caller: Principal, project: str, least: Role) -> Role:
    """The caller's role in the project. Raises ApiError project_not_found, or forbidden for less than `least`."""
    role = caller.role_in(project)
    if role is None:
        raise project_not_found(project)
    if not role.covers(least):
        detail = f"In project {project!r} you are a {role}, and a {least} is needed; its maintainers choose the roles."
        raise ApiError("forbidden", detail)
    return role


def project_not_found(project: str) -> ApiError:
    detail = (
        f"There is no project {project[:100]!r} that you may see. `muster whoami` lists your projects; a job "
        "names its own with the label muster.dev/project."
    )
    return ApiError("project_not_found", detail)


def admins_only(caller: Principal) -> None:
    """Raises ApiError forbidden for everybody but an admin with a token of all projects."""
    if not caller.rules:
        detail = "Only an admin may do that, with a token of the scope admin that is not bound to one project."
        raise ApiError("forbidden", detail)


class StreamReader:
    """Reader of a job's stream. Its permission is checked again and again while the stream is open."""

    def __init__(self, services: Services, caller: Principal, project: str) -> None:
        self._services, self._caller, self._project = services, caller, project

    async def may_read(self) -> bool:
        """Return False once the token is revoked or expired, or its person's role is gone. All streams of a token share
        one check a second (`Authenticator.renewed`).

        While the database is unreachable, the last answer holds.
        """
        with contextlib.suppress(ApiError):
            caller = await self._services.authenticator.renewed(self._caller)
            return caller is not None and caller.role_in(self._project) is not None
        return True
