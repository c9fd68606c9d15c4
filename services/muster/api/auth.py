"""Who asks, and may they: bearer tokens, compared by hash, with scopes."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy import select

from muster.api.errors import ApiError
from muster.api.services import ServicesDependency
from muster.api.tables import TokenRow

PREFIX = "muster_"
_BYTES = 32  # 256 bits: such a token can't be guessed, so a fast hash without salt keeps it as well as a slow one
_CHARACTERS_MIN = len(PREFIX) + 32


class Scope(StrEnum):
    """Each includes the ones before it."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


@dataclass(frozen=True)
class Principal:
    """Who asks. `owner` is the token's id, or `anonymous` where authentication is off; it keeps idempotency keys
    apart."""

    owner: str
    scopes: frozenset[Scope]

    def may(self, scope: Scope) -> bool:
        order = list(Scope)
        return any(order.index(own) >= order.index(scope) for own in self.scopes)


ANONYMOUS = Principal("anonymous", frozenset(Scope))


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(_BYTES)


def is_acceptable(token: str) -> bool:
    """Whether a token chosen by a person may be used: ours by its prefix, and long enough not to be guessed."""
    return token.startswith(PREFIX) and len(token) >= _CHARACTERS_MIN and token.isascii() and token.isprintable()


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


bearer = HTTPBearer(auto_error=False, description="`Authorization: Bearer muster_…`", scheme_name="token")


async def principal(
    services: ServicesDependency, given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
) -> Principal:
    """Raises ApiError unauthorized; says nothing about which part was wrong."""
    if not services.settings.auth:
        return ANONYMOUS
    if given is None:
        raise _unauthorized("This address needs a token: send `Authorization: Bearer muster_…`.")
    wanted, now = hash_of(given.credentials), time.time()
    async with services.database.read() as session:
        row = (await session.scalars(select(TokenRow).where(TokenRow.hash == wanted))).one_or_none()
    known = row is not None and hmac.compare_digest(row.hash, wanted)
    if row is None or not known or row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now):
        raise _unauthorized(
            "The token is unknown, revoked or expired; an admin makes a new one with POST /api/v1/tokens."
        )
    services.token_uses[row.id] = now
    return Principal(row.id, frozenset(Scope(scope) for scope in row.scopes["scopes"]))


Caller = Annotated[Principal, Depends(principal)]


def needs(scope: Scope) -> Callable[[Request, Principal], Awaitable[None]]:
    """A dependency that lets only callers with that scope pass. Raises ApiError forbidden."""

    async def check(request: Request, caller: Caller) -> None:
        if not caller.may(scope):
            own = ", ".join(sorted(caller.scopes)) or "none"
            detail = f"{request.method} here needs a token with the scope {scope}; this one has {own}."
            raise ApiError("forbidden", detail)

    return check


def _unauthorized(detail: str) -> ApiError:
    return ApiError("unauthorized", detail, headers={"WWW-Authenticate": 'Bearer realm="muster"'})
