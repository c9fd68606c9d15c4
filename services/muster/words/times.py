"""Times: seconds since the epoch within Muster, RFC 3339 in UTC wherever a person or another program reads them.

Durations are not times: they stay numbers of seconds everywhere.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal

# The last second that a date can say. Clocks that jump, and people who edit a status, may ask for more.
LAST_SECOND = 253_402_300_799.0

_RFC3339 = re.compile(r"(\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d)(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def rfc3339(seconds: float) -> str:
    """Format a time as `2026-11-23T07:24:58.123456Z`: with microseconds, as metav1.MicroTime, and with further digits
    if there are more, so that `epoch_seconds` gives the very number back. A time that no date can express becomes the
    nearest one that can."""
    text = repr(_sayable(seconds))
    whole, _, fraction = (format(Decimal(text), "f") if "e" in text else text).partition(".")
    return f"{datetime.fromtimestamp(int(whole), UTC):%Y-%m-%dT%H:%M:%S}.{fraction:0<6}Z"


def rfc3339_or_none(time: float | str | None) -> str | None:
    """A time of a document that another release may have written, when times were numbers, as RFC 3339."""
    return rfc3339(time) if isinstance(time, int | float) else time


def epoch_seconds(time: object) -> float:
    """Parse a time in RFC 3339 into seconds since the epoch. A number, as in earlier releases, is returned as it is.

    Raises ValueError for anything else.
    """
    if isinstance(time, int | float):
        return _sayable(time)
    match = _RFC3339.fullmatch(time) if isinstance(time, str) else None
    if match is None:
        raise ValueError(f"{time!r} is no time of RFC 3339, such as 2026-11-23T07:24:58Z")
    stamp, fraction, zone = match.groups()
    whole = int(datetime.fromisoformat(stamp + zone.upper()).timestamp())
    return _sayable(float(f"{whole}{fraction or ''}"))


def _sayable(seconds: float) -> float:
    return min(max(0.0, float(seconds)), LAST_SECOND)  # 0 also for NaN
