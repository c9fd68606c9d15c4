"""GPU-hours and money of a job's attempts, and tables with gaps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from muster.documents.prices import checked_prices, load_prices
from muster.words.prices import Bill, InstancePrice, Prices, bill
from muster.words.status import Attempt

HOUR = 3600.0
TABLE = Prices(
    types={
        "eight": InstancePrice(gpus=8, on_demand=40.0, spot=10.0),
        "no-spot": InstancePrice(gpus=8, on_demand=40.0),
    }
)


def attempt(
    hours: float | None, workers: int = 2, gpus: int = 8, kind: str = "eight", capacity: Any = "spot"
) -> Attempt:
    return Attempt(
        number=1,
        created_at=0.0,
        ended_at=None if hours is None else hours * HOUR,
        workers=workers,
        gpus_per_worker=gpus,
        instance_type=kind,
        capacity=capacity,
    )


def test_hours_times_price_and_what_spot_saved() -> None:
    told = bill([attempt(3.0), attempt(1.0, capacity="on-demand")], TABLE, now=0.0)
    assert told == Bill(
        gpu_hours={"spot": 48.0, "on-demand": 16.0}, node_hours=8.0, cost=6 * 10.0 + 2 * 40.0, saved=6 * 30.0
    )


def test_who_takes_half_of_a_machine_pays_half() -> None:
    assert bill([attempt(1.0, workers=1, gpus=4)], TABLE, now=0.0).cost == 5.0


def test_an_attempt_that_lives_is_counted_until_now() -> None:
    assert bill([attempt(None, workers=1)], TABLE, now=2 * HOUR).cost == 20.0
    assert bill([attempt(None, workers=1)], TABLE, now=-HOUR).cost == 0.0, "a clock that went back gives no money"


@pytest.mark.parametrize(
    ("kind", "capacity", "gap"),
    [
        ("no-spot", "spot", "no spot price of no-spot"),
        ("unheard-of", "on-demand", "no on-demand price of unheard-of"),
        ("", None, "no on-demand price of nodes of an unknown type"),
    ],
)
def test_a_gap_is_told_and_not_filled(kind: str, capacity: Any, gap: str) -> None:
    told = bill([attempt(1.0), attempt(2.0, kind=kind, capacity=capacity), attempt(2.0, kind=kind)], TABLE, now=0.0)
    assert told.gaps[0] == gap
    assert told.cost == 20.0
    assert told.unpriced_hours == 8.0
    assert sum(told.gpu_hours.values()) == 16.0 * 5, "hours are counted all the same"


def test_attempts_of_before_there_were_prices_cost_nothing_and_say_nothing() -> None:
    old = Attempt.model_validate({"number": 1, "createdAt": 0.0, "endedAt": HOUR, "nodes": ["a"], "worldSize": 8})
    assert bill([old], TABLE, now=0.0) == Bill()


def test_the_built_in_table_says_what_it_knows() -> None:
    prices = load_prices()
    assert prices.currency == "USD"
    assert all(entry.on_demand and entry.gpus == 8 and entry.spot is None for entry in prices.types.values())


def test_ones_own_table_is_laid_over_it(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"currency": "EUR", "types": {"p5.48xlarge": {"spot": 12.5}, "*": {"onDemand": 1.0}}}))
    prices = load_prices(path)
    assert prices.currency == "EUR"
    assert prices.types["p5.48xlarge"] == InstancePrice(spot=12.5)
    assert "p4d.24xlarge" in prices.types
    assert bill([attempt(1.0, kind="", capacity=None)], prices, now=0.0).cost == 2.0


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "line 1, column 2: expected a key in double quotes"),
        ("[]", "must be a mapping"),
        ('{"types": {"a": {"onDemand": -1}}}', "types.a.onDemand"),
        ('{"types": {"a": {"onDemnd": 1}}}', "types.a.onDemnd: unknown key"),
        ('{"types": {"a": {"onDemand": "12"}}}', "types.a.onDemand"),
        ('{"types": {"a": {"spot": NaN}}}', "line 1, column 26: NaN is not a word of JSON"),
        ('{"types": {\n"a": {"spot": -1}}}', "line 2, column 7: types.a.spot"),
    ],
)
def test_a_bad_table_is_named_with_its_fault(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "prices.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"the price table .*prices\.json can't be used") as refused:
        checked_prices(path)
    assert fault in str(refused.value)
    with pytest.raises(ValueError, match="No such file"):
        checked_prices(tmp_path / "nothing.json")
