"""`/me` for everybody; `/people` for admins."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Request
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.access import admins_only
from muster.api.core.audit import AuditedAct, record
from muster.api.core.callers import Caller, Scope, needs
from muster.api.core.database.tables import PersonRow
from muster.api.core.http.body import parsed, read_body
from muster.api.core.http.openapi import body, example_reply, problems
from muster.api.core.http.reply import Reply, reply_of
from muster.api.core.roles import Role
from muster.api.core.services import ServicesDependency
from muster.api.tenants.people import service
from muster.api.tenants.people.service import PersonRequest
from muster.words.base import Time, dump
from muster.words.names import PERSON_NAME
from muster.words.times import rfc3339

reads, manages = Depends(needs(Scope.READ)), Depends(needs(Scope.ADMIN))
router = APIRouter(tags=["people"])

PersonName = Annotated[
    str,
    Path(
        max_length=63,
        pattern=f"^{PERSON_NAME}$",
        description="Lower-case letters a to z, digits, '.', '_' and '-': no two names look alike.",
    ),
]


class Me(Reply):
    """Caller of the request. `project` is the only project that the token grants, null for all; `home` is the project
    of jobs that name none."""

    person: str
    admin: bool
    token: str
    scopes: list[Scope]
    project: str | None
    home: str
    roles: dict[str, Role]


class Person(Reply):
    """Person or service account. If `disabled`, none of their tokens grants anything."""

    name: str
    kind: Literal["person", "service"]
    admin: bool
    disabled: bool
    created_at: Time


class PersonList(Reply):
    items: list[Person]


_ME = {
    "person": "ann",
    "admin": False,
    "token": "0c2c31c1-96f9-4f3c-8a39-5b2f9a0f4d11",
    "scopes": ["write"],
    "project": "nlp",
    "home": "nlp",
    "roles": {"nlp": "member"},
}
_EXAMPLE: dict[str, Any] = {
    "name": "ann",
    "kind": "person",
    "admin": False,
    "disabled": False,
    "createdAt": rfc3339(1_795_000_000.0),
}


@router.get(
    "/me",
    dependencies=[reads],
    summary="Show the caller",
    responses={200: example_reply(_ME, "The person and the token of this request"), **problems()},
)
async def get_me(caller: Caller) -> Me:
    """Returns the person that the token belongs to, its scopes, and the roles that it grants."""
    return reply_of(Me, caller, scopes=sorted(caller.scopes))


@router.get(
    "/people",
    dependencies=[manages],
    summary="List people",
    responses={200: example_reply({"items": [_EXAMPLE]}, "People and service accounts, by name"), **problems()},
)
async def list_people(services: ServicesDependency, caller: Caller) -> PersonList:
    """Returns everybody who has or had a token or a role. Requires admin rights."""
    admins_only(caller)
    async with services.database.read() as session:
        rows = await service.list_all(session)
    return PersonList(items=[reply_of(Person, row) for row in rows])


@router.put(
    "/people/{person}",
    dependencies=[manages],
    summary="Make or change a person",
    responses={
        200: example_reply(_EXAMPLE, "The person"),
        **problems("invalid_person", "invalid_document", "unsupported_media_type", "body_too_large"),
    },
    openapi_extra=body(PersonRequest, {"kind": "service"}),
)
async def put_person(request: Request, services: ServicesDependency, caller: Caller, person: PersonName) -> Person:
    """Creates or updates a person or a service account: whether they are an admin, and whether their tokens are
    disabled. Requires admin rights."""
    admins_only(caller)
    settings = await read_body(request, parsed(PersonRequest, "invalid_person", "The person is not valid"))

    async def put(session: AsyncSession) -> PersonRow:
        before, row = await service.put(session, caller, person, settings, services.settings.oidc_issuer)
        record(session, caller, AuditedAct("person.changed", person, None, before, dump(settings)))
        return row

    return reply_of(Person, await services.database.write_once(put))
