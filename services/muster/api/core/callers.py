"""Authentication: bearer tokens, compared by their hash. Each token belongs to a person and grants what that person may
do."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.database.tables import MemberRow, PersonRow, SessionRow, TokenRow
from muster.api.core.errors import ApiError
from muster.api.core.services import Services, ServicesDependency
from muster.api.tenants.signin.provider import SignedIn
from muster.contract.names import DEFAULT_PROJECT, FIRST_PERSON
from muster.contract.projects import Role

PREFIX = "muster_"
COOKIE = "muster_session"  # of a browser that signed in (tenants/sessions)
FORM_HEADER = "x-muster-form"  # by which a page of ours says that it is one
_BYTES = 32  # 256 bits: such a token can't be guessed, so a fast hash without salt keeps it as well as a slow one
_CHARACTERS_MIN = len(PREFIX) + 32


class Scope(StrEnum):
    """Scope of a token; each scope includes the ones before it. The person's role in a project limits it too."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"  # manage what the person's role may manage: members, tokens, and as an admin everything


@dataclass(frozen=True)
class Principal:
    """Authenticated caller: a person, by one of their tokens. `project` is the only project that the token grants; None
    grants all of the person's projects.

    `token` is the token's id, or `anonymous` where authentication is off; idempotency keys are kept apart by it.

    `token` is its id, or `anonymous` where authentication is off; it keeps idempotency keys apart.
    """

    token: str
    person: str
    scopes: frozenset[Scope]
    admin: bool = False
    project: str | None = None
    roles: Mapping[str, Role] = field(default_factory=dict)
    address: str = ""  # of the peer, for the audit
    expires_at: float | None = None
    signed_in: SignedIn | None = None  # by whom no token of ours is held

    def may(self, scope: Scope) -> bool:
        order = list(Scope)
        return any(order.index(own) >= order.index(scope) for own in self.scopes)

    def role_in(self, project: str) -> Role | None:
        """Return the caller's role in the project, or None if the token may not see the project."""
        if self.project not in (None, project):
            return None
        return Role.ADMIN if self.admin else self.roles.get(project)

    @property
    def rules(self) -> bool:
        """Return whether the caller is a global admin, of all projects and people."""
        return self.admin and self.project is None and self.may(Scope.ADMIN)

    @property
    def visible_projects(self) -> frozenset[str] | None:
        """Return the names of the projects that the token may see, or None for all."""
        if self.admin:
            return None if self.project is None else frozenset({self.project})
        return frozenset(name for name in self.roles if self.project in (None, name))

    @property
    def home(self) -> str:
        """The project of what names none: the token's, the person's only one, or the one that is always there."""
        if self.project is not None:
            return self.project
        return next(iter(self.roles)) if len(self.roles) == 1 and not self.admin else DEFAULT_PROJECT


ANONYMOUS = Principal("anonymous", FIRST_PERSON, frozenset(Scope), admin=True)


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(_BYTES)


def is_acceptable(token: str) -> bool:
    """Return whether a token chosen by a person may be used: it has our prefix and is too long to be guessed."""
    return token.startswith(PREFIX) and len(token) >= _CHARACTERS_MIN and token.isascii() and token.isprintable()


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


bearer = HTTPBearer(auto_error=False, description="`Authorization: Bearer muster_…`", scheme_name="token")


async def principal(
    request: Request,
    services: ServicesDependency,
    given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],
) -> Principal:
    """Raises ApiError unauthorized, which says nothing about what part was wrong, and rate_limited."""
    address = request.client.host[:64] if request.client else ""
    if not services.settings.auth:
        return replace(ANONYMOUS, address=address)
    if given is not None:
        caller = await _known(services, given.credentials)
        if caller is None:
            raise unauthorized(
                "The token is unknown, revoked or expired; an admin makes a new one with `muster tokens create`."
            )
    # A browser adds its cookie to whatever any page makes it ask. So by the cookie alone one only reads here; what
    # changes something proves that one of our own pages sent it.
    elif (
        not (request.method in ("GET", "HEAD") or _of_our_page(request))
        or (caller := await of_session(services, request)) is None
    ):
        raise unauthorized("This address needs a token: send `Authorization: Bearer muster_…`.")
    return counted(services, caller, address)


def form_token(secret: str) -> str:
    """Return the token that the forms of a session carry. No other site can know it, because it is derived from the
    session's secret."""
    return hash_of(f"form:{secret}")


def _of_our_page(request: Request) -> bool:
    """Return whether the request carries the session's form token in a header, which no other site may even try to
    send."""
    told, secret = request.headers.get(FORM_HEADER), request.cookies.get(COOKIE)
    return bool(told and secret) and hmac.compare_digest((told or "").encode(), form_token(secret or "").encode())


