"""Preemption in thousands of random fleets; tests/unit/core/test_core_preemption.py walks a few hundred of them."""

import pytest

from tests.sim.walks import walk


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_fleet_goes_round_in_a_circle() -> None:
    walks = [walk(seed) for seed in range(400, 8_400)]
    assert [seen.fault for seen in walks if seen.fault] == []
    assert sum(seen.states for seen in walks) > 30_000
