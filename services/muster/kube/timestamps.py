"""Times as Kubernetes writes them: RFC 3339, in UTC."""

from __future__ import annotations

from datetime import UTC, datetime

from muster.words.times import epoch_seconds


def seconds_of(timestamp: str | None) -> float:
    """Return the seconds since the epoch; 0 for none."""
    return epoch_seconds(timestamp) if timestamp else 0.0


def now() -> str:
    """Return the time to the second (metav1.Time)."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def now_micro() -> str:
    """Return the time to the microsecond (metav1.MicroTime), as events and leases have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
