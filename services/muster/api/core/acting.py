"""Rights with which the API submits jobs for somebody who is not there: those that the person has at that moment."""

from __future__ import annotations

from dataclasses import replace

from muster.api.core.callers import ANONYMOUS, Principal, Scope
from muster.api.core.database.tables import MemberRow, PersonRow
from muster.api.core.roles import Role
from muster.api.core.services import Services


def platform_for(token: str, person: str, project: str) -> Principal:
    """Return the principal that ends what was made for the person, whatever has become of their rights."""
    return replace(ANONYMOUS, token=token, person=person, project=project)


async def acting_for(
    services: Services, token: str, person: str, project: str, granted: str | None
) -> Principal | None:
    """The person with the rights that they have now; None for somebody who may not submit to the project any more.
    `granted` is the role that the sign-in's provider gave them when they asked for it."""
    if not services.settings.auth:
        return platform_for(token, person, project)
    async with services.database.read() as session:
        row = await session.get(PersonRow, person)
        member = await session.get(MemberRow, (project, person))
    if row is None or row.disabled:
        return None
    roles = [Role(role) for role in (member.role if member is not None else None, granted) if role is not None]
    if not row.admin and not any(role.covers(Role.MEMBER) for role in roles):
        return None
    return Principal(
        token=token,
        person=person,
        scopes=frozenset((Scope.READ, Scope.WRITE)),
        admin=row.admin,
        project=project,
        roles={project: max(roles, key=list(Role).index)} if roles else {},
    )
