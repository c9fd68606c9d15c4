"""`checkpoint.every: auto` follows what the operator tells of earlier attempts."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from muster.trainer.config import RankPosition
from muster.trainer.train import checkpoint_scheduler
from muster.trainer.train.numeric_guard import FIRST_STEPS, KNOWN_MIN, NumericGuard
from muster.trainer.train.rank_state import RankState
from muster.words.job import CheckpointSpec, EarlierAttempts, past_of
from muster.words.signals import Cause
from muster.words.status import Attempt, JobStatus

NO_PAST = EarlierAttempts()


def test_the_past_is_what_the_status_remembers_of_attempts_that_are_over() -> None:
    over = (
        Attempt(number=1, created_at=100.0, ended_at=400.0, cause=Cause.INFRASTRUCTURE),
        Attempt(number=2, created_at=410.0, ended_at=500.0),
        Attempt(number=3, created_at=510.0),
    )
    assert past_of(JobStatus(attempt=3, attempts=over)) == EarlierAttempts(failures=1, seconds=390.0)
    assert past_of(JobStatus()) is None


def scheduler(
    path: Path, every: int | str, past: EarlierAttempts = NO_PAST
) -> tuple[checkpoint_scheduler.CheckpointScheduler, RankState]:
    ranks = RankPosition(rank=0, local_rank=0, world=2, local_world=1)
    rank_state = RankState(path, attempt=2, rank=0, started_at=0.0)
    made = checkpoint_scheduler.CheckpointScheduler(None, every, past, ranks, rank_state, None)  # type: ignore[arg-type]
    return made, rank_state


@pytest.mark.parametrize(
    ("past", "due"), [(EarlierAttempts(), False), (EarlierAttempts(failures=10, seconds=3_000.0), True)]
)
def test_a_job_that_fails_every_five_minutes_saves_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, past: EarlierAttempts, due: bool
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now, now=1_000.0)
    monkeypatch.setattr(checkpoint_scheduler, "time", clock)
    saving, _ = scheduler(tmp_path, CheckpointSpec().every, past)
    clock.now += 120.0
    assert saving.due(10) is due


def raised(guard: NumericGuard) -> None:
    """A run whose loss has jumped from 2.5 to 7.5."""
    for step in range(KNOWN_MIN + FIRST_STEPS):
        guard.judge(5.0 if step < FIRST_STEPS else 2.5, 1.0, step)
    guard.judge(7.5, 1.0, 100)


@pytest.mark.parametrize("every", ["10m", 5])
def test_a_save_waits_for_a_usual_loss_until_the_next_one_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], every: str | int
) -> None:
    """It waited for all of the 31 steps that a raised loss may last, be they an hour."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now, now=1_000.0)
    monkeypatch.setattr(checkpoint_scheduler, "time", clock)
    saving, rank_state = scheduler(tmp_path, every)
    guard, step, first = NumericGuard(), 100, 0
    raised(guard)
    while not saving.saves(step, saving.due(step), guard):
        if not first and rank_state.heartbeat().save_waits:
            first = step
        step += 1
        clock.now += 120.0
        guard.judge(7.5, 1.0, step)
    assert step - first == 5
    assert rank_state.heartbeat().save_waits.startswith("the loss has been above ")
    assert saving.in_doubt == [step]
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(
        f"checkpoint of step {first}: waits, at most until the next one is due: the loss has been"
    )
    assert said[1].startswith(f"checkpoint of step {step}: waits no longer, although the loss has been above ")
    guard.judge(2.5, 1.0, step + 1)
    saving.saves(step + 1, False, guard)
    assert saving.in_doubt == []


def test_a_save_that_waits_is_made_when_the_loss_is_usual_again(tmp_path: Path) -> None:
    saving, _ = scheduler(tmp_path, 5)
    guard = NumericGuard()
    raised(guard)
    assert not saving.saves(105, True, guard)
    guard.judge(float("nan"), 1.0, 110)
    assert not saving.saves(110, True, guard), "numbers that are none are never saved"
    guard.judge(2.5, 1.0, 111)
    assert saving.saves(111, False, guard)
    assert saving.in_doubt == []
