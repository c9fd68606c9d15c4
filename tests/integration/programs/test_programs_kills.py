"""SIGKILLs at random moments of folder checkpoints. `python -m tests.drills.programs.kills` does 200 of them."""

from pathlib import Path

import pytest
from tests.drills.programs.kills import kill_many


@pytest.mark.long
def test_no_kill_publishes_or_resumes_a_torn_checkpoint(tmp_path: Path) -> None:
    seen = kill_many(tmp_path, kills=15, seed=7)
    assert seen.kills == 15
