"""Callers: who asks, and what they may do. Whose token it is, the layer above finds out (`CallerAuthenticator`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Protocol

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from muster.api.core.errors import ApiError
from muster.api.core.roles import Role
from muster.words.names import DEFAULT_PROJECT, FIRST_PERSON


class Scope(StrEnum):
    """Scope of a token; each scope includes the ones before it. The person's role in a project limits it too."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"  # manage what the person's role may manage: members, tokens, and as an admin everything


@dataclass(frozen=True)
class SignedIn:
    """Claims of a provider's token. It is accepted until `expires_at`, in seconds since the epoch, which allows for
    differing clocks."""

    subject: str
    name: str
    groups: frozenset[str]
    expires_at: float


@dataclass(frozen=True)
class Principal:
    """Authenticated caller: a person, by one of their tokens. `project` is the only project that the token grants; None
    grants all of the person's projects.

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


bearer = HTTPBearer(auto_error=False, description="`Authorization: Bearer muster_…`", scheme_name="token")


class CallerAuthenticator(Protocol):
    """Authentication, as the core needs it: the layer above knows tokens, sessions and people."""

    async def authenticate(self, request: Request, given: HTTPAuthorizationCredentials | None) -> Principal:
        """Raises ApiError unauthorized and rate_limited."""

    async def renewed(self, caller: Principal) -> Principal | None:
        """The caller as they are now, or were within the last second; None if nothing opens for them any more."""


async def principal(
    request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
) -> Principal:
    """Raises ApiError unauthorized and rate_limited."""
    authenticator: CallerAuthenticator = request.app.state.services.authenticator
    return await authenticator.authenticate(request, given)


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
