"""Browsers that are signed in: what a token, or the provider's word, opens is opened by a cookie until it ends."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.audit import AuditedAct, record
from muster.api.core.callers import Principal
from muster.api.core.database.tables import SessionRow
from muster.api.core.services import Services
from muster.api.tenants.authentication import CallerAuthentication, hash_of

# Long enough to leave a page open over a weekend. Whatever takes the token or the person away ends the session at once.
SESSION_SECONDS = 7 * 86_400.0
# Of the provider's word that somebody is who they are and in these groups: a working day, then it is asked again.
SIGNED_IN_SECONDS = 12 * 3_600.0
_BYTES = 32


async def begin(services: Services, caller: Principal) -> str:
    """Sign in whoever was known by a token or by the provider. Returns what the browser's cookie holds."""
    secret, now = secrets.token_urlsafe(_BYTES), time.time()
    signed_in = asdict(caller.signed_in) | {"groups": sorted(caller.signed_in.groups)} if caller.signed_in else None
    row = SessionRow(
        hash=hash_of(secret),
        token_id=None if signed_in else caller.token,
        signed_in=signed_in,
        created_at=now,
        expires_at=now + (SIGNED_IN_SECONDS if signed_in else SESSION_SECONDS),
    )
    async with services.database.write() as session:
        session.add(row)
        record(session, caller, AuditedAct("session.begun", caller.person, None))
    return secret


async def end(services: Services, secret: str) -> None:
    """Sign out. Repeating it is harmless."""
    async with services.database.write() as session:
        await session.execute(delete(SessionRow).where(SessionRow.hash == hash_of(secret)))
    services[CallerAuthentication].callers.forget()


async def forget_expired(session: AsyncSession, now: float) -> None:
    await session.execute(delete(SessionRow).where(SessionRow.expires_at <= now))
