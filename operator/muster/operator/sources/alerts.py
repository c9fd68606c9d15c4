"""Conversion of an alert's labels (or a recording rule's) to a signal about one attempt of one job. Pure.

An alert concerns Muster when it carries `muster_action`. `job_uid` and `attempt` name its job and attempt, as on every
per-job series; `node`, `worker`, `incarnation` (of that worker) and `rank` are used if they are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from muster.words.names import FIRST_INCARNATION
from muster.words.signals import Signal, SignalKind

MESSAGE_LENGTH_MAX = 500

# What an action asks for, in the words of the core, which decides what comes of it.
KINDS: dict[str, SignalKind] = {
    "restart": SignalKind.STALL,
    "exclude-node": SignalKind.GPU_FAULT,
    "drain": SignalKind.NODE_DRAIN,
    "none": SignalKind.ALERT,
}


class AlertOutcome(StrEnum):
    """Outcome of an alert: the label of muster_operator_alerts_total."""

    TAKEN = "taken"
    REPEATED = "repeated"  # known already: a retry, or Alertmanager's repeat_interval
    RESOLVED = "resolved"
    NO_ACTION = "no_action"
    UNKNOWN_ACTION = "unknown_action"
    NO_ATTEMPT = "no_attempt"  # no job_uid, or no number as attempt: nobody knows whom it means
    JOB_GONE = "job_gone"
    ATTEMPT_GONE = "attempt_gone"
    TOO_MANY = "too_many"
    MALFORMED = "malformed"


@dataclass(frozen=True, slots=True)
class SignalReport:
    """One signal about one job. Two reports of a source with the same key are the same alert, seen again."""

    uid: str
    key: str
    signal: Signal


def report(labels: Mapping[str, str], message: str, at: float, source: str, key: str) -> SignalReport | AlertOutcome:
    """The report of an alert that fires, or why it is none."""
    action = labels.get("muster_action", "")
    if not action:
        return AlertOutcome.NO_ACTION
    kind = KINDS.get(action)
    if kind is None:
        return AlertOutcome.UNKNOWN_ACTION
    uid, attempt = labels.get("job_uid", ""), _number(labels.get("attempt"))
    if not uid or attempt is None:
        return AlertOutcome.NO_ATTEMPT
    signal = Signal(
        kind=kind,
        attempt=attempt,
        at=at,
        worker=_number(labels.get("worker")),
        incarnation=_number(labels.get("incarnation")) or FIRST_INCARNATION,
        rank=_number(labels.get("rank")),
        node=labels.get("node") or None,
        message=message[:MESSAGE_LENGTH_MAX],
        source=source,
    )
    return SignalReport(uid, key, signal)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= 9 else None
