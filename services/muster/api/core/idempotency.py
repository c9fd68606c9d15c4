"""A repeated POST gives the first reply again: key, body's hash and reply are stored in the request's own commit."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header, Request
from sqlalchemy import delete, insert
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.callers import Caller
from muster.api.core.clock import now_in
from muster.api.core.database.tables import IdempotencyRow
from muster.api.core.errors import ApiError, invalid_parameter

_KEY = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,253}[\x21-\x7e])?")


@dataclass(frozen=True)
class AttemptedRequest:
    """One request as its retries repeat it. Keys of different callers and routes never meet."""

    owner: str
    route: str
    key: str
    body_hash: str


def hash_of(*parts: Any) -> str:
    """Return the hash of a request's meaning rather than its spelling: one document as YAML and as JSON is the same
    request."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


async def recall(session: AsyncSession, attempted: AttemptedRequest | None) -> dict[str, Any] | None:
    """The reply that this request was given before. Raises ApiError idempotency_key_reused."""
    if attempted is None:
        return None
    row = await session.get(IdempotencyRow, (attempted.owner, attempted.route, attempted.key))
    if row is None:
        return None
    if row.body_hash != attempted.body_hash:
        raise ApiError(
            "idempotency_key_reused",
            f"Idempotency-Key {attempted.key!r} came before with another body (it made job {row.job_id}). "
            "Use a new key for a new request.",
            extra={"jobId": row.job_id},
        )
    return row.reply


async def remember(session: AsyncSession, answered: Sequence[tuple[AttemptedRequest, str, dict[str, Any]]]) -> None:
    """Keep the replies to these requests, each with its job's id. Raises IntegrityError where one was kept before."""
    if not answered:
        return
    rows = [
        {
            "owner": attempted.owner,
            "route": attempted.route,
            "key": attempted.key,
            "body_hash": attempted.body_hash,
            "job_id": job_id,
            "reply": reply,
        }
        for attempted, job_id, reply in answered
    ]
    rows.sort(key=lambda row: (row["owner"], row["route"], row["key"]))
    kept = insert(IdempotencyRow.__table__).values(created_at=now_in(session))  # type: ignore[arg-type]
    await session.execute(kept, rows)


async def forget(session: AsyncSession, before: float) -> None:
    await session.execute(delete(IdempotencyRow).where(IdempotencyRow.created_at < before))


async def idempotency_key(
    caller: Caller,
    key: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            description="Any text, the same on every retry of a request: it then acts once and the reply is repeated.",
            min_length=1,
            max_length=255,
            pattern=r"^[\x21-\x7e]([\x20-\x7e]{0,253}[\x21-\x7e])?$",
        ),
    ] = None,
) -> tuple[str, str] | None:
    """Return (owner, key), or None without a key."""
    if key is None:
        return None
    if not _KEY.fullmatch(key):
        raise invalid_parameter("header.Idempotency-Key", "must be 1 to 255 visible ASCII characters")
    return caller.token, key


# POSTs whose repetition makes another thing, and whose replies are not kept: a token and a webhook's secret are stored
# nowhere in clear, and a file's bytes are no document. Of all other POSTs without a key a repetition changes nothing.
MAKES_ANEW = frozenset(
    {
        "make_token",
        "rotate_token",
        "make_webhook",
        "rotate_webhook",
        "test_webhook",
        "replay_delivery",
        "upload_file",
        "create_openai_file",
        "create_upload",
        "create_upload_part",
        "request_profile",
    }
)


async def only_where_kept(request: Request) -> None:
    """Refuse an Idempotency-Key that would be ignored. Raises ApiError invalid_parameter."""
    route = request.scope.get("route")
    if getattr(route, "name", "") in MAKES_ANEW and "idempotency-key" in request.headers:
        words = (
            "is not kept here, so a repeated request would act once more: leave the header out, and after a lost "
            "answer look first what is there"
        )
        raise invalid_parameter("header.Idempotency-Key", words)


IdempotencyKey = Annotated[tuple[str, str] | None, Depends(idempotency_key)]


def attempted(given: tuple[str, str] | None, route: str, *body: Any) -> AttemptedRequest | None:
    return AttemptedRequest(given[0], route, given[1], hash_of(*body)) if given else None
