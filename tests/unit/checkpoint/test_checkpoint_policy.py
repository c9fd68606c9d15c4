"""When to save and what to keep, by hand-worked cases; the random ones are in test_checkpoint_survival.py."""

import math
from typing import Any

import pytest

from muster.plan.checkpoint_interval import optimal_interval_seconds
from muster.trainer.checkpoint.collect import as_kept
from muster.trainer.checkpoint.policy import (
    RetainedCommit,
    SaveHistory,
    SavePolicy,
    retained,
    seconds_between_failures,
)
from muster.words.checkpoint import Commit
from muster.words.job import Keep


def test_steps_are_counted_in_multiples_so_that_a_resumed_run_saves_at_the_same_steps() -> None:
    policy = SavePolicy(20)
    assert [step for step in range(31, 101) if policy.due(step, 0.0, SaveHistory(0.0, started_step=30))] == [
        40,
        60,
        80,
        100,
    ]
    assert not policy.due(40, 0.0, SaveHistory(0.0, started_step=40))


def test_a_time_counts_from_the_last_save_or_the_start() -> None:
    policy = SavePolicy("10m")
    assert not policy.due(5, 599.0, SaveHistory(0.0))
    assert policy.due(5, 600.0, SaveHistory(0.0))
    assert not policy.due(9, 1_199.0, SaveHistory(0.0, saved_at=600.0))
    assert policy.due(9, 1_200.0, SaveHistory(0.0, saved_at=600.0))


def test_the_interval_solves_its_equation() -> None:
    """By brute force over random lives: tests/sim/test_goodput.py."""
    save, between = 4.0, 3_600.0

    def useful(training: float) -> float:
        return training / math.expm1((training + save) / between)

    best = max((d / 10 for d in range(10, 20_000)), key=useful)
    assert optimal_interval_seconds(save, between) == pytest.approx(best + save, abs=0.1)
    assert optimal_interval_seconds(1e-3, 1e7) == pytest.approx(math.sqrt(2 * 1e-3 * 1e7), rel=0.01), "as Young's"
    assert optimal_interval_seconds(50.0, 10.0) == pytest.approx(60.0, rel=0.01), "hopeless: save as seldom as failures"


def test_a_job_that_fails_often_outweighs_the_prior_at_once() -> None:
    assert seconds_between_failures(SaveHistory(0.0, failures=3, observed_seconds=900.0)) == pytest.approx(300.0)
    prior = seconds_between_failures(SaveHistory(0.0))
    assert seconds_between_failures(SaveHistory(0.0, failures=1, observed_seconds=3 * prior)) == pytest.approx(
        2 * prior
    )


def test_auto_saves_more_often_when_failures_are_seen_and_never_faster_than_it_uploads() -> None:
    policy = SavePolicy("auto", interval_seconds_min=0.0, interval_seconds_max=math.inf)
    quiet = SaveHistory(0.0, blocked_seconds=(0.1,), upload_seconds=(1.0,), failures=0, observed_seconds=86_400.0)
    stormy = SaveHistory(0.0, blocked_seconds=(0.1,), upload_seconds=(1.0,), failures=20, observed_seconds=86_400.0)
    assert policy.interval_seconds(stormy) < policy.interval_seconds(quiet)
    slow_store = SaveHistory(
        0.0, blocked_seconds=(0.01,), upload_seconds=(500.0,), failures=10_000, observed_seconds=86_400.0
    )
    assert policy.interval_seconds(slow_store) == 625.0


def test_more_nodes_fail_more_often() -> None:
    assert seconds_between_failures(SaveHistory(0.0, nodes=8)) == pytest.approx(
        seconds_between_failures(SaveHistory(0.0)) / 8
    )


@pytest.mark.parametrize(
    ("commits", "keep", "pins", "in_use", "deleted"),
    [
        ([], Keep(), (), (), ()),
        ([RetainedCommit(s) for s in (10, 20, 30, 40)], Keep(last=2, best=0), (), (), (10, 20)),
        ([RetainedCommit(s) for s in (10, 20, 30, 40)], Keep(last=1, best=0, every=20), (), (), (10, 30)),
        ([RetainedCommit(s) for s in (10, 20, 30, 40)], Keep(last=1, best=0), (10,), (20,), (30,)),
        # The newest verified one outlives a newer one that can't be read; that one stays until all is newer than it.
        (
            [RetainedCommit(10), RetainedCommit(20), RetainedCommit(30, verified=False)],
            Keep(last=1, best=0), (), (), (10,),
        ),
        (
            [RetainedCommit(10, verified=False), RetainedCommit(20), RetainedCommit(30)],
            Keep(last=1, best=0), (), (), (10, 20),
        ),
        ([RetainedCommit(10, verified=False), RetainedCommit(20, verified=False)], Keep(last=1, best=0), (), (), ()),
        # The lowest losses stay; where none is known, the newest that was best when it was made.
        (
            [
                RetainedCommit(1, True, 3.0),
                RetainedCommit(2, True, 2.0),
                RetainedCommit(3, False, 2.5),
                RetainedCommit(4),
            ],
            Keep(last=1, best=2), (), (), (1,),
        ),
        (
            [RetainedCommit(10, True), RetainedCommit(20, True), RetainedCommit(30), RetainedCommit(40)],
            Keep(last=1, best=1), (), (), (10, 30),
        ),
    ],
)  # fmt: skip
def test_what_goes(
    commits: list[RetainedCommit], keep: Keep, pins: tuple[int, ...], in_use: tuple[int, ...], deleted: tuple[int, ...]
) -> None:
    assert retained(commits, keep, pins, in_use) == deleted


def test_the_best_are_those_by_the_metric_that_the_newest_commit_is_judged_by() -> None:
    def commit(step: int, accuracy: float, metric: str) -> Commit:
        given: dict[str, Any] = {"state": {"best": {"metric": metric, "better": "higher"}}, "best": step <= 20}
        metrics = {"evaluation_loss": step / 10, f"evaluation_{metric}": accuracy}
        return Commit.model_construct(step=step, metrics=metrics, **given)

    commits: dict[int, Commit | None] = {
        10: commit(10, 0.5, "accuracy"),
        20: commit(20, 0.9, "accuracy"),
        30: commit(30, 0.8, "accuracy"),
        40: None,
        50: commit(50, 0.6, "accuracy"),
    }
    kept = as_kept(commits)
    assert [(each.step, each.score) for each in kept] == [(10, -0.5), (20, -0.9), (30, -0.8), (40, None), (50, -0.6)]
    assert retained(kept, Keep(last=1, best=2), (), ()) == (10,)
    older: dict[str, Any] = {"state": {}, "metrics": {"evaluation_loss": 5.0}, "best": False}
    commits[50] = Commit.model_construct(step=50, **older)
    assert [each.score for each in as_kept(commits)] == [1.0, 2.0, 3.0, None, 5.0]
