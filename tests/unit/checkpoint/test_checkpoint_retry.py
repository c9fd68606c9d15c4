"""Trying again, over a clock that only the waiting moves."""

import pytest

from muster.storage.retry import FIRST_WAIT_SECONDS, WAIT_SECONDS_MAX, StoreRetry


class Clock:
    """sleeps: what was waited for, in order."""

    def __init__(self) -> None:
        self.now, self.sleeps = 100.0, []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def retry(clock: Clock, seconds_max: float = 60.0) -> StoreRetry:
    return StoreRetry(seconds_max, lambda: clock.now, clock.sleep, lambda low, high: high)


def failing(times: int, error: Exception):  # type: ignore[no-untyped-def]
    left = [error] * times

    def request() -> str:
        if left:
            raise left.pop()
        return "answer"

    return request


def test_the_waits_double_up_to_a_bound() -> None:
    clock = Clock()
    assert retry(clock, 1e6).call(failing(10, OSError("reset")), lambda error: (False, None)) == "answer"
    doubled = [FIRST_WAIT_SECONDS * 2**n for n in range(1, 11)]
    assert clock.sleeps == pytest.approx([min(wait, WAIT_SECONDS_MAX) for wait in doubled])


def test_the_jitter_is_full() -> None:
    clock = Clock()
    lazy = StoreRetry(60, lambda: clock.now, clock.sleep, lambda low, high: low)
    assert lazy.call(failing(3, OSError("reset")), lambda error: (False, None)) == "answer"
    assert clock.sleeps == []


def test_what_the_store_asks_for_is_the_least_wait() -> None:
    clock = Clock()
    retry(clock).call(failing(1, OSError("slow down")), lambda error: (True, 7.0))
    assert clock.sleeps == [7.0]


def test_throttling_of_one_request_holds_back_the_others() -> None:
    clock = Clock()
    shared = retry(clock)
    beginning = clock.now

    def throttled() -> str:
        if clock.now == beginning:
            shared.call(lambda: "another request", lambda error: None)
            raise OSError("slow down")
        return "answer"

    shared.call(throttled, lambda error: (True, 5.0))
    assert clock.now == beginning + 5.0
    shared._not_before = clock.now + 3.0
    shared.call(lambda: "answer", lambda error: None)
    assert clock.now == beginning + 8.0


def test_it_ends_with_the_last_error_when_time_is_up_or_when_it_is_useless() -> None:
    clock = Clock()
    with pytest.raises(OSError, match="gone"):
        retry(clock, 20).call(failing(1_000, OSError("gone")), lambda error: (False, None))
    assert clock.now == 120.0
    with pytest.raises(ValueError, match="final"):
        retry(clock).call(failing(1_000, ValueError("final")), lambda error: None)
    assert clock.now == 120.0
