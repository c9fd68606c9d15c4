"""Open pages are told of news at a pace that the API bears."""

from __future__ import annotations

import pytest

from muster.web.turns import StreamTurns


def test_a_few_at_once_and_the_rest_in_turn() -> None:
    turns = StreamTurns(per_second=10, at_once=3)
    assert [turns.delay(100.0) for _ in range(6)] == pytest.approx([0, 0, 0, 0.1, 0.2, 0.3])
    assert turns.delay(100.35) == pytest.approx(0.05)
    assert [turns.delay(200.0) for _ in range(4)] == pytest.approx([0, 0, 0, 0.1]), "a quiet time is worth three turns"


def test_no_more_than_the_pace_over_any_time() -> None:
    turns = StreamTurns(per_second=25, at_once=25)
    told = [10.0 + turns.delay(10.0) for _ in range(200)]
    assert max(told) == pytest.approx(17.0)
    assert sum(at <= 11.0 for at in told) == 50
