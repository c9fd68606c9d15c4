"""Alertmanager's webhook: who may call it, what a call may hold, and what becomes of each alert in it.

It answers 200 for every call that it understood, also where nothing followed: Alertmanager repeats what failed, and an
alert about a gang that is gone would never succeed. https://prometheus.io/docs/alerting/latest/configuration/#webhook_config
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from muster.operator.server import HttpReply, HttpRequest, refusal, words
from muster.operator.sources.alerts import AlertOutcome, report
from muster.operator.sources.hub import SignalHub

SOURCE = "alertmanager"
PATH = "/alerts"
BODY_BYTES_MAX = 1_000_000
ALERTS_MAX = 2_000  # in one call; a megabyte holds no more


class AlertWebhook:
    """The address that Alertmanager calls. While another operator leads, `hub` is None and it refuses with 503.

    `token` is called for each request, so that a Secret can be rotated; None or an empty token lets nobody in. `count`
    is called with what became of each alert.
    """

    def __init__(self, token: Callable[[], str | None], count: Callable[[str], None]) -> None:
        self._token, self._count = token, count
        self.hub: SignalHub | None = None

    def __call__(self, request: HttpRequest) -> HttpReply:
        if (refused := refusal(request, self._token(), BODY_BYTES_MAX)) is not None:
            return refused
        hub = self.hub
        if hub is None:
            return HttpReply(503, words("this operator does not lead; try again"))
        body = request.body()
        try:
            alerts = json.loads(body)["alerts"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return HttpReply(400, words("this is no Alertmanager notification: JSON with a list `alerts` is wanted"))
        if not isinstance(alerts, list) or len(alerts) > ALERTS_MAX:
            return HttpReply(400, words(f"`alerts` must be a list of at most {ALERTS_MAX}"))
        outcomes = Counter(str(self._take(hub, alert)) for alert in alerts)
        for outcome, number in outcomes.items():
            for _ in range(number):
                self._count(outcome)
        return HttpReply(200, json.dumps(outcomes).encode())

    def _take(self, hub: SignalHub, alert: Any) -> AlertOutcome:
        try:
            labels = {str(name): str(value) for name, value in alert["labels"].items()}
            notes = {str(name): str(value) for name, value in (alert.get("annotations") or {}).items()}
            fingerprint, status, at = str(alert["fingerprint"]), str(alert["status"]), _seconds(alert["startsAt"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return AlertOutcome.MALFORMED
        name = labels.get("alertname", "an alert")
        message = f"{name}: {notes.get('summary') or notes.get('description') or 'fires'}"
        outcome = report(labels, message, at, SOURCE, fingerprint)
        if isinstance(outcome, AlertOutcome):
            return outcome
        if status == "resolved":
            return hub.withdraw(SOURCE, outcome.uid, outcome.key)
        return hub.take(SOURCE, outcome) if status == "firing" else AlertOutcome.MALFORMED


def token_in(path: Path | None) -> Callable[[], str | None]:
    """Reads the file anew each time."""

    def read() -> str | None:
        try:
            return path.read_text().strip() if path else None
        except OSError:
            return None

    return read


def _seconds(text: Any) -> float:
    """RFC 3339, as Go writes it: up to nine digits of a second."""
    return datetime.fromisoformat(str(text)).timestamp()
