"""Tokens in the database; the first one at first start."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import structlog
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.auth import Scope, hash_of, is_acceptable, new_token
from muster.api.db import Database
from muster.api.settings import Settings
from muster.api.tables import TokenRow

log = structlog.get_logger("muster.api.tokens")


def make(session: AsyncSession, name: str, scopes: Sequence[Scope], expires_at: float | None, token: str) -> TokenRow:
    row = TokenRow(
        id=str(uuid.uuid4()),
        name=name,
        hash=hash_of(token),
        scopes={"scopes": [str(scope) for scope in scopes]},
        created_at=time.time(),
        expires_at=expires_at,
        last_used_at=None,
        revoked_at=None,
    )
    session.add(row)
    return row


async def list_all(session: AsyncSession) -> list[TokenRow]:
    query = select(TokenRow).where(TokenRow.revoked_at.is_(None)).order_by(TokenRow.created_at, TokenRow.id)
    return list((await session.scalars(query)).all())


async def revoke(session: AsyncSession, token_id: str) -> bool:
    """False: there is no such token, or it was revoked before."""
    revoked = (
        update(TokenRow).where(TokenRow.id == token_id, TokenRow.revoked_at.is_(None)).values(revoked_at=time.time())
    )
    return (await session.execute(revoked.returning(TokenRow.id))).scalar_one_or_none() is not None


async def note_uses(session: AsyncSession, uses: dict[str, float]) -> None:
    for token_id, at in uses.items():
        await session.execute(update(TokenRow).where(TokenRow.id == token_id).values(last_used_at=at))


async def ensure_first(database: Database, settings: Settings) -> None:
    """With authentication on there is always a way in: the token of the settings, or one in the state folder.

    On one machine the file is the user's key, so it is made anew where it is gone or opens nothing any more. In a
    cluster, where the folder may end with its pod, it is only made while there is no token at all.

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
        make(session, "first start", [Scope.ADMIN], None, token)
    log.info("an admin token was written to a file", path=str(path))


async def _opens(session: AsyncSession, token: str) -> bool:
    """Whether the token is known and not revoked."""
    known = select(TokenRow).where(TokenRow.hash == hash_of(token), TokenRow.revoked_at.is_(None))
    return (await session.scalars(known)).one_or_none() is not None


async def _ensure_given(database: Database, token: str) -> None:
    if not is_acceptable(token):
        raise ValueError("MUSTER_API_BOOTSTRAP_TOKEN must begin with muster_ and have at least 32 more characters")
    try:
        async with database.write() as session:
            if (await session.scalars(select(TokenRow).where(TokenRow.hash == hash_of(token)))).one_or_none() is None:
                make(session, "bootstrap", [Scope.ADMIN], None, token)
    except IntegrityError:
        pass  # another process made it at the same moment


def _read(path: Path) -> str:
    """Empty where there is no such file."""
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
