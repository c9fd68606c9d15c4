"""Authentication: bearer tokens, compared by their hash, and the cookies of sessions. Each token belongs to a person
and grants what that person may do."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from dataclasses import replace

from fastapi import Request
from fastapi.security import HTTPAuthorizationCredentials
from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.callers import ANONYMOUS, Principal, Scope, SignedIn, unauthorized
from muster.api.core.database.db import Database
from muster.api.core.database.recent import RecentAnswers
from muster.api.core.database.tables import MemberRow, PersonRow, SessionRow, TokenRow
from muster.api.core.errors import ApiError
from muster.api.core.roles import Role
from muster.api.core.settings import ApiSettings
from muster.api.tenants.rates import RateLimits
from muster.api.tenants.signin.service import SignIn

PREFIX = "muster_"
COOKIE = "muster_session"  # of a browser that signed in (tenants/sessions)
FORM_HEADER = "x-muster-form"  # by which a page of ours says that it is one
_BYTES = 32  # 256 bits: such a token can't be guessed, so a fast hash without salt keeps it as well as a slow one
_CHARACTERS_MIN = len(PREFIX) + 32


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(_BYTES)


def is_acceptable(token: str) -> bool:
    """Return whether a token chosen by a person may be used: it has our prefix and is too long to be guessed."""
    return token.startswith(PREFIX) and len(token) >= _CHARACTERS_MIN and token.isascii() and token.isprintable()


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def form_token(secret: str) -> str:
    """Return the token that the forms of a session carry. No other site can know it, because it is derived from the
    session's secret."""
    return hash_of(f"form:{secret}")


class CallerAuthentication:
    """Callers by what they show: a token, a session's cookie, or a token of the sign-in's provider, which is None where
    tokens alone open something. What was found is kept for a second (`RecentAnswers`)."""

    def __init__(self, settings: ApiSettings, database: Database, sign_in: SignIn | None) -> None:
        self._settings, self._database, self.sign_in = settings, database, sign_in
        self.callers = RecentAnswers[Principal](TokenRow, PersonRow, MemberRow)  # by the hash of what they show
        self.callers.watch(database.sessions)
        self.rates = RateLimits(settings.requests_per_second, settings.requests_burst)
        self.token_uses: dict[str, float] = {}  # when each token was last used, until housekeeping writes it down

    async def authenticate(self, request: Request, given: HTTPAuthorizationCredentials | None) -> Principal:
        """Raises ApiError unauthorized, which says nothing about what part was wrong, and rate_limited."""
        address = request.client.host[:64] if request.client else ""
        if not self._settings.auth:
            return replace(ANONYMOUS, address=address)
        if given is not None:
            caller = await self._of_token(given.credentials)
            if caller is None:
                raise unauthorized(
                    "The token is unknown, revoked or expired; an admin makes a new one with `muster tokens create`."
                )
        # A browser adds its cookie to whatever any page makes it ask. So by the cookie alone one only reads here; what
        # changes something proves that one of our own pages sent it.
        elif (
            not (request.method in ("GET", "HEAD") or _of_our_page(request))
            or (caller := await self.of_session(request)) is None
        ):
            raise unauthorized("This address needs a token: send `Authorization: Bearer muster_…`.")
        return self.counted(caller, address)

    def counted(self, caller: Principal, address: str) -> Principal:
        """The caller of this request, noted as a use of their token. Raises ApiError rate_limited."""
        if caller.signed_in is None:
            self.token_uses[caller.token] = time.time()
        if wait := self.rates.take(caller.token):
            detail = f"This token asks too often; it may again in {wait:.2g} s. Ask less often, or follow a stream."
            raise ApiError("rate_limited", detail, headers={"Retry-After": str(math.ceil(wait))})
        return replace(caller, address=address)

    async def _of_token(self, token: str) -> Principal | None:
        secret_hash = hash_of(token)

        async def look() -> Principal | None:
            if self.sign_in is not None and not token.startswith(PREFIX) and token.count(".") == 2:  # a JSON Web Token
                return await self.sign_in.caller(token)
            async with self._database.read() as session:
                return await _look_up(session, TokenRow.hash == secret_hash, secret_hash)

        return _unexpired(await self.callers.ask(secret_hash, look))

    async def of_session(self, request: Request) -> Principal | None:
        """Return the principal of the session that the request's cookie names, or None without a cookie, after the
        session has ended, or when its token grants nothing."""
        cookie = request.cookies.get(COOKIE)
        if not cookie:
            return None
        secret_hash = hash_of(cookie)
        return _unexpired(await self.callers.ask(secret_hash, lambda: self._whose_session(secret_hash)))

    async def _whose_session(self, secret_hash: str) -> Principal | None:
        async with self._database.read() as session:
            row = await session.get(SessionRow, secret_hash)
            if row is None or row.expires_at <= time.time():
                return None
            caller = await _look_up(session, TokenRow.id == row.token_id) if row.token_id is not None else None
        if row.signed_in is not None and self.sign_in is not None:
            said = {**row.signed_in, "groups": frozenset(row.signed_in["groups"]), "expires_at": row.expires_at}
            caller = await self.sign_in.renewed(SignedIn(**said))
        if caller is None:
            return None
        ends = [row.expires_at, *([caller.expires_at] if caller.expires_at is not None else [])]
        return replace(caller, expires_at=min(ends))

    async def renewed(self, caller: Principal) -> Principal | None:
        """The caller as they are now, or were within the last second; None if the token opens nothing any more."""
        if not self._settings.auth:
            return caller

        async def look() -> Principal | None:
            if caller.signed_in is not None:
                return await self.sign_in.renewed(caller.signed_in) if self.sign_in is not None else None
            async with self._database.read() as session:
                return await _look_up(session, TokenRow.id == caller.token)

        return _unexpired(await self.callers.ask((caller.token, caller.signed_in), look))


def _of_our_page(request: Request) -> bool:
    """Return whether the request carries the session's form token in a header, which no other site may even try to
    send."""
    header, secret = request.headers.get(FORM_HEADER), request.cookies.get(COOKIE)
    return bool(header and secret) and hmac.compare_digest((header or "").encode(), form_token(secret or "").encode())


def _unexpired(caller: Principal | None) -> Principal | None:
    return caller if caller is None or caller.expires_at is None or caller.expires_at > time.time() else None


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
