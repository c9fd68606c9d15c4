"""Sign-in: the person of a provider's subject, created at the first sign-in, and their rights."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.audit import AuditedAct, record
from muster.api.core.callers import Principal, Scope, SignedIn, unauthorized
from muster.api.core.database.db import Database
from muster.api.core.database.tables import MemberRow, PersonRow
from muster.api.core.errors import ApiError
from muster.api.core.roles import Role
from muster.api.core.settings import ApiSettings
from muster.api.tenants.people.service import identity_of
from muster.api.tenants.signin.code_flow import CodeFlow, authorization_address, redeem
from muster.api.tenants.signin.provider import IdentityProvider, IssuerMismatch, ProviderUnreachable, SignInRefused
from muster.words.names import PERSON_NAME

log = structlog.get_logger("muster.api.signin")

_AGAIN = "Sign in again."


@dataclass(frozen=True)
class GroupRights:
    """Rights that somebody's groups grant."""

    admin: bool
    roles: dict[str, Role]


class SignIn:
    """Callers by the ID tokens of the settings' provider."""

    def __init__(self, settings: ApiSettings, database: Database, provider: IdentityProvider) -> None:
        self._settings, self._database, self._provider = settings, database, provider

    async def caller(self, token: str) -> Principal:
        """Raises ApiError unauthorized, with words and without the token, and sign_in_unavailable."""
        with self._refusals("`muster login` signs in anew."):
            signed_in = await self._provider.verify(token)
        return await self._existing_principal(signed_in) or await self._made(signed_in)

    async def provider_address(self, flow: CodeFlow, landing: str) -> str:
        """Return the address where a browser signs in, after which it returns to `landing`. Raises ApiError
        sign_in_unavailable."""
        with self._refusals(_AGAIN):
            return await authorization_address(self._provider, flow, landing)

    async def caller_by_code(self, flow: CodeFlow, code: str, landing: str) -> Principal:
        """Return the caller who came back to `landing` with that code. Raises ApiError as `caller` does."""
        with self._refusals(_AGAIN):
            signed_in = await redeem(self._provider, flow, code, landing)
        return await self._existing_principal(signed_in) or await self._made(signed_in)

    @contextmanager
    def _refusals(self, next_step: str) -> Iterator[None]:
        try:
            yield
        except SignInRefused as refused:
            raise unauthorized(f"The sign-in is refused: {refused}. {next_step}") from None
        except ProviderUnreachable as away:
            log.warning("the sign-in's provider can't be asked", issuer=self._provider.issuer, cause=str(away))
            detail = f"{self._provider.issuer} does not answer as it should, so nobody new can sign in. Tokens go on."
            if isinstance(away, IssuerMismatch):
                detail = (
                    f"MUSTER_API_OIDC_ISSUER is {self._provider.issuer!r}, but {away}, so nobody new can sign in. "
                    "Whoever runs Muster sets it to exactly that. Tokens go on."
                )
            raise ApiError("sign_in_unavailable", detail, headers={"Retry-After": "5"}) from None

    async def renewed(self, signed_in: SignedIn) -> Principal | None:
        """The caller as they are now; None once the sign-in has expired or the person is disabled."""
        if signed_in.expires_at <= time.time():
            return None
        try:
            return await self._existing_principal(signed_in)
        except ApiError as error:
            if error.code != "unauthorized":
                raise
            return None

    async def _existing_principal(self, signed_in: SignedIn) -> Principal | None:
        """Raises ApiError unauthorized for somebody who is disabled; None for nobody."""
        async with self._database.read() as session:
            query = select(PersonRow).where(PersonRow.identity == identity_of(self._provider.issuer, signed_in.subject))
            person = (await session.scalars(query)).one_or_none()
            if person is None:
                return None
            if person.disabled:
                raise unauthorized(f"{person.name!r} is disabled: nothing opens for them any more.")
            members = await session.scalars(select(MemberRow).where(MemberRow.person == person.name))
            own = {row.project: Role(row.role) for row in members}
        rights = rights_of(signed_in.groups, self._settings.oidc_roles)
        roles = {
            name: max((of[name] for of in (own, rights.roles) if name in of), key=list(Role).index)
            for name in (*own, *rights.roles)
        }
        return Principal(
            token=f"sign-in:{hashlib.sha256(person.identity.encode()).hexdigest()[:40]}" if person.identity else "",
            person=person.name,
            scopes=frozenset(Scope),
            admin=person.admin or rights.admin,
            roles=roles,
            expires_at=signed_in.expires_at,
            signed_in=signed_in,
        )

    async def _made(self, signed_in: SignedIn) -> Principal:
        name = signed_in.name
        if not re.fullmatch(PERSON_NAME, name):
            claim = self._settings.oidc_person_claim
            raise unauthorized(
                f"The provider's claim {claim!r} gives {name[:63]!r}, which is no name here (a to z, digits, '.', '_' "
                "and '-'); whoever runs Muster names another claim in MUSTER_API_OIDC_PERSON_CLAIM."
            )
        try:
            async with self._database.write() as session:
                await self._make(session, signed_in)
        except IntegrityError:
            pass  # by another request of theirs, a moment ago
        caller = await self._existing_principal(signed_in)
        if caller is None:
            raise unauthorized("The sign-in could not be kept; ask again.")
        return caller

    async def _make(self, session: AsyncSession, signed_in: SignedIn) -> None:
        """A name that somebody has is not given away: a provider may let its users choose theirs."""
        name, identity = signed_in.name, identity_of(self._provider.issuer, signed_in.subject)
        existing = await session.get(PersonRow, name)
        if existing is not None and existing.identity == identity:
            return  # made by another request of theirs, a moment ago
        if existing is not None:
            raise unauthorized(
                f"There is a person {name!r} already, and nothing says that it is you: an admin does, by "
                f"`muster people set {name} --subject {signed_in.subject[:255]}`."
            )
        session.add(
            PersonRow(
                name=name, kind="person", admin=False, disabled=False, created_at=time.time(), identity=identity
            )
        )  # fmt: skip
        await session.flush()
        record(session, Principal("sign-in", name, frozenset()), AuditedAct("person.signed_in", name, None))


def rights_of(groups: frozenset[str], table: Mapping[str, str | Mapping[str, str]]) -> GroupRights:
    """Return the rights that these groups grant; a group that the table does not name grants nothing."""
    roles: dict[str, Role] = {}
    granted = [table[group] for group in sorted(groups) if group in table]
    for given in granted:
        for project, role in given.items() if isinstance(given, Mapping) else ():
            if project not in roles or Role(role).covers(roles[project]):
                roles[project] = Role(role)
    return GroupRights("admin" in [given for given in granted if isinstance(given, str)], roles)
