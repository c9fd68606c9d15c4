"""The outbox to its receivers: at least once, by any number of API processes, again after longer and longer pauses.

A row is claimed by moving its `next_at`, so that no other process sends it meanwhile; a process that dies between the
delivery and its record leaves a row that another one sends again under the same id.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy import Select, delete, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.clock import clock
from muster.api.core.database.db import Database
from muster.api.core.database.tables import WebhookDeliveryRow, WebhookRow
from muster.api.core.errors import ApiError
from muster.api.core.observability import WebhookMetrics
from muster.api.webhooks.reach import NetworkReach
from muster.api.webhooks.schemas import DeliveryAttempt, DeliveryStatus
from muster.api.webhooks.sealing import SecretEncryption
from muster.api.webhooks.sending import SEND_SECONDS_MAX, SendResult, SignedMessage, send
from muster.secrets.box import SecretsLocked

log = structlog.get_logger("muster.api.webhooks")

DELIVERY_SECONDS = 1.0  # between looks for what is due
MEASURE_SECONDS = 15.0  # between looks at what waits, for /metrics; Prometheus asks about as often
CLAIM_SECONDS = 4 * SEND_SECONDS_MAX  # after which a process that claimed a row is taken for dead
SENDING_MAX = 64  # messages at a time in this process,
SENDING_PER_WEBHOOK_MAX = 4  # and to one receiver: one that never answers holds up nobody else
BACKOFF_SECONDS, BACKOFF_FACTOR, BACKOFF_SECONDS_MAX = 5.0, 3.0, 7_200.0  # some 18 attempts in a day
ATTEMPTS_KEPT = 50
_OUTCOMES = {
    DeliveryStatus.DELIVERED: "delivered",
    DeliveryStatus.WAITING: "retried",
    DeliveryStatus.FAILED: "given_up",
}
KEPT_SECONDS = 30 * 86_400.0  # the history of what was delivered or given up


@dataclass(frozen=True)
class ClaimedDelivery:
    """A row that this process is to send. `tries` is the fence: a later claim has a greater number."""

    seq: int
    webhook_id: str
    tries: int
    message: SignedMessage


class DeliverySender:
    def __init__(
        self, database: Database, sealing: SecretEncryption, reach: NetworkReach, metrics: WebhookMetrics
    ) -> None:
        self._database, self._sealing, self._reach, self._metrics = database, sealing, reach, metrics
        self._sending: dict[asyncio.Task[None], str] = {}  # with the webhook's id
        self.freed = asyncio.Event()  # a place: there may be more to send at once

    async def step(self) -> bool:
        """Start to send what is due and has a slot. Never True: slots that become free wake the work."""
        free = SENDING_MAX - len(self._sending)
        busy = [each for each, count in Counter(self._sending.values()).items() if count >= SENDING_PER_WEBHOOK_MAX]
        if free and await self._is_due(busy):
            for claimed in await self._claim(free, busy):
                task = asyncio.create_task(self._deliver(claimed), name=f"webhook {claimed.message.id}")
                self._sending[task] = claimed.webhook_id
                task.add_done_callback(self._done)
        return False

    async def measure(self) -> bool:
        """Show how much waits, and for how long. Every process sees the same rows. Never True."""
        waiting = select(func.count(), func.min(WebhookDeliveryRow.created_at)).join(
            WebhookRow, WebhookRow.id == WebhookDeliveryRow.webhook_id
        )
        waiting = waiting.where(WebhookDeliveryRow.status == DeliveryStatus.WAITING, WebhookRow.enabled.is_(True))
        async with self._database.read() as session:
            now = await clock(session)
            count, oldest = (await session.execute(waiting)).one()
        self._metrics.waiting.set(count)
        self._metrics.oldest.set(0.0 if oldest is None else max(0.0, now - oldest))
        return False

    async def stop(self) -> None:
        """Cancel the deliveries in progress. They end without a record, and another process sends them again."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def send_now(self, message: str) -> None:
        """Send one message at once, whether or not it is due, and record what came of it; none if it is gone, or under
        way in another process."""
        async with self._database.write() as session:
            now = await clock(session)
            row = (await session.execute(_rows().where(WebhookDeliveryRow.id == message))).one_or_none()
            claimed = await self._claimed(session, row[0], row[1], now) if row is not None else None
        if claimed is not None:
            await self._deliver(claimed)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._sending.pop(task, None)
        self.freed.set()
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, ApiError):
            log.error("a message could not be recorded and will be sent again", error=repr(error)[:300])

    async def _is_due(self, busy: Sequence[str]) -> bool:
        """Looked up before anything is locked."""
        async with self._database.read() as session:
            now = await clock(session)
            due = exists(_due(now, busy).with_only_columns(WebhookDeliveryRow.seq))
            return bool((await session.execute(select(due))).scalar_one())

    async def _claim(self, free: int, busy: Sequence[str]) -> list[ClaimedDelivery]:
        counts = Counter(self._sending.values())
        claimed: list[ClaimedDelivery] = []
        async with self._database.write() as session:
            now = await clock(session)
            query = _due(now, busy).order_by(WebhookDeliveryRow.next_at).limit(free)
            query = query.with_for_update(skip_locked=True, of=WebhookDeliveryRow)
            for row, webhook in (await session.execute(query)).all():
                if counts[webhook.id] >= SENDING_PER_WEBHOOK_MAX:
                    continue
                one = await self._claimed(session, row, webhook, now)
                if one is not None:
                    claimed.append(one)
                    counts[webhook.id] += 1
        return claimed

    async def _claimed(
        self, session: AsyncSession, row: WebhookDeliveryRow, webhook: WebhookRow, now: float
    ) -> ClaimedDelivery | None:
        """The row, claimed; None where its secret can't be opened, which is an attempt that failed."""
        row.tries += 1
        try:
            secrets = await asyncio.to_thread(self._sealing.secrets_of, webhook, now)
        except SecretsLocked as locked:
            _note(row, SendResult(time.time(), None, f"nothing was sent: {locked}", 0.0), now)
            return None
        row.next_at = now + CLAIM_SECONDS
        return ClaimedDelivery(row.seq, webhook.id, row.tries, SignedMessage(row.id, webhook.url, row.body, secrets))

    async def _deliver(self, claimed: ClaimedDelivery) -> None:
        result = await send(claimed.message, self._reach)
        await self._record(claimed, result)

    async def _record(self, claimed: ClaimedDelivery, result: SendResult) -> None:
        """A delivery counts whoever made it; a failure only if nobody else tries the row again by now."""
        async with self._database.write() as session:
            now = await clock(session)
            row = await session.get(WebhookDeliveryRow, claimed.seq, with_for_update=True)
            counts = row is not None and (result.error is None or row.tries == claimed.tries)
            outcome = None
            if row is not None and counts and row.status == DeliveryStatus.WAITING:
                _note(row, result, now)
                outcome = _OUTCOMES[DeliveryStatus(row.status)]
        if outcome is not None:  # after the commit: what is not written is sent and counted again
            self._metrics.attempts.labels(outcome).inc()
            self._metrics.seconds.observe(result.seconds)
        if result.error is not None:
            log.info("a webhook's message was not delivered", message=claimed.message.id, cause=result.error)


