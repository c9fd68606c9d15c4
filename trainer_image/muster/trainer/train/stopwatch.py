"""Accounts of a rank's wall clock: every moment since its process started is in exactly one account."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

ACCOUNTS = ("init", "data", "load", "productive", "data_wait", "checkpoint", "evaluation", "drain")


class PhaseStopwatch:
    """Books every moment since the process started to one account.

    `started_at` is when the process started, in seconds since the epoch; the time until now goes to `init`.
    """

    def __init__(
        self, started_at: float, now: Callable[[], float] = time.monotonic, epoch: Callable[[], float] = time.time
    ) -> None:
        self._now = now
        self._totals = dict.fromkeys(ACCOUNTS, 0.0)
        self._account = "init"
        self._since = now() - max(0.0, epoch() - started_at)
        self._lock = threading.Lock()

    def switch(self, account: str) -> None:
        """Close the open account and open another, at one and the same moment."""
        with self._lock:
            moment = self._now()
            self._totals[self._account] += moment - self._since
            self._account, self._since = account, moment

    def seconds(self) -> dict[str, float]:
        """Return the seconds by account, with the open one up to this moment. Their sum is the time since the process
        started."""
        with self._lock:
            totals = dict(self._totals)
            totals[self._account] += self._now() - self._since
            return totals
