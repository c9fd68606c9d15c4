"""Usage of a project, computed by hand, and the sums that must agree whatever ran."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.plan.usage import AMOUNTS, Amounts, HeldNodes, held_of, usage
from muster.words.months import month_of, month_range
from muster.words.prices import InstancePrice, Prices
from muster.words.status import Attempt

HOUR = 3600.0
NOVEMBER, DECEMBER = month_range("2026-11")
FEBRUARY = month_range("2027-02")
TABLE = Prices(
    region="us-east-1",
    types={
        "eight": InstancePrice(gpus=8, on_demand=40.0, spot=10.0),
        "spot-only": InstancePrice(gpus=8, spot=8.0),
        "cpu": InstancePrice(on_demand=2.0),
    },
)


def held(job: str, since: float, until: float | None, **more: object) -> HeldNodes:
    base = HeldNodes(job, f"{job}-name", "ann", NOVEMBER + since * HOUR, None, 2, 8, 0.0, "eight", "on-demand")
    return replace(base, until=None if until is None else NOVEMBER + until * HOUR, **more)  # type: ignore[arg-type]


def november(*held: HeldNodes, now: float = DECEMBER) -> Amounts:
    return usage(held, TABLE, NOVEMBER, DECEMBER, now).total


def test_months_are_those_of_utc() -> None:
    assert month_of(NOVEMBER) == "2026-11"
    assert month_of(NOVEMBER - 0.001) == "2026-10"
    assert (DECEMBER - NOVEMBER) / HOUR == 30 * 24
    assert (FEBRUARY[1] - FEBRUARY[0]) / HOUR == 28 * 24
    assert month_range("2026-12")[1] == month_range("2027-01")[0]
    for word in ("2026-13", "2026-1", "26-11", "2026-11-01", "", "٢٠٢٦-11"):
        with pytest.raises(ValueError, match="must be a month"):
            month_range(word)


def test_attempts_restarts_and_changes_of_size_add_up() -> None:
    """3 h on two nodes, a pause of one hour, 2 h on one node: 8 node-hours of 8 GPUs at 40 a node."""
    total = november(held("a", 0, 3), held("a", 4, 6, workers=1))
    assert (total.node_hours, total.gpu_hours, total.cost) == (8.0, 64.0, 320.0)
    assert (total.cpu_hours, total.saved, total.unpriced_hours) == (0.0, 0.0, 0.0)


def test_what_spot_saved_and_what_failures_cost() -> None:
    """Of 4 h on two spot nodes 1 h was lost: 8 node-hours at 10 instead of 40, a quarter of them for nothing."""
    total = november(held("a", 0, 4, capacity="spot", lost_seconds=HOUR))
    assert (total.cost, total.saved) == (80.0, 240.0)
    assert (total.lost_gpu_hours, total.lost_cost) == (16.0, 20.0)


def test_a_job_without_gpus_is_counted_in_cores_and_pays_the_machine() -> None:
    total = november(held("a", 0, 3, gpus_per_worker=0, cpus_per_worker=4.0, instance_type="cpu"))
    assert (total.node_hours, total.cpu_hours, total.gpu_hours, total.cost) == (6.0, 24.0, 0.0, 12.0)


def test_what_is_not_known_is_said_and_not_guessed() -> None:
    told = usage(
        [held("a", 0, 1, instance_type="new"), held("b", 0, 1, instance_type="spot-only", capacity="spot")],
        TABLE, NOVEMBER, DECEMBER, DECEMBER,
    )  # fmt: skip
    assert (told.total.unpriced_hours, told.total.cost, told.total.saved) == (2.0, 16.0, 0.0)
    assert told.notes == (
        "no on-demand price of new: its hours are not in the cost",
        "no on-demand price of spot-only: what its spot nodes saved is not known",
        "the cost is an estimate, by the table of prices as it is now (of us-east-1)",
    )
    coreless = usage([held("a", 0, None, gpus_per_worker=0)], TABLE, NOVEMBER, DECEMBER, NOVEMBER + HOUR)
    assert any("named no gang.resources.cpu" in note for note in coreless.notes)
    assert any("1 job held nodes at the time of this report" in note for note in coreless.notes)


def test_a_life_over_the_turn_of_the_month_is_divided_there() -> None:
    """From five hours before December to seven into it, on two nodes."""
    long = replace(held("a", 0, None), since=DECEMBER - 5 * HOUR, until=DECEMBER + 7 * HOUR)
    told = usage([long], TABLE, NOVEMBER, DECEMBER + 30 * 24 * HOUR, DECEMBER + 100 * HOUR)
    assert [(line.month, line.node_hours) for line in told.lines] == [("2026-11", 10.0), ("2026-12", 14.0)]
    assert [(each.month, each.node_hours) for each in told.months] == [("2026-11", 10.0), ("2026-12", 14.0)]
    assert november(long).node_hours == 10.0


def test_what_lives_is_counted_until_now_and_not_beyond() -> None:
    assert november(held("a", 0, None), now=NOVEMBER + 2 * HOUR).node_hours == 4.0
    assert november(held("a", 3, None), now=NOVEMBER + 2 * HOUR).node_hours == 0.0, "a clock that went back"
    assert november(held("a", 3, 2)).node_hours == 0.0


def test_an_attempt_that_no_scheduler_has_placed_holds_nothing() -> None:
    attempt = Attempt(number=1, created_at=0.0, workers=2, gpus_per_worker=8, seconds={"lost": 2.0, "stalled": 1.0})
    assert held_of(attempt.model_copy(update={"outcome": "waiting"}), "a", "a", "ann", 4.0) is None
    assert held_of(attempt, "a", "n", "ann", 4.0) == HeldNodes("a", "n", "ann", 0.0, None, 2, 8, 0.0, lost_seconds=3.0)


lives = st.builds(
    lambda job, person, since, length, workers, gpus, kind, capacity, lost: HeldNodes(
        job, job, person, NOVEMBER + since * HOUR, None if length is None else NOVEMBER + (since + length) * HOUR,
        workers, gpus, 0.0 if gpus else 4.0, kind, capacity, lost,
    ),
    st.sampled_from("abc"), st.sampled_from(["ann", "bob"]), st.floats(-2000, 2000),
    st.none() | st.floats(-1, 2000), st.integers(1, 9), st.sampled_from([0, 1, 8]),
    st.sampled_from(["eight", "spot-only", "cpu", "new"]), st.sampled_from(["spot", "on-demand"]),
    st.floats(0, 1e6),
)  # fmt: skip


@settings(max_examples=50)
@given(st.lists(lives, max_size=8), st.floats(-3000, 3000))
def test_sums_agree_and_months_partition(held: list[HeldNodes], cut: float) -> None:
    """Jobs, people and months each sum to the project, and any two ranges side by side to the one of both."""
    since, until, now = NOVEMBER - 2500 * HOUR, DECEMBER + 2500 * HOUR, NOVEMBER + 1500 * HOUR
    whole = usage(held, TABLE, since, until, now)
    middle = min(until, max(since, NOVEMBER + cut * HOUR))
    parts = [usage(held, TABLE, since, middle, now).total, usage(held, TABLE, middle, until, now).total]
    alone = [usage([each for each in held if each.job == job], TABLE, since, until, now).total for job in "abc"]
    for name in AMOUNTS:
        total = pytest.approx(getattr(whole.total, name), rel=1e-9, abs=1e-6)
        for group in (whole.lines, whole.months, whole.people, parts, alone):
            assert sum(getattr(each, name) for each in group) == total, name
        for line in whole.lines:
            alone_in_month = usage(held, TABLE, *month_range(line.month), now)
            same = next(each for each in alone_in_month.lines if each.job == line.job)
            if since <= month_range(line.month)[0] and month_range(line.month)[1] <= until:
                assert getattr(line, name) == pytest.approx(getattr(same, name), rel=1e-9, abs=1e-6)
    assert whole.total.lost_cost <= whole.total.cost + 1e-6
    assert whole.total.lost_gpu_hours <= whole.total.gpu_hours + 1e-6