def pause_seconds(tries: int) -> float:
    """Return the pause before the next attempt, after so many: it grows, and is never the same for two messages."""
    seconds = min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS * BACKOFF_FACTOR ** min(tries - 1, 20))
    return seconds * random.uniform(0.75, 1.25)


async def forget_old(session: AsyncSession, now: float) -> None:
    """Drop the history of long ago."""
    old = (WebhookDeliveryRow.created_at < now - KEPT_SECONDS, WebhookDeliveryRow.status != DeliveryStatus.WAITING)
    await session.execute(delete(WebhookDeliveryRow).where(*old))


async def replay(session: AsyncSession, row: WebhookDeliveryRow, give_up_seconds: float) -> None:
    """Send it again, whatever came of it before: at once, and until it is given up anew."""
    now = await clock(session)
    values = {"status": DeliveryStatus.WAITING, "next_at": 0.0, "give_up_at": now + give_up_seconds}
    await session.execute(update(WebhookDeliveryRow).where(WebhookDeliveryRow.seq == row.seq).values(values))
    await session.refresh(row)


def _rows() -> Select[tuple[WebhookDeliveryRow, WebhookRow]]:
    return select(WebhookDeliveryRow, WebhookRow).join(WebhookRow, WebhookRow.id == WebhookDeliveryRow.webhook_id)


def _due(now: float, busy: Sequence[str]) -> Select[tuple[WebhookDeliveryRow, WebhookRow]]:
    query = _rows().where(
        WebhookDeliveryRow.status == DeliveryStatus.WAITING,
        WebhookDeliveryRow.next_at <= now,
        WebhookRow.enabled.is_(True),
    )
    return query.where(WebhookRow.id.not_in(busy)) if busy else query


def _note(row: WebhookDeliveryRow, result: SendResult, now: float) -> None:
    attempt = DeliveryAttempt(at=result.at, status=result.status, error=result.error, seconds=result.seconds)
    earlier = row.attempts["attempts"][1 - ATTEMPTS_KEPT :]
    row.attempts = {"attempts": [*earlier, attempt.model_dump(mode="json", by_alias=True)]}
    if result.error is None:
        row.status, row.delivered_at = DeliveryStatus.DELIVERED, now
    elif now >= row.give_up_at:
        row.status = DeliveryStatus.FAILED
    else:  # the last attempt is when the time is over, and not before
        row.next_at = min(now + max(pause_seconds(row.tries), result.retry_after), row.give_up_at)
