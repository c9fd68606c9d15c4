"""Outbox of messages, which are added in the transaction of the change that they report: what was committed is
reported, and nothing else."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.database.db import Database
from muster.api.core.database.tables import FineTuneRow, WebhookDeliveryRow, WebhookRow
from muster.api.webhooks.messages import NamedJob, WebhookMessage, body_of, of_event
from muster.api.webhooks.schemas import DeliveryStatus
from muster.words.webhook_kinds import WebhookKind, WebhookPreset

_BATCH = 500  # messages looked up and written at a time: a database takes some 30,000 parameters
GIVE_UP_SECONDS = 86_400.0  # a receiver that is away over a night or a deployment hears of everything


async def note_events(session: AsyncSession, job: NamedJob, events: Iterable[Mapping[str, Any]]) -> None:
    """Add messages to the project's webhooks about the job's events, which are given as their rows."""
    messages = [message for event in events if (message := of_event(job, event)) is not None]
    if messages:
        await note(session, await interested(session, (job.project,)), messages)


async def interested(
    session: AsyncSession, projects: Sequence[str] | None = None, kind: WebhookKind | None = None
) -> list[WebhookRow]:
    """The webhooks that are on, of these projects or of all, and for that kind or any."""
    query = select(WebhookRow).where(WebhookRow.enabled.is_(True)).order_by(WebhookRow.id)
    if projects is not None:
        query = query.where(WebhookRow.project.in_(projects))
    rows = (await session.scalars(query)).all()
    return [row for row in rows if kind is None or kind in row.kinds["kinds"]]


async def note(session: AsyncSession, webhooks: Sequence[WebhookRow], messages: Sequence[WebhookMessage]) -> int:
    """Add a row for each message and webhook that wants it and has not received it yet. Returns how many wanted one."""
    rows = []
    for webhook in webhooks:
        for message in messages:
            if message.kind in webhook.kinds["kinds"] and await _is_representable(session, webhook, message):
                row = delivery(webhook, message)
                rows += [row] if row is not None else []
    if rows:
        insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
        await session.execute(insert(WebhookDeliveryRow).on_conflict_do_nothing(), rows)
    return len(rows)


async def note_once(database: Database, messages: Sequence[tuple[WebhookRow, WebhookMessage]]) -> int:
    """Add messages that many processes find again and again; nothing is written where nothing is new. Returns how many
    were."""
    added = 0
    for first in range(0, len(messages), _BATCH):
        batch = messages[first : first + _BATCH]
        query = select(WebhookDeliveryRow.webhook_id, WebhookDeliveryRow.key).where(
            WebhookDeliveryRow.webhook_id.in_({webhook.id for webhook, _ in batch}),
            WebhookDeliveryRow.key.in_({message.key for _, message in batch}),
        )
        async with database.read() as session:
            recorded = {(webhook_id, key) for webhook_id, key in (await session.execute(query)).all()}
        new = [(webhook, message) for webhook, message in batch if (webhook.id, message.key) not in recorded]
        if new:
            async with database.write() as session:
                for webhook, message in new:
                    added += await note(session, (webhook,), (message,))
    return added


def delivery(webhook: WebhookRow, message: WebhookMessage) -> dict[str, Any] | None:
    """The row of a message to a webhook; None where its form has no words for it."""
    number, now = uuid.uuid4().hex, time.time()
    body = body_of(webhook.preset, webhook.project, message, number)
    if body is None:
        return None
    return {
        "id": f"msg_{number}",
        "webhook_id": webhook.id,
        "key": message.key,
        "kind": message.kind,
        "body": body,
        "created_at": now,
        "status": DeliveryStatus.WAITING,
        "tries": 0,
        "next_at": 0.0,
        "give_up_at": now + GIVE_UP_SECONDS,
        "delivered_at": None,
        "attempts": {"attempts": []},
    }


async def _is_representable(session: AsyncSession, webhook: WebhookRow, message: WebhookMessage) -> bool:
    """OpenAI's form speaks of fine-tuning jobs, which came by /v1/fine_tuning."""
    if webhook.preset != WebhookPreset.OPENAI or message.job_id is None:
        return True
    return await session.get(FineTuneRow, message.job_id) is not None
