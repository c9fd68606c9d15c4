"""Messages about jobs that wait for nodes for longer than a webhook's limit."""

from __future__ import annotations

from sqlalchemy import select

from muster.api.core.clock import clock
from muster.api.core.database.db import Database
from muster.api.core.database.tables import JobRow, WebhookRow
from muster.api.webhooks import outbox
from muster.api.webhooks.messages import NamedJob, WebhookMessage, of_wait
from muster.words.redaction import redact
from muster.words.status import Phase
from muster.words.times import epoch_seconds
from muster.words.webhook_kinds import WebhookKind

WAIT_SECONDS = 20.0  # between looks: the smallest limit is a minute
_WAITING = (Phase.QUEUED, Phase.RESTARTING)


async def notify_of_waits(database: Database) -> bool:
    """Put a message into the outbox for each wait that is over its limit and that has not been reported yet."""
    async with database.read() as session:
        webhooks = await outbox.interested(session, kind=WebhookKind.JOB_WAITS_LONG)
        if not webhooks:
            return False
        projects = {webhook.project for webhook in webhooks}
        waiting = select(JobRow).where(JobRow.phase.in_(_WAITING), JobRow.live.is_(True), JobRow.project.in_(projects))
        jobs = (await session.scalars(waiting)).all()
        now = await clock(session)
    messages = [
        (webhook, message)
        for webhook in webhooks
        for job in jobs
        if job.project == webhook.project and (message := _message(webhook, job, now)) is not None
    ]
    await outbox.note_once(database, messages)
    return False


def _message(webhook: WebhookRow, job: JobRow, now: float) -> WebhookMessage | None:
    try:
        since = epoch_seconds(job.status.get("since"))
    except ValueError:
        since = 0.0
    since = since or job.created_at  # of a job that no operator has looked at yet
    if now - since < webhook.wait_seconds:
        return None
    because = redact(str(job.status.get("because", "")))
    named = NamedJob(job.id, job.name, job.owner, job.project)
    return of_wait(named, job.phase, because, since, webhook.wait_seconds, now)
