"""Webhooks and their deliveries as REST shows them."""

from __future__ import annotations

from enum import StrEnum

from muster.api.core.database.tables import WebhookDeliveryRow, WebhookRow
from muster.api.core.http.reply import Reply, reply_of
from muster.words.base import Time
from muster.words.webhook_kinds import WebhookKind, WebhookPreset


class DeliveryStatus(StrEnum):
    """Status of a message."""

    WAITING = "waiting"  # it is still to be sent, or sent again
    DELIVERED = "delivered"
    FAILED = "failed"  # given up; `:replay` sends it again


class Webhook(Reply):
    """A webhook without its secret. `changed_by` is who set it last. `preset` is null for the form of Standard
    Webhooks."""

    name: str
    project: str
    url: str
    kinds: list[WebhookKind]
    preset: WebhookPreset | None
    wait_seconds: float
    enabled: bool
    created_at: Time
    changed_at: Time
    changed_by: str


class NewWebhook(Webhook):
    """New webhook. `secret` is shown only this once: receivers verify the messages' signatures with it."""

    secret: str


class WebhookList(Reply):
    items: list[Webhook]


class DeliveryAttempt(Reply):
    """One time that a message was sent: what was answered, or why nothing was. `seconds` is what it took."""

    at: Time
    status: int | None
    error: str | None
    seconds: float


class Delivery(Reply):
    """A message. `id` is its `webhook-id`; `next_at` is when it is sent (again), while it is waiting, and `body` is
    what is sent."""

    id: str
    kind: WebhookKind
    status: DeliveryStatus
    created_at: Time
    next_at: Time | None
    delivered_at: Time | None
    attempts: list[DeliveryAttempt]
    body: str


class DeliveryPage(Reply):
    """`next_cursor` asks for the next page; it is null on the last."""

    items: list[Delivery]
    next_cursor: str | None


def webhook_of(row: WebhookRow) -> Webhook:
    return reply_of(Webhook, row, kinds=row.kinds["kinds"])


def delivery_of(row: WebhookDeliveryRow) -> Delivery:
    next_at = max(row.next_at, row.created_at) if row.status == DeliveryStatus.WAITING else None
    return reply_of(Delivery, row, next_at=next_at, attempts=row.attempts["attempts"])
