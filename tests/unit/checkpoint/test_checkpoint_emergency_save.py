"""The emergency save's decision, from what each rank knows."""

import pytest

from muster.plan.checkpoint_interval import PRIOR_SAVE_SECONDS
from muster.storage.checksum import PART_BYTES
from muster.trainer.checkpoint.emergency_save import EmergencyPlan, EmergencyState, in_flight_seconds, new_seconds, plan


@pytest.mark.parametrize(
    ("in_flight", "left", "do"),
    [
        (None, None, "save"),
        (None, 1.0, "save"),  # there is nothing better to do
        (30.0, None, "wait"),  # nobody is about to go
        (30.0, 100.0, "wait"),  # both fit
        (30.0, 60.0, "keep"),  # one fits, and the one in flight is sooner over
        (30.0, 10.0, "keep"),
        (300.0, 60.0, "supersede"),  # it stands still
    ],
)
def test_what_becomes_of_the_upload_in_flight(in_flight: float | None, left: float | None, do: str) -> None:
    ranks = [EmergencyState(in_flight, 40.0, left), EmergencyState(in_flight, 20.0)]
    assert plan(ranks) == EmergencyPlan(do, left)  # type: ignore[arg-type]
    assert plan(ranks[::-1]) == EmergencyPlan(do, left)  # type: ignore[arg-type]


def test_what_one_rank_has_seen_end_has_ended() -> None:
    assert plan([EmergencyState(None, 40.0, 50.0), EmergencyState(300.0, 40.0)]).do == "wait"


@pytest.mark.parametrize(
    ("terminating", "left", "first"),
    [
        ((), 60.0, ()),
        ((2, 3), 60.0, (2, 3)),
        ((2, 3), None, ()),  # nobody knows of an end
        ((0, 1), 60.0, ()),  # rank 0 writes the COMMIT: all must be done by then
        ((0, 1, 2, 3), 60.0, ()),
    ],
)
def test_shards_of_the_terminating_go_first(
    terminating: tuple[int, ...], left: float | None, first: tuple[int, ...]
) -> None:
    standings = [
        EmergencyState(None, 10.0, left if rank in terminating or not terminating else None, rank in terminating)
        for rank in range(4)
    ]
    assert plan(standings).first == first


def test_estimates() -> None:
    assert new_seconds(1_000, []) == PRIOR_SAVE_SECONDS
    assert new_seconds(1_000, [100.0, 50.0, 200.0]) == 20
    size = 10 * PART_BYTES
    rate = PART_BYTES / 2.0
    assert in_flight_seconds(size, 0, 0.1, [rate]) == pytest.approx(20)  # as ever
    assert in_flight_seconds(size, 5 * PART_BYTES, 10, [rate]) == pytest.approx(10)
    assert in_flight_seconds(size, 5 * PART_BYTES, 60, [rate]) == pytest.approx(50)  # slower than ever
    assert in_flight_seconds(size, 0, 60, []) == pytest.approx(600)  # not a part in a minute
    assert in_flight_seconds(size, size, 60, [rate]) == 0
