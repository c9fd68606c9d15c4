"""Numbers and times as people read them."""

from __future__ import annotations

from datetime import datetime

from muster.words import text
from muster.words.text import NOTHING, amount, duration, loss, plural, share
from muster.words.times import epoch_seconds

__all__ = ["NOTHING", "amount", "clock", "duration", "loss", "moment", "plural", "share", "size"]


def size(count: float | None) -> str:
    """Format bytes with a binary unit."""
    return NOTHING if count is None else text.size(count)


def clock(at: float | str | None) -> str:
    """Format the local time of day, from seconds since the epoch or RFC 3339."""
    return _local(at, "%H:%M:%S")


def moment(at: float | str | None) -> str:
    """Format the local date and time, from seconds since the epoch or RFC 3339."""
    return _local(at, "%Y-%m-%d %H:%M:%S")


def _local(at: float | str | None, form: str) -> str:
    return datetime.fromtimestamp(epoch_seconds(at)).strftime(form) if at else NOTHING
