"""Rate limits of tokens: a bucket per token, in this process alone (two processes allow twice as much)."""

from __future__ import annotations

import time
from collections import OrderedDict

_TOKENS_MAX = 10_000  # remembered: whoever is forgotten begins with a full bucket


class RateLimits:
    """Buckets of `burst` requests, which fill again by `per_second`."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._per_second, self._burst = per_second, burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by token: requests left, and when

    def take(self, token: str, now: float | None = None) -> float:
        """Return 0 for a request that may pass, else the seconds until there is room for one."""
        now = time.monotonic() if now is None else now
        left, at = self._buckets.get(token, (float(self._burst), now))
        left = min(float(self._burst), left + (now - at) * self._per_second)
        wait = 0.0 if left >= 1 else (1 - left) / self._per_second
        self._buckets[token] = (left - 1 if not wait else left, now)
        self._buckets.move_to_end(token)
        if len(self._buckets) > _TOKENS_MAX:
            self._buckets.popitem(last=False)
        return wait
