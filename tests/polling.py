"""The one way to wait in a test: ask again until the answer is there or the deadline has passed."""

import time
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")

INTERVAL_SECONDS = 0.02
WAIT_SECONDS_MAX = 120.0  # a bound for broken code alone: a busy machine has been seen to stand still for half a minute


def eventually(question: Callable[[], Answer], what: str, timeout_seconds: float = WAIT_SECONDS_MAX) -> Answer:
    """Return the first truthy answer of `question`; raise AssertionError naming `what` when none came in time.

    The time-out never decides a passing test. An AssertionError inside the question counts as "not yet" and is shown
    when time is up.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        last: object
        try:
            answer = question()
            if answer:
                return answer
            last = answer
        except AssertionError as error:
            last = error
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout_seconds:g} s for {what}; the last answer was {last!r}")
        time.sleep(INTERVAL_SECONDS)