def counted(services: Services, caller: Principal, address: str) -> Principal:
    """The caller of this request, noted as a use of their token. Raises ApiError rate_limited."""
    if caller.signed_in is None:
        services.token_uses[caller.token] = time.time()
    if wait := services.rates.take(caller.token):
        detail = f"This token asks too often; it may again in {wait:.2g} s. Ask less often, or follow a stream."
        raise ApiError("rate_limited", detail, headers={"Retry-After": str(math.ceil(wait))})
    return replace(caller, address=address)


async def _known(services: Services, token: str) -> Principal | None:
    secret_hash = hash_of(token)

    async def look() -> Principal | None:
        if services.sign_in is not None and not token.startswith(PREFIX) and token.count(".") == 2:  # a JSON Web Token
            return await services.sign_in.caller(token)
        async with services.database.read() as session:
            return await _look_up(session, TokenRow.hash == secret_hash, secret_hash)

    return _unexpired(await services.callers.ask(secret_hash, look))


def _unexpired(caller: Principal | None) -> Principal | None:
    return caller if caller is None or caller.expires_at is None or caller.expires_at > time.time() else None


async def of_session(services: Services, request: Request) -> Principal | None:
    """Return the principal of the session that the request's cookie names, or None without a cookie, after the session
    has ended, or when its token grants nothing."""
    cookie = request.cookies.get(COOKIE)
    if not cookie:
        return None
    secret_hash = hash_of(cookie)
    return _unexpired(await services.callers.ask(secret_hash, lambda: _whose_session(services, secret_hash)))


async def _whose_session(services: Services, secret_hash: str) -> Principal | None:
    async with services.database.read() as session:
        row = await session.get(SessionRow, secret_hash)
        if row is None or row.expires_at <= time.time():
            return None
        caller = await _look_up(session, TokenRow.id == row.token_id) if row.token_id is not None else None
    if row.signed_in is not None and services.sign_in is not None:
        said = {**row.signed_in, "groups": frozenset(row.signed_in["groups"]), "expires_at": row.expires_at}
        caller = await services.sign_in.renewed(SignedIn(**said))
    if caller is None:
        return None
    ends = [row.expires_at, *([caller.expires_at] if caller.expires_at is not None else [])]
    return replace(caller, expires_at=min(ends))


async def renewed(services: Services, caller: Principal) -> Principal | None:
    """The caller as they are now, or were within the last second; None if the token opens nothing any more."""
    if not services.settings.auth:
        return caller

    async def look() -> Principal | None:
        if caller.signed_in is not None:
            return await services.sign_in.renewed(caller.signed_in) if services.sign_in is not None else None
        async with services.database.read() as session:
            return await _look_up(session, TokenRow.id == caller.token)

    return _unexpired(await services.callers.ask((caller.token, caller.signed_in), look))


async def _look_up(
    session: AsyncSession, which: ColumnElement[bool], secret_hash: str | None = None
) -> Principal | None:
    """The token with its person and their roles in one question: it is asked with every request."""
    in_reach = or_(TokenRow.project.is_(None), MemberRow.project == TokenRow.project)
    query = (
        select(
            TokenRow.id,
            TokenRow.hash,
            TokenRow.scopes,
            TokenRow.project,
            TokenRow.expires_at,
            PersonRow.name,
            PersonRow.admin,
            MemberRow.project,
            MemberRow.role,
        )
        .join(PersonRow, PersonRow.name == TokenRow.person)
        .outerjoin(MemberRow, and_(MemberRow.person == TokenRow.person, in_reach))
        .where(which, TokenRow.revoked_at.is_(None), PersonRow.disabled.is_(False))
    )
    rows = (await session.execute(query)).all()
    if not rows or (secret_hash is not None and not hmac.compare_digest(rows[0][1], secret_hash)):
        return None
    token_id, _, scopes, project, expires_at, person, admin = rows[0][:7]
    if expires_at is not None and expires_at <= time.time():
        return None
    roles = {row[7]: Role(row[8]) for row in rows if row[7] is not None}
    scope = frozenset(map(Scope, scopes["scopes"]))
    return Principal(token_id, person, scope, admin, project, roles, expires_at=expires_at)


Caller = Annotated[Principal, Depends(principal)]


def needs(scope: Scope) -> Callable[[Request, Principal], Awaitable[None]]:
    """A dependency that lets only callers with that scope pass. Raises ApiError forbidden."""

    async def check(request: Request, caller: Caller) -> None:
        if not caller.may(scope):
            own = ", ".join(sorted(caller.scopes)) or "none"
            detail = f"{request.method} here needs a token with the scope {scope}; this one has {own}."
            raise ApiError("forbidden", detail)

    return check


reads, writes = Depends(needs(Scope.READ)), Depends(needs(Scope.WRITE))  # the two that most routes need


def unauthorized(detail: str) -> ApiError:
    return ApiError("unauthorized", detail, headers={"WWW-Authenticate": 'Bearer realm="muster"'})
