"""The shares of useful time and the intervals that benchmarks/goodput.py finds, in small."""

import pytest
from benchmarks.goodput import CASES, intervals, storm


@pytest.mark.parametrize("seed", [1, 2])
def test_nine_tenths_are_useful_with_a_fault_every_five_minutes(seed: int) -> None:
    found = storm(hours=8.0, seed=seed, recovery_seconds=10.0)
    assert found["faults"] > 60
    assert found["ettr"] >= 0.9
    assert found["ettr"] == pytest.approx(found["formula"], abs=0.03)
    assert found["ettr_by_account"] == pytest.approx(found["ettr"], abs=0.005)
    assert found["interval"] < found["first_interval"] / 10, "it learnt from its failures"


def test_the_automatic_interval_is_the_best_by_brute_force() -> None:
    rows = intervals(seed=1)
    assert len(rows) == len(CASES)
    for row in rows:
        assert row["auto"] == pytest.approx(row["best"], rel=0.1), row
