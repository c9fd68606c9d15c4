"""Webhooks in the database. Functions on a session: who opens it also commits it."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.access import project_not_found
from muster.api.core.database.tables import ProjectRow, WebhookDeliveryRow, WebhookRow
from muster.api.core.errors import ApiError
from muster.api.webhooks.delivering import DeliverySender
from muster.api.webhooks.messages import of_test
from muster.api.webhooks.outbox import delivery
from muster.api.webhooks.reach import NetworkReach, OutOfReach, UnresolvedHost
from muster.api.webhooks.sealing import SecretEncryption
from muster.secrets.box import SecretsLocked
from muster.words.base import DocumentProblem
from muster.words.webhooks import WebhookChange, WebhookRequest

WEBHOOKS_MAX = 20  # of a project: each event is written once for each of them


@dataclass(frozen=True)
class WebhookServices:
    """Services of this process that the routes need."""

    deliveries: DeliverySender
    sealing: SecretEncryption
    reach: NetworkReach


async def in_project(session: AsyncSession, project: str) -> list[WebhookRow]:
    """Raises ApiError project_not_found."""
    await _require_project(session, project)
    query = select(WebhookRow).where(WebhookRow.project == project).order_by(WebhookRow.name)
    return list((await session.scalars(query)).all())


async def find(session: AsyncSession, project: str, name: str, lock: bool = False) -> WebhookRow:
    """Raises ApiError project_not_found, webhook_not_found."""
    await _require_project(session, project)
    query = select(WebhookRow).where(WebhookRow.project == project, WebhookRow.name == name)
    row = (await session.scalars(query.with_for_update() if lock else query)).one_or_none()
    if row is None:
        raise ApiError("webhook_not_found", f"Project {project!r} has no webhook {name!r}.")
    return row


async def make(
    session: AsyncSession, sealing: SecretEncryption, person: str, project: str, body: WebhookRequest
) -> tuple[WebhookRow, str]:
    """The webhook, and its secret. Raises ApiError project_not_found, webhook_exists, invalid_webhook and
    secrets_unavailable."""
    await _require_project(session, project, lock=True)  # of two at once, one comes after the other
    here = select(func.count(), func.count().filter(WebhookRow.name == body.name))
    count, same = (await session.execute(here.where(WebhookRow.project == project))).one()
    if same:
        raise ApiError("webhook_exists", f"Project {project!r} has a webhook {body.name!r}: change it by PATCH.")
    if count >= WEBHOOKS_MAX:
        raise ApiError("invalid_webhook", f"Project {project!r} has {count} webhooks, and may have {WEBHOOKS_MAX}.")
    webhook_id, now = uuid.uuid4().hex, time.time()
    secret, sealed = new_secret(sealing, project, webhook_id)
    row = WebhookRow(
        id=webhook_id,
        project=project,
        name=body.name,
        url=body.url,
        kinds=_kinds(body.kinds),
        preset=body.preset,
        wait_seconds=body.wait_seconds,
        enabled=body.enabled,
        secret=sealed,
        created_at=now,
        changed_at=now,
        changed_by=person,
    )
    session.add(row)
    await session.flush()
    return row, secret


def change(row: WebhookRow, person: str, body: WebhookChange) -> None:
    """Change what is given; only the preset may be taken away by null."""
    for name in body.model_fields_set:
        value = getattr(body, name)
        if name == "kinds" and value is not None:
            row.kinds = _kinds(value)
        elif value is not None or name == "preset":
            setattr(row, name, value)
    row.changed_at, row.changed_by = time.time(), person


def rotate(row: WebhookRow, sealing: SecretEncryption, person: str, overlap_seconds: float) -> str:
    """The new secret; the old one signs too for so long. Raises ApiError secrets_unavailable."""
    secret, sealed = new_secret(sealing, row.project, row.id)
    now = time.time()
    row.old_secret, row.old_secret_until = (row.secret, now + overlap_seconds) if overlap_seconds else (None, None)
    row.secret, row.changed_at, row.changed_by = sealed, now, person
    return secret


def new_secret(sealing: SecretEncryption, project: str, webhook_id: str) -> tuple[str, str]:
    """Raises ApiError secrets_unavailable."""
    try:
        return sealing.new(project, webhook_id)
    except SecretsLocked as locked:
        raise ApiError("secrets_unavailable", f"Nothing was changed: {locked}.") from None


async def reachable(reach: NetworkReach, url: str | None) -> None:
    """Raises ApiError invalid_webhook for an address that no webhook may reach. A name that can't be resolved at the
    moment passes: each delivery looks again."""
    try:
        if url is not None:
            await reach.addresses(url)
    except OutOfReach as refused:
        fault = DocumentProblem("url", str(refused))
        raise ApiError("invalid_webhook", f"The webhook is not valid: {fault}.", errors=(fault,)) from None
    except UnresolvedHost:
        pass


async def add_test(session: AsyncSession, row: WebhookRow, person: str) -> str:
    """The id of a message that is sent once, whatever comes of it."""
    now = time.time()
    message = of_test(row.name, row.project, person, f"test/{uuid.uuid4().hex}", now)
    values = delivery(row, message)
    assert values is not None, "every form has words for a test"
    # Nobody else sends it but if this process is heard of no more.
    session.add(WebhookDeliveryRow(**{**values, "next_at": now + 60.0, "give_up_at": now}))
    await session.flush()
    return str(values["id"])


async def history(
    session: AsyncSession, webhook: WebhookRow, status: str | None, before_seq: int | None, limit: int
) -> list[WebhookDeliveryRow]:
    """The newest messages older than `before_seq`, newest first."""
    query = select(WebhookDeliveryRow).where(WebhookDeliveryRow.webhook_id == webhook.id)
    if status is not None:
        query = query.where(WebhookDeliveryRow.status == status)
    if before_seq is not None:
        query = query.where(WebhookDeliveryRow.seq < before_seq)
    return list((await session.scalars(query.order_by(WebhookDeliveryRow.seq.desc()).limit(limit))).all())


async def find_delivery(session: AsyncSession, webhook: WebhookRow, message_id: str) -> WebhookDeliveryRow:
    """Raises ApiError delivery_not_found."""
    query = select(WebhookDeliveryRow).where(
        WebhookDeliveryRow.webhook_id == webhook.id, WebhookDeliveryRow.id == message_id
    )
    row = (await session.scalars(query)).one_or_none()
    if row is None:
        raise ApiError("delivery_not_found", f"Webhook {webhook.name!r} has no message {message_id[:64]!r}.")
    return row


def recorded(row: WebhookRow) -> dict[str, Any]:
    """Return the webhook for the audit log, without the path of its address, which is a password to services such as
    Slack."""
    parts = urlsplit(row.url)
    return {
        "url": f"{parts.scheme}://{parts.netloc}/…",
        "kinds": list(row.kinds["kinds"]),
        "preset": row.preset,
        "waitSeconds": row.wait_seconds,
        "enabled": row.enabled,
    }


def _kinds(kinds: Any) -> dict[str, Any]:
    return {"kinds": sorted(set(map(str, kinds)))}


async def _require_project(session: AsyncSession, project: str, lock: bool = False) -> None:
    if await session.get(ProjectRow, project, with_for_update=lock or None) is None:
        raise project_not_found(project)
