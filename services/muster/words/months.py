"""Calendar months in UTC, by which budgets and usage are counted."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_MONTH = re.compile(r"(\d{4})-(0[1-9]|1[0-2])", re.ASCII)


def month_of(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m}"


def month_range(month: str) -> tuple[float, float]:
    """Return the first moment of the month and that of the next month, in UTC. Raises ValueError."""
    match = _MONTH.fullmatch(month)
    if match is None or not 1970 <= int(match[1]) < 9999:
        raise ValueError(f"must be a month such as 2026-11, not {month[:40]!r}")
    year, number = int(match[1]), int(match[2])
    after = (year + 1, 1) if number == 12 else (year, number + 1)
    return _first_moment(year, number), _first_moment(*after)


def _first_moment(year: int, month: int) -> float:
    return datetime(year, month, 1, tzinfo=UTC).timestamp()
