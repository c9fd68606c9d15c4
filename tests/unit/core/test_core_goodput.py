"""Every second is in exactly one state, and all make up the wall clock, whatever is booked in whatever order."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.core.seen import beat

from muster.operator.core.goodput import BookedTime, book, lose, opened
from muster.words.signals import TrainerSeconds
from muster.words.status import Attempt, GoodputAccount, GoodputState

CREATED = 1_700_000_000.0
amounts = st.floats(0.0, 5_000.0)
accounts = st.fixed_dictionaries(dict.fromkeys(TrainerSeconds.model_fields, amounts))
bookings = st.tuples(
    st.floats(-600.0, 3_600.0),  # the clock moves on, or jumps back
    st.sampled_from([None, *GoodputState]),
    st.one_of(st.none(), accounts),
    st.booleans(),  # the attempt ends with it
)


@given(st.lists(bookings, max_size=30))
def test_the_books_balance(story: list[tuple[float, GoodputState | None, dict[str, Any] | None, bool]]) -> None:
    account, mine, now = opened(GoodputAccount(), CREATED), dict[str, float](), CREATED
    for seconds, rest, heartbeat, ends in story:
        now += seconds
        heard = beat(1, 5, now, seconds=TrainerSeconds(**heartbeat)) if heartbeat else None
        booked = book(account, mine, now, rest, heard)
        if ends:
            attempt = Attempt(number=1, created_at=CREATED, last_step=20)
            booked, _ = lose(booked, attempt, committed_step=7)
            booked = BookedTime(booked.account, {})
        account, mine = booked.account, booked.attempt_seconds
        assert set(account.seconds) <= set(GoodputState)
        assert all(value >= -1e-6 for value in account.seconds.values())
        assert math.isclose(sum(account.seconds.values()), account.since - CREATED, rel_tol=1e-9, abs_tol=1e-3)
