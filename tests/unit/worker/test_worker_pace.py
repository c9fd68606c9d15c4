"""Limits of a program without a step: learnt from its own pace, stated by its user, or unknown."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import muster.trainer


@pytest.fixture
def pace() -> Any:
    spec = importlib.util.spec_from_file_location(
        "pace_of_this_test", Path(muster.trainer.__file__).parents[1] / "worker" / "pace.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def facts(watch: Any) -> tuple[bool, float, float | None]:
    return watch.watched, watch.progressed_at, watch.limit_seconds


def test_nothing_is_known_before_the_first_step_and_after_the_last(pace: Any) -> None:
    rank = pace.StepPace(0.0, steps=20)
    assert facts(rank.watch(10_000.0)) == (False, 0.0, None)
    rank.stepped(19, 10_000.0)
    assert facts(rank.watch(10_001.0)) == (True, 10_000.0, pace.FLOOR_SECONDS)
    rank.stepped(20, 10_002.0)
    assert facts(rank.watch(20_000.0)) == (False, 10_002.0, None)


def test_a_limit_is_ten_times_the_longest_pause_and_half_an_hour_at_least(pace: Any) -> None:
    rank = pace.StepPace(0.0)
    for step, at in ((7, 100.0), (8, 101.0), (8, 200.0), (9, 801.0), (10, 802.0)):
        rank.stepped(step, at)
    assert rank.first_step_at == 100.0
    assert facts(rank.watch(900.0)) == (True, 802.0, 7_000.0)


def test_a_user_may_bound_steps_or_output_or_switch_it_off(pace: Any) -> None:
    steps, output = pace.StepPace(0.0, step_seconds=60), pace.StepPace(0.0, silent_seconds=90)
    for rank in (steps, output):
        rank.stepped(1, 10.0)
        rank.wrote(5.0)
    assert facts(steps.watch(20.0)) == (True, 10.0, 60.0)
    assert facts(output.watch(20.0)) == (True, 5.0, 90.0)
    both = pace.StepPace(0.0, step_seconds=60, silent_seconds=30)
    assert facts(both.watch(20.0)) == (True, 0.0, 30.0), "output is bounded from the start"
    both.stepped(1, 10.0)
    both.wrote(70.0)
    assert facts(both.watch(75.0)) == (True, 10.0, 60.0), "the nearer bound"
    assert facts(pace.StepPace(3.0, off=True).watch(75.0)) == (False, 3.0, None)


def test_output_is_a_sign_of_life_where_no_bound_of_steps_is_stated(pace: Any) -> None:
    """A long evaluation writes; what hangs does not. Whoever bounds the steps means the steps."""
    learnt, stated = pace.StepPace(0.0), pace.StepPace(0.0, step_seconds=60)
    for rank in (learnt, stated):
        rank.stepped(1, 10.0)
        rank.wrote(5_000.0)
    assert facts(learnt.watch(6_000.0)) == (True, 5_000.0, pace.FLOOR_SECONDS)
    assert facts(stated.watch(6_000.0)) == (True, 10.0, 60.0)


def test_what_nobody_counts_any_more_is_not_watched(pace: Any) -> None:
    rank = pace.StepPace(0.0, step_seconds=60)
    rank.stepped(1, 10.0)
    assert facts(rank.watch(20.0, counted=False)) == (False, 10.0, None)
    quiet = pace.StepPace(0.0, silent_seconds=90)
    quiet.stepped(1, 10.0)
    assert facts(quiet.watch(20.0, counted=False)) == (True, 0.0, 90.0), "its output is still seen"
