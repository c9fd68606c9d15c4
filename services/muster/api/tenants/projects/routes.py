"""`/projects` and their members: read by those who work there, changed by maintainers (members) and admins."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.access import admins_only, project_not_found, project_role
from muster.api.core.audit import AuditedAct, record
from muster.api.core.callers import Caller, Principal, Scope, needs
from muster.api.core.database.tables import ProjectRow
from muster.api.core.errors import ApiError
from muster.api.core.http.body import parsed, read_body
from muster.api.core.http.openapi import body, example_reply, problems
from muster.api.core.http.path_parts import ProjectName
from muster.api.core.http.reply import Reply, reply_of
from muster.api.core.limits import ProjectLimits
from muster.api.core.projects import visible
from muster.api.core.roles import Role
from muster.api.core.services import Services, ServicesDependency
from muster.api.tenants.people.routes import PersonName
from muster.api.tenants.projects import service
from muster.api.tenants.projects.service import MemberRequest, ProjectRequest
from muster.words.base import Time, dump
from muster.words.times import rfc3339

reads, manages = Depends(needs(Scope.READ)), Depends(needs(Scope.ADMIN))
router = APIRouter(prefix="/projects", tags=["projects"])


class Project(Reply):
    """`role` is the caller's. `namespace` is null for `default`, which has those that `limits.namespaces` lists."""

    name: str
    namespace: str | None
    limits: ProjectLimits
    created_at: Time
    role: Role


class ProjectList(Reply):
    items: list[Project]


class Member(Reply):
    person: str
    role: Role


class MemberList(Reply):
    items: list[Member]


_LIMITS = ProjectLimits(checkpoint_prefix="s3://checkpoints/nlp", data_prefixes=("s3://data/nlp",), gang_sizes=(1, 2))
_EXAMPLE: dict[str, Any] = {
    "name": "nlp",
    "namespace": "nlp",
    "limits": dump(_LIMITS),
    "createdAt": rfc3339(1_795_000_000.0),
    "role": "maintainer",
}
_MEMBER = {"person": "ann", "role": "member"}
_BODY = ("invalid_document", "unsupported_media_type", "body_too_large")


def _document(caller: Caller, row: ProjectRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "namespace": row.namespace,
        "limits": dump(ProjectLimits.model_validate(row.limits)),
        "createdAt": rfc3339(row.created_at),
        "role": caller.role_in(row.name),
    }


@router.get(
    "",
    response_model=ProjectList,
    dependencies=[reads],
    summary="List projects",
    responses={200: example_reply({"items": [_EXAMPLE]}, "Projects, by name"), **problems()},
)
async def list_projects(services: ServicesDependency, caller: Caller) -> JSONResponse:
    """Returns the projects that the caller may see."""
    async with services.database.read() as session:
        rows = await visible(session, caller)
    return JSONResponse({"items": [_document(caller, row) for row in rows]})


@router.get(
    "/{project}",
    response_model=Project,
    dependencies=[reads],
    summary="Get a project",
    responses={200: example_reply(_EXAMPLE, "The project"), **problems("project_not_found")},
)
async def get_project(services: ServicesDependency, caller: Caller, project: ProjectName) -> JSONResponse:
    """Returns a project: its namespace, what its jobs may name, and the caller's role in it."""
    project_role(caller, project, Role.VIEWER)
    async with services.database.read() as session:
        row = await session.get(ProjectRow, project)
    if row is None:
        raise project_not_found(project)
    return JSONResponse(_document(caller, row))


@router.put(
    "/{project}",
    response_model=Project,
    dependencies=[manages],
    summary="Make or change a project",
    responses={
        200: example_reply(_EXAMPLE, "Changed"),
        201: {**example_reply(_EXAMPLE, "Made"), "model": Project},
        **problems("namespace_taken", "invalid_project", *_BODY),
    },
    openapi_extra=body(ProjectRequest, {"limits": dump(_LIMITS)}),
)
async def put_project(
    request: Request, services: ServicesDependency, caller: Caller, project: ProjectName
) -> JSONResponse:
    """Creates or updates a project. Its limits are replaced, and the new limits apply to jobs that are submitted from
    now on. Requires admin rights."""
    admins_only(caller)
    settings = await read_body(request, parsed(ProjectRequest, "invalid_project", "The project is not valid"))
    row, is_new = await put(services, caller, project, settings)
    return JSONResponse(_document(caller, row), status_code=201 if is_new else 200)


