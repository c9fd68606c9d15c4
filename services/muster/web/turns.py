"""Rate limit for refreshing open pages: each refresh costs the API a request."""

from __future__ import annotations

import asyncio

# Turns in a second, and how many are given at once after a quiet time. A page that reads itself anew takes 2 ms (a
# list) to 10 ms (a job): at double, submissions that come twice a second wait for pages (benchmarks/web.py). After a
# quiet time the last of fifty pages hears of news after a good second.
TURNS_PER_SECOND = 12.0
TURNS_AT_ONCE = 36


class StreamTurns:
    """Turns of the streams of one process, in the order in which they asked."""

    def __init__(self, per_second: float = TURNS_PER_SECOND, at_once: int = TURNS_AT_ONCE) -> None:
        self._between = 1 / per_second
        self._saved = at_once * self._between  # seconds that a quiet time may be worth
        self._next = float("-inf")

    async def turn(self) -> None:
        """Return when it is the caller's turn."""
        delay = self.delay(asyncio.get_running_loop().time())
        if delay > 0:
            await asyncio.sleep(delay)

    def delay(self, now: float) -> float:
        """Take the next turn; in how many seconds it is."""
        at = max(self._next, now - self._saved + self._between)
        self._next = at + self._between
        return max(0.0, at - now)
