"""The drill in short: one kind of fault, once. All of them: `make drill-faults`."""

import pytest
from tests.drills.faults.drill import run
from tests.drills.faults.kinds import KINDS
from tests.drills.faults.scorecard import Results

SHORT = {"exception"}

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def test_a_fault_is_judged_survived_and_accounted_for() -> None:
    results = Results()
    run([kind for kind in KINDS if kind.name in SHORT], 1, results)
    assert {outcome.kind for outcome in results.outcomes} == SHORT
    assert [outcome.document() for outcome in results.outcomes if not outcome.good] == []
    page = results.page("make drill-faults", 1, 1)
    assert "| **unknown** | 1 |" in page
    assert "1 faults of 1 kinds, 0 not as they ought to be" in page
