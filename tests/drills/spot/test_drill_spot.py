"""The drill in short: two notices, one for each gang. A hundred: `make drill-spot`."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.drills.spot.drill import drill
from tests.drills.spot.scorecard import Outcome, Scorecard

BRIEF = Outcome("spot-0", 2, 0.5, 1.0, True, 9.0, 0, True, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.long
def test_a_notice_costs_no_retry_and_no_step(tmp_path: Path) -> None:
    score = drill(2, refused=0.1, root=tmp_path)
    # How soon is for the drill to say, on a machine that does nothing else.
    assert all(each.verified and each.elsewhere and not each.retries for each in score.outcomes), score.faults()
    assert {outcome.workers for outcome in score.outcomes} == {1, 2}
    assert [outcome.lost_steps for outcome in score.outcomes] == [0, 0]
    assert score.refused > 0, "the store did refuse"


@pytest.mark.parametrize(
    "change",
    [{"verified": False}, {"elsewhere": False}, {"retries": 1}, {"committed": 61.0}],
)
def test_the_scorecard_would_say_so(change: dict[str, object]) -> None:
    assert Scorecard([BRIEF] * 100).good
    bad = replace(BRIEF, **change)  # type: ignore[arg-type]
    assert not Scorecard([BRIEF] * 98 + [bad, bad]).good
    assert not Scorecard([]).good


def test_runs_add_up_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    score = Scorecard.read(path) + Scorecard([BRIEF], 10, 1, 60.0)
    score.write(path)
    both = Scorecard.read(path) + score
    assert (both.outcomes, both.requests, both.refused, both.seconds) == ([BRIEF, BRIEF], 20, 2, 120.0)
    assert "2 of 2" in both.page()
