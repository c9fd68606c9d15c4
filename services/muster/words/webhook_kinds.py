"""Kinds of webhook events and message forms. Without pydantic, for the command line's help."""

from __future__ import annotations

from enum import StrEnum


class WebhookKind(StrEnum):
    """Kind of event that a webhook can receive."""

    JOB_SUCCEEDED = "job.succeeded"
    JOB_FAILED = "job.failed"
    JOB_CANCELLED = "job.cancelled"
    JOB_RESTARTING = "job.restarting"
    JOB_WAITS_LONG = "job.waits_long"  # for nodes, longer than the webhook's `waitSeconds`
    BUDGET_REACHED = "budget.reached"  # 80 % and 100 % of a month's budget
    TEST = "webhook.test"  # whoever asked for a test


class WebhookPreset(StrEnum):
    """A form of the body that another service wants."""

    SLACK = "slack"  # an incoming webhook of Slack, or of a server that takes its form
    OPENAI = "openai"  # `fine_tuning.job.*`, of the jobs that came by /v1/fine_tuning
