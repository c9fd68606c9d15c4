"""Messages about monthly budgets that are used up to 80 or 100 per cent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from muster.api.core.database.db import Database
from muster.api.tenants.projects.accounting import CountedUsage
from muster.api.webhooks import outbox
from muster.api.webhooks.messages import WebhookMessage
from muster.words.quotas import MonthSpent, ProjectQuota, Quota, Spent
from muster.words.webhook_kinds import WebhookKind

PERCENTS = (100, 80)  # those of the alerts (docs/runbooks.md); of a budget that is used up, only that is told


async def notify_of_budgets(
    database: Database, quotas: Mapping[str, ProjectQuota], counted: Mapping[str, CountedUsage]
) -> None:
    """Put into the outbox a message for each budget that is reached, if a webhook wants it and has not received it
    yet."""
    async with database.read() as session:
        webhooks = await outbox.interested(session, kind=WebhookKind.BUDGET_REACHED)
    counted_webhooks = [webhook for webhook in webhooks if webhook.project in quotas and webhook.project in counted]
    messages = [
        (webhook, message)
        for webhook in counted_webhooks
        for message in reached(webhook.project, quotas[webhook.project], counted[webhook.project].spent)
    ]
    await outbox.note_once(database, messages)


def reached(project: str, quota: ProjectQuota, spent: MonthSpent) -> Iterator[WebhookMessage]:
    """A budget of nothing is never reached: nothing begins under it."""
    yield from _of(project, None, quota, spent.total, spent)
    for person, used in spent.people.items():
        yield from _of(project, person, quota.person, used, spent)


def _of(project: str, person: str | None, limits: Quota, used: Spent, month: MonthSpent) -> Iterator[WebhookMessage]:
    pairs = (
        ("gpuHours", "GPU-hours", limits.gpu_hours_per_month, used.gpu_hours),
        ("money", "(in the prices' currency)", limits.money_per_month, used.money),
    )
    for unit, words, limit, amount in pairs:
        percent = next((each for each in PERCENTS if limit and amount >= limit * each / 100), None)
        if percent is None:
            continue
        whose = f"{person} in project {project}" if person else f"project {project}"
        text = f"Budget: {whose} has used {percent} % of {limit:g} {words} in {month.month} ({amount:.6g})"
        data = {
            "person": person,
            "unit": unit,
            "month": month.month,
            "percent": percent,
            "limit": limit,
            "used": amount,
        }
        # With the limit: one that is raised may be reached again.
        key = f"budget/{month.month}/{unit}/{person or ''}/{limit:g}/{percent}"
        yield WebhookMessage(WebhookKind.BUDGET_REACHED, key, month.as_of, text, {"budget": data})
