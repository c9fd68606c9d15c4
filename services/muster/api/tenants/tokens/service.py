"""Tokens in the database: whose they are and who may make them; the first one at first start."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.access import project_not_found, project_role
from muster.api.core.callers import Principal, Scope
from muster.api.core.database.db import Database
from muster.api.core.database.tables import MemberRow, PersonRow, ProjectRow, TokenRow
from muster.api.core.errors import ApiError
from muster.api.core.roles import Role
from muster.api.core.settings import ApiSettings
from muster.api.tenants.authentication import hash_of, is_acceptable, new_token
from muster.api.tenants.people import service as people
from muster.api.tenants.tokens.schemas import TokenRequest
from muster.words.names import FIRST_PERSON

log = structlog.get_logger("muster.api.tokens")


@dataclass(frozen=True)
class NewToken:
    """Description of a new token. `project` is None for every project of the person, and `expires_at` is None if it
    never expires."""

    name: str
    person: str
    project: str | None
    scopes: Sequence[Scope]
    expires_at: float | None = None


def make(session: AsyncSession, new: NewToken, token: str) -> TokenRow:
    row = TokenRow(
        id=str(uuid.uuid4()),
        name=new.name,
        person=new.person,
        project=new.project,
        hash=hash_of(token),
        scopes={"scopes": [str(scope) for scope in new.scopes]},
        created_at=time.time(),
        expires_at=new.expires_at,
        last_used_at=None,
        revoked_at=None,
    )
    session.add(row)
    return row


async def wanted_of(session: AsyncSession, caller: Principal, request: TokenRequest) -> NewToken:
    """Return the token that the request describes, if the caller may create it.

    Raises ApiError project_not_found, person_not_found, forbidden, invalid_token.
    """
    if request.all_projects and request.project is not None:
        raise ApiError("invalid_token", "The token can't be made: give either project or allProjects.")
    project = None if request.all_projects else request.project or caller.home
    if project is not None:
        project_role(caller, project, Role.VIEWER)
        if await session.get(ProjectRow, project) is None:
            raise project_not_found(project)
    person = request.person or caller.person
    await refuse_other_person(session, caller, person, project)
    days = request.expires_in_days
    return NewToken(
        request.name, person, project, request.scopes, time.time() + days * 86_400 if days is not None else None
    )


async def refuse_other_person(session: AsyncSession, caller: Principal, person: str, project: str | None) -> None:
    """Refuse a token for another person. The holder of a token acts as its person, so everybody may create their own, a
    project's maintainers those of its service accounts, and admins all others.

    Raises ApiError forbidden, person_not_found, invalid_token.
    """
    if project is None and caller.project is not None:
        raise ApiError("forbidden", f"Your own token opens project {caller.project!r} alone, so no wider one is made.")
    if person == caller.person:
        return
    role = caller.role_in(project) if project is not None else None
    person_row = await session.get(PersonRow, person)
    member = await session.get(MemberRow, (project, person)) if project is not None else None
    if not (caller.rules or role == Role.ADMIN):
        serves = person_row is not None and member is not None and person_row.kind == "service" and not person_row.admin
        if role != Role.MAINTAINER or not serves:
            raise ApiError(
                "forbidden",
                f"Whoever holds a token of {person!r} acts as {person!r}: an admin makes it, or a maintainer of the "
                "project for a service account (kind service) that is its member.",
            )
    row = await people.require_person(session, person)
    if project is not None and member is None and not row.admin:
        detail = (
            f"{person!r} has no role in project {project!r}. Add them first: `muster projects add {project} {person}`."
        )
        raise ApiError("invalid_token", detail)


async def list_visible(session: AsyncSession, caller: Principal) -> list[TokenRow]:
    """Return the tokens that are not revoked: the caller's own, those of the projects that the caller maintains and,
    for an admin, all."""
    query = select(TokenRow).where(TokenRow.revoked_at.is_(None)).order_by(TokenRow.created_at, TokenRow.id)
    return [row for row in (await session.scalars(query)).all() if sees(caller, row)]


def sees(caller: Principal, row: TokenRow) -> bool:
    if caller.rules or (row.person == caller.person and caller.project in (None, row.project)):
        return True
    role = caller.role_in(row.project) if row.project is not None else None
    return role is not None and role.covers(Role.MAINTAINER)


async def find(session: AsyncSession, caller: Principal, token_id: str) -> TokenRow:
    """A token that is not revoked. Raises ApiError token_not_found, also for one that the caller may not see."""
    row = await session.get(TokenRow, token_id, with_for_update=True)
    if row is None or row.revoked_at is not None or not sees(caller, row):
        raise ApiError("token_not_found", f"There is no token with the id {token_id!r}.")
    return row


def rotate(session: AsyncSession, row: TokenRow, overlap_seconds: float, token: str) -> TokenRow:
    """A successor that may what this one may, until then; this one ends after the overlap. It does not live longer, or
    whoever stole a token of a day would have one for good."""
    now = time.time()
    scopes = [Scope(scope) for scope in row.scopes["scopes"]]
    made = make(session, NewToken(row.name, row.person, row.project, scopes, row.expires_at), token)
    if overlap_seconds:
        row.expires_at = min(row.expires_at or now + overlap_seconds, now + overlap_seconds)
    else:
        row.revoked_at = now
    return made


async def note_uses(session: AsyncSession, uses: dict[str, float]) -> None:
    for token_id, at in uses.items():
        await session.execute(update(TokenRow).where(TokenRow.id == token_id).values(last_used_at=at))


async def ensure_first(database: Database, settings: ApiSettings) -> None:
    """Ensure that there is always a way in while authentication is on: the token of the settings, or one in the state
    folder.

    On one machine the file is the user's key, so it is created anew if it is gone or its token no longer grants
    anything. In a cluster, where the folder may end with its pod, it is only created while there is no token at all.

    Raises ValueError for a bootstrap token that could be guessed.
    """
    if not settings.auth:
        return
    if settings.bootstrap_token is not None:
        await _ensure_given(database, settings.bootstrap_token.get_secret_value())
        return
    token, path = new_token(), settings.layout.admin_token
    async with database.write() as session:
        if settings.cluster == "local":
            has_a_way_in = await _opens(session, _read(path))
        else:
            has_a_way_in = bool((await session.execute(select(func.count()).select_from(TokenRow))).scalar_one())
        if has_a_way_in:
            return
        _write_private(path, token)
        await people.ensure(session, FIRST_PERSON, admin=True)
        make(session, NewToken("first start", FIRST_PERSON, None, [Scope.ADMIN]), token)
    log.info("an admin token was written to a file", path=str(path))


async def _opens(session: AsyncSession, token: str) -> bool:
    """Return whether the token is known and not revoked."""
    query = select(TokenRow).where(TokenRow.hash == hash_of(token), TokenRow.revoked_at.is_(None))
    return (await session.scalars(query)).one_or_none() is not None


async def _ensure_given(database: Database, token: str) -> None:
    if not is_acceptable(token):
        raise ValueError("MUSTER_API_BOOTSTRAP_TOKEN must begin with muster_ and have at least 32 more characters")
    try:
        async with database.write() as session:
            if (await session.scalars(select(TokenRow).where(TokenRow.hash == hash_of(token)))).one_or_none() is None:
                await people.ensure(session, FIRST_PERSON, admin=True)
                make(session, NewToken("bootstrap", FIRST_PERSON, None, [Scope.ADMIN]), token)
    except IntegrityError:
        pass  # another process made it at the same moment


def _read(path: Path) -> str:
    """Return the file's text; empty if there is no such file."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def _write_private(path: Path, token: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(token + "\n")
