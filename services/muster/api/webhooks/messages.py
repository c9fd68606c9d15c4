"""Messages of webhooks, as the document that each of the formats requires. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from muster.api.core.events.repository import NamedJob
from muster.api.core.events.types import EventType
from muster.replies.views import with_times
from muster.words.times import rfc3339
from muster.words.webhook_kinds import WebhookKind, WebhookPreset

KIND_OF_EVENT: Mapping[str, WebhookKind] = {
    EventType.JOB_SUCCEEDED: WebhookKind.JOB_SUCCEEDED,
    EventType.JOB_FAILED: WebhookKind.JOB_FAILED,
    EventType.JOB_CANCELLED: WebhookKind.JOB_CANCELLED,
    EventType.JOB_RESTARTING: WebhookKind.JOB_RESTARTING,
}
_PREDICATES = {
    WebhookKind.JOB_SUCCEEDED: "has succeeded",
    WebhookKind.JOB_FAILED: "has failed",
    WebhookKind.JOB_CANCELLED: "was cancelled",
    WebhookKind.JOB_RESTARTING: "restarts",
}
_OPENAI_TYPES = {
    WebhookKind.JOB_SUCCEEDED: "fine_tuning.job.succeeded",
    WebhookKind.JOB_FAILED: "fine_tuning.job.failed",
    WebhookKind.JOB_CANCELLED: "fine_tuning.job.cancelled",
    WebhookKind.TEST: "fine_tuning.job.succeeded",  # the test of a receiver that knows OpenAI's types alone
}


@dataclass(frozen=True)
class WebhookMessage:
    """A message. `key` names its subject: a webhook receives one message of each key."""

    kind: WebhookKind
    key: str
    at: float  # in seconds since the epoch
    text: str  # for people, in a sentence
    data: dict[str, Any] = field(default_factory=dict)
    job_id: str | None = None


def of_event(job: NamedJob, event: Mapping[str, Any]) -> WebhookMessage | None:
    """Return the message about a job's event, which is given as its row; None for an event that is not sent to
    webhooks."""
    kind = KIND_OF_EVENT.get(event["type"])
    if kind is None:
        return None
    said, number = event["body"], event["number"]
    summary = {
        "id": number,
        "type": event["type"],
        "at": rfc3339(event["at"]),
        "attempt": event["attempt"],
        "message": said["message"],
        "data": with_times(said["data"]),
    }
    text = f"{job.name} {_PREDICATES[kind]} (project {job.project}, {job.owner}): {said['message']}"
    return WebhookMessage(
        kind, f"job/{job.id}/{number}", event["at"], text, {"job": _job_facts(job), "event": summary}, job.id
    )


def of_wait(job: NamedJob, phase: str, because: str, since: float, limit: float, now: float) -> WebhookMessage:
    """Return the message that the job waits for longer than `limit` seconds. The job's next wait has another key."""
    waited = now - since
    text = f"{job.name} has waited for {waited / 60:.0f} min (project {job.project}, {job.owner}): {because}"
    data = {
        "job": _job_facts(job),
        "phase": phase,
        "because": because,
        "since": rfc3339(since),
        "waitedSeconds": round(waited, 3),
        "limitSeconds": limit,
    }
    return WebhookMessage(WebhookKind.JOB_WAITS_LONG, f"wait/{job.id}/{since:.3f}", now, text, data, job.id)


def of_test(webhook: str, project: str, person: str, key: str, now: float) -> WebhookMessage:
    text = f"A test of webhook {webhook} (project {project}), asked for by {person}"
    return WebhookMessage(WebhookKind.TEST, key, now, text, {"webhook": webhook, "person": person})


def body_of(preset: str | None, project: str, message: WebhookMessage, number: str) -> str | None:
    """The document that is sent, as JSON; None for what the form has no words for. `number` is the message's own."""
    if preset == WebhookPreset.SLACK:
        return _json({"text": _slack(message.text)})
    if preset == WebhookPreset.OPENAI:
        kind = _OPENAI_TYPES.get(message.kind)
        if kind is None:
            return None
        data = {"id": f"ftjob-{message.job_id or 'test'}"}
        return _json({
            "id": f"evt_{number}", "object": "event", "created_at": int(message.at), "type": kind, "data": data,
        })  # fmt: skip
    data = {"project": project, "text": message.text, **message.data}
    return _json({"type": message.kind, "timestamp": rfc3339(message.at), "data": data})


def _job_facts(job: NamedJob) -> dict[str, str]:
    return {"id": job.id, "name": job.name, "owner": job.owner}


def _slack(text: str) -> str:
    """Return the text in a form in which Slack finds no link, mention or command
    (https://api.slack.com/reference/surfaces/formatting)."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")[:3_000]


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"))
