"""`checkpoint.every: auto` follows what the operator tells of earlier attempts."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from muster.contract.signals import Cause
from muster.contract.spec import CheckpointSpec, Past, past_of
from muster.contract.status import Attempt, JobStatus
from muster.trainer.config import Ranks
from muster.trainer.train import checkpoint_scheduler
from muster.trainer.train.rank_state import RankState


def test_the_past_is_what_the_status_remembers_of_attempts_that_are_over() -> None:
    over = (
        Attempt(number=1, created_at=100.0, ended_at=400.0, cause=Cause.INFRASTRUCTURE),
        Attempt(number=2, created_at=410.0, ended_at=500.0),
        Attempt(number=3, created_at=510.0),
    )
    assert past_of(JobStatus(attempt=3, attempts=over)) == Past(failures=1, seconds=390.0)
    assert past_of(JobStatus()) is None


@pytest.mark.parametrize(("past", "due"), [(Past(), False), (Past(failures=10, seconds=3_000.0), True)])
def test_a_job_that_fails_every_five_minutes_saves_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, past: Past, due: bool
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now, now=1_000.0)
    monkeypatch.setattr(checkpoint_scheduler, "time", clock)
    ranks = Ranks(rank=0, local_rank=0, world=2, local_world=1)
    rank_state = RankState(tmp_path, attempt=2, rank=0, started_at=0.0)
    every = CheckpointSpec().every
    saving = checkpoint_scheduler.CheckpointScheduler(None, every, past, ranks, rank_state, None)  # type: ignore[arg-type]
    clock.now += 120.0
    assert saving.due(10) is due
