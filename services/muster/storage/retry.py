"""Trying again: with full jitter (AWS Architecture Blog, "Exponential Backoff And Jitter"), together when the store
throttles, and not for ever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

FIRST_WAIT_SECONDS = 0.1
WAIT_SECONDS_MAX = 10.0


class StoreRetry:
    """One for all requests of a store: when it throttles one of them, the others wait as well."""

    def __init__(
        self,
        seconds_max: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._seconds_max, self._clock, self._sleep, self._uniform = seconds_max, clock, sleep, uniform
        self._not_before = 0.0
        self._lock = threading.Lock()

    def call(self, request: Callable[[], T], wait_for: Callable[[Exception], tuple[bool, float | None] | None]) -> T:
        """Call `request()` repeatedly until it succeeds or `seconds_max` have passed; then its last error is raised.

        `wait_for` answers None where trying again is useless, and else whether the error concerns all requests, with
        the seconds that the store asked for.
        """
        deadline, tries = self._clock() + self._seconds_max, 0
        while True:
            self._wait_until(self._not_before)
            try:
                return request()
            except Exception as error:
                verdict = wait_for(error)
                tries += 1
                if verdict is None or self._clock() >= deadline:
                    raise
                concerns_all, asked_for = verdict
                wait = self._uniform(0, min(WAIT_SECONDS_MAX, FIRST_WAIT_SECONDS * 2**tries))
                again_at = min(self._clock() + max(wait, asked_for or 0), deadline)
                if concerns_all:
                    with self._lock:
                        self._not_before = max(self._not_before, again_at)
                self._wait_until(again_at)

    def _wait_until(self, moment: float) -> None:
        if (wait := moment - self._clock()) > 0:
            self._sleep(wait)
