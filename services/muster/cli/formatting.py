"""Numbers and times as people read them."""

from __future__ import annotations

import math
from datetime import datetime

from muster.contract import text
from muster.contract.text import plural
from muster.contract.times import epoch_seconds

__all__ = ["NOTHING", "amount", "clock", "duration", "loss", "moment", "plural", "share", "size"]

NOTHING = "–"


def duration(seconds: float | None) -> str:
    """`8s`, `3m12s`, `2h05m`, `4d3h`."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600}h"


def amount(value: float | None) -> str:
    """Three digits and a letter: `842`, `51.2k`, `8.03G`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return _three_digits(value / limit) + letter
    return f"{int(value)}" if value == int(value) else _three_digits(value)


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def size(count: float | None) -> str:
    """Bytes with a binary unit."""
    return NOTHING if count is None else text.size(count)


def loss(value: float | None) -> str:
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.4f}"


def share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def clock(at: float | str | None) -> str:
    """Local time of day, of seconds since the epoch or of RFC 3339."""
    return _local(at, "%H:%M:%S")


def moment(at: float | str | None) -> str:
    """Local date and time, of seconds since the epoch or of RFC 3339."""
    return _local(at, "%Y-%m-%d %H:%M:%S")


def _local(at: float | str | None, form: str) -> str:
    return datetime.fromtimestamp(epoch_seconds(at)).strftime(form) if at else NOTHING
