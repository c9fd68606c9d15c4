"""People and service accounts in the database. Functions on a session: who opens it also commits it."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import Field
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.callers import Principal
from muster.api.core.database.tables import PersonRow
from muster.api.core.errors import ApiError
from muster.words.base import Spec


class PersonRequest(Spec):
    """A person, or a service account, as they are to be."""

    kind: Literal["person", "service"] = "person"
    admin: bool = False
    """Whether they may do everything in every project."""
    disabled: bool = False
    """Whether none of their tokens opens anything. Their name and their jobs stay."""
    subject: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    """Subject of the person at the sign-in's provider; left out, it stays as it was."""


async def list_all(session: AsyncSession) -> list[PersonRow]:
    return list((await session.scalars(select(PersonRow).order_by(PersonRow.name))).all())


async def put(
    session: AsyncSession, caller: Principal, name: str, body: PersonRequest, issuer: str | None = None
) -> tuple[dict[str, Any] | None, PersonRow]:
    """Create or change a person. Return their attributes before, None for a new person, and their row.

    Raises ApiError invalid_person where an admin would take their own rights away.
    """
    if name == caller.person and (not body.admin or body.disabled):
        raise ApiError("invalid_person", "You can't take your own rights as an admin away: let another admin do it.")
    existing = await session.get(PersonRow, name)
    before = (
        {"kind": existing.kind, "admin": existing.admin, "disabled": existing.disabled}
        if existing is not None
        else None
    )
    row = await ensure(session, name)
    row.kind, row.admin, row.disabled = body.kind, body.admin, body.disabled
    if body.subject is not None:
        row.identity = await _identity(session, name, body.subject, issuer)
    await session.flush()
    return before, row


def identity_of(issuer: str, subject: str) -> str:
    """Return the identity of a person at the sign-in's provider. A subject is unique only within its issuer."""
    return f"{issuer} {subject}"


async def _identity(session: AsyncSession, name: str, subject: str, issuer: str | None) -> str:
    if issuer is None:
        raise ApiError("invalid_person", "There is no sign-in here (MUSTER_API_OIDC_ISSUER), so nobody has a subject.")
    identity = identity_of(issuer, subject)
    taken = (await session.scalars(select(PersonRow.name).where(PersonRow.identity == identity))).one_or_none()
    if taken not in (None, name):
        raise ApiError("invalid_person", f"The subject is {taken!r}: a person has one name, and a name one person.")
    return identity


async def ensure(session: AsyncSession, name: str, admin: bool = False) -> PersonRow:
    """The person of that name, made if there is none."""
    row = await session.get(PersonRow, name)
    if row is None:
        row = PersonRow(name=name, kind="person", admin=admin, disabled=False, created_at=time.time())
        session.add(row)
        await session.flush()
    return row


async def require_person(session: AsyncSession, name: str) -> PersonRow:
    """Raises ApiError person_not_found."""
    row = await session.get(PersonRow, name)
    if row is None:
        raise ApiError(
            "person_not_found",
            f"There is no person {name[:100]!r}; an admin adds people with `muster people set NAME`.",
        )
    return row