async def put(
    services: Services, caller: Principal, project: str, body: ProjectRequest, only_new: bool = False
) -> tuple[ProjectRow, bool]:
    """The project, and whether it is new; with `only_new` one that is there is not changed. Raises ApiError forbidden,
    namespace_taken and invalid_project."""
    admins_only(caller)

    async def make(session: AsyncSession) -> tuple[ProjectRow, bool]:
        row, before = await service.put(session, project, body, services.settings.is_system_namespace)
        if only_new and before is not None:
            raise ApiError("invalid_project", f"There is a project {project!r} already; nothing was changed.")
        record(session, caller, AuditedAct("project.changed", project, project, before, row.limits))
        return row, before is None

    return await services.database.write_once(make)


@router.delete(
    "/{project}",
    status_code=204,
    response_class=Response,
    dependencies=[manages],
    summary="Delete a project",
    responses={
        204: {"description": "It is gone, and its tokens open nothing any more"},
        **problems("project_not_found", "project_in_use", "secrets_unavailable"),
    },
)
async def delete_project(services: ServicesDependency, caller: Caller, project: ProjectName) -> Response:
    """Deletes a project. The request is refused while the project has jobs, including ended ones. Requires admin
    rights."""
    admins_only(caller)
    async with services.database.write() as session:
        if not await service.remove(session, services.cluster, project):
            raise project_not_found(project)
        record(session, caller, AuditedAct("project.deleted", project, project))
    return Response(status_code=204)


@router.get(
    "/{project}/members",
    dependencies=[reads],
    summary="List a project's members",
    responses={200: example_reply({"items": [_MEMBER]}, "Members, by name"), **problems("project_not_found")},
)
async def list_members(services: ServicesDependency, caller: Caller, project: ProjectName) -> MemberList:
    """Returns the members of a project and their roles. Admins are not listed, because they belong to every project."""
    project_role(caller, project, Role.VIEWER)
    async with services.database.read() as session:
        await _exists(session.get(ProjectRow, project), project)
        rows = await service.members(session, project)
    return MemberList(items=[reply_of(Member, row) for row in rows])


@router.put(
    "/{project}/members/{person}",
    dependencies=[manages],
    summary="Give somebody a role in a project",
    responses={
        200: example_reply(_MEMBER, "The role"),
        **problems("project_not_found", "person_not_found", "invalid_project", *_BODY),
    },
    openapi_extra=body(MemberRequest, {"role": "member"}),
)
async def put_member(
    request: Request, services: ServicesDependency, caller: Caller, project: ProjectName, person: PersonName
) -> Member:
    """Sets the role of a member. The role takes effect at once, also for existing tokens and open streams. Only an
    admin can add a person who is not known yet. Requires the maintainer role."""
    project_role(caller, project, Role.MAINTAINER)
    membership = await read_body(request, parsed(MemberRequest, "invalid_project", "The role is not valid"))
    await give_role(services, caller, project, person, Role(membership.role))
    return Member(person=person, role=Role(membership.role))


async def give_role(services: Services, caller: Principal, project: str, person: str, role: Role) -> None:
    """Raises ApiError project_not_found, person_not_found and forbidden."""
    project_role(caller, project, Role.MAINTAINER)

    async def give(session: AsyncSession) -> None:
        await _exists(session.get(ProjectRow, project), project)
        before = await service.put_member(session, caller, project, person, role)
        was = {"role": before} if before else None
        record(session, caller, AuditedAct("member.changed", person, project, was, {"role": str(role)}))

    await services.database.write_once(give)


@router.delete(
    "/{project}/members/{person}",
    status_code=204,
    response_class=Response,
    dependencies=[manages],
    summary="Take somebody's role in a project away",
    responses={
        204: {"description": "They see nothing of the project any more"},
        **problems("project_not_found", "member_not_found"),
    },
)
async def delete_member(
    services: ServicesDependency, caller: Caller, project: ProjectName, person: PersonName
) -> Response:
    """Removes a member from a project. Their open streams end, and their jobs continue. Requires the maintainer
    role."""
    project_role(caller, project, Role.MAINTAINER)
    async with services.database.write() as session:
        before = await service.remove_member(session, project, person)
        if before is None:
            raise ApiError("member_not_found", f"{person!r} is no member of project {project!r}.")
        record(session, caller, AuditedAct("member.removed", person, project, {"role": before}))
    return Response(status_code=204)


async def _exists(row: Any, project: str) -> None:
    """Raise ApiError project_not_found for a project that does not exist: an admin sees every project, so nothing else
    refuses it."""
    if await row is None:
        raise project_not_found(project)
