"""What failures cost, and what goodput says of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.core.seen import NOW, beat, spec

from muster.operator.core.budgets import (
    FREE,
    backoff_seconds,
    charge,
    charge_failed_node,
    preemptions_in_a_row,
    refusal,
    remaining_backoff_seconds,
)
from muster.operator.core.codes import Code
from muster.operator.core.conditions import phase_conditions
from muster.operator.core.goodput import BookedTime, active_seconds, book, lose, opened
from muster.words.job import DEFAULT_BUDGETS, Recovery
from muster.words.names import ExitCode
from muster.words.signals import Cause, TrainerPhase, TrainerSeconds
from muster.words.status import (
    Attempt,
    Failure,
    GoodputAccount,
    GoodputState,
    JobStatus,
    NodeFault,
    Phase,
    Restart,
    Restarts,
)

HOUR = 3600.0


def failure(cause: Cause = Cause.INFRASTRUCTURE, node: str | None = "a") -> Failure:
    return Failure(cause=cause, attempt=1, at=NOW, message="it broke", node=node)


def spent(cause: Cause, count: int, ago: float = HOUR) -> JobStatus:
    return JobStatus(restarts=Restarts(recent=tuple(Restart(at=NOW - ago, cause=cause) for _ in range(count))))


@pytest.mark.parametrize("cause", list(Cause))
def test_each_cause_has_its_own_budget(cause: Cause) -> None:
    budget = DEFAULT_BUDGETS.get(cause)
    other = Cause.HANG if cause is not Cause.HANG else Cause.UNKNOWN
    assert refusal(spec(), spent(other, 50), failure(cause), True, NOW) is None or budget == 0
    if budget is None:
        assert cause in FREE
        return
    assert refusal(spec(), spent(cause, max(0, budget - 1)), failure(cause), True, NOW) is None or budget == 0
    refused = refusal(spec(), spent(cause, budget), failure(cause), True, NOW)
    assert refused is not None
    assert refused.code is Code.BUDGET_SPENT
    assert "it broke" in refused.because


def test_the_window_slides() -> None:
    assert refusal(spec(), spent(Cause.HANG, 5, ago=23.9 * HOUR), failure(Cause.HANG), True, NOW) is not None
    assert refusal(spec(), spent(Cause.HANG, 5, ago=24.1 * HOUR), failure(Cause.HANG), True, NOW) is None
    assert refusal(spec(), spent(Cause.HANG, 5, ago=-9 * HOUR), failure(Cause.HANG), True, NOW) is not None, (
        "from the future"
    )


def test_a_crash_loop_is_told_by_progress() -> None:
    status = JobStatus(restarts=Restarts(without_progress=4))
    refused = refusal(spec(), status, failure(), False, NOW)
    assert refused is not None
    assert refused.code is Code.CRASH_LOOP
    assert refusal(spec(), status, failure(), True, NOW) is None
    assert refusal(spec(), status, failure(Cause.PREEMPTION), False, NOW) is None


def test_what_a_charge_writes() -> None:
    before = Restarts(
        total=3, by_cause={"hang": 1}, recent=(Restart(at=NOW - 25 * HOUR, cause=Cause.HANG),), without_progress=2
    )
    assert charge(spec(), before, failure(), False, NOW, True) == Restarts(
        total=4,
        by_cause={"hang": 1, "infrastructure": 1},
        recent=(Restart(at=NOW, cause=Cause.INFRASTRUCTURE),),
        without_progress=3,
    )
    free = charge(spec(), before, failure(Cause.PREEMPTION), False, NOW, True)
    assert (free.recent, free.without_progress, free.total) == ((), 2, 4)


def test_backoff_doubles_up_to_its_limit_with_a_jitter_that_is_always_the_same() -> None:
    recovery = Recovery(backoff_seconds=1.0, backoff_seconds_max=300.0)

    def pause(fruitless: int, attempt: int = 1) -> float:
        status = JobStatus(restarts=Restarts(without_progress=fruitless))
        return backoff_seconds(recovery, "uid", attempt, failure(), status, progressed=False)

    often = JobStatus(preemptions_in_a_row=50, restarts=Restarts(without_progress=3))
    for cause in (Cause.PREEMPTION, Cause.HANG):
        assert backoff_seconds(recovery, "uid", 1, failure(cause), often, progressed=True) == 0.0
    for fruitless, full in ((1, 1), (2, 2), (3, 4), (9, 256), (10, 300), (10_000, 300)):
        assert full / 2 <= pause(fruitless) < full
        assert pause(fruitless) == pause(fruitless)
    assert len({pause(5, attempt) for attempt in range(20)}) == 20
    assert remaining_backoff_seconds(recovery, NOW + 301, NOW) == 0, "no pause is that long: the clock went back"
    assert remaining_backoff_seconds(recovery, NOW + 200, NOW) == 200
    assert remaining_backoff_seconds(recovery, None, NOW) == 0


def test_two_failures_exclude_a_node_for_a_day() -> None:
    status = JobStatus(node_faults=(NodeFault(node="a", at=NOW - HOUR, why=""),))
    faults, excluded = charge_failed_node(spec(), status, failure(), NOW)
    assert len(faults) == 2
    assert [(entry.node, entry.until) for entry in excluded] == [("a", NOW + 24 * HOUR)]
    assert charge_failed_node(spec(), JobStatus(), failure(), NOW)[1] == ()
    old = JobStatus(node_faults=(NodeFault(node="a", at=NOW - 25 * HOUR, why=""),))
    assert charge_failed_node(spec(), old, failure(), NOW)[1] == ()
    for harmless in (Cause.USER_ERROR, Cause.OUT_OF_MEMORY, Cause.PREEMPTION, Cause.STORAGE):
        assert charge_failed_node(spec(), status, failure(harmless), NOW)[1] == ()


def test_a_preflight_that_leaves_no_hope_excludes_its_node_at_once() -> None:
    hopeless = failure().model_copy(update={"exit_code": ExitCode.PREFLIGHT_EXCLUDE})
    assert [entry.node for entry in charge_failed_node(spec(), JobStatus(), hopeless, NOW)[1]] == ["a"]
    again = failure().model_copy(update={"exit_code": ExitCode.PREFLIGHT_FAILED})
    assert charge_failed_node(spec(), JobStatus(), again, NOW)[1] == ()


def test_preemptions_in_a_row() -> None:
    assert preemptions_in_a_row(2, failure(Cause.PREEMPTION)) == 3
    assert preemptions_in_a_row(2, failure(Cause.HANG)) == 0


# --- goodput ---


def test_time_is_what_rank_zero_says_and_the_rest_stays_open_while_it_runs() -> None:
    account = TrainerSeconds(init=9, load=4, data=1, productive=20, data_wait=2, checkpoint=3)
    booked = book(GoodputAccount(seconds={"queue": 10}, since=NOW), {}, NOW + 40, None, beat(1, 9, seconds=account))
    assert booked.account.seconds == {"queue": 10, "loading": 5, "productive": 20, "data_wait": 2, "checkpoint": 3}
    assert booked.account.since == NOW + 30
    again = book(booked.account, booked.attempt_seconds, NOW + 41, None, beat(1, 9, seconds=account))
    assert again == booked
    ended = book(booked.account, booked.attempt_seconds, NOW + 50, GoodputState.STALLED, beat(1, 9, seconds=account))
    assert (ended.account.seconds["stalled"], ended.account.since) == (20, NOW + 50)


SPANS = st.lists(
    st.tuples(
        st.floats(-500, 500),
        st.sampled_from([None, GoodputState.QUEUE, GoodputState.STARTING, GoodputState.DRAINING]),
        st.floats(0, 300),
        st.floats(0, 50),
    ),
    max_size=12,
)


@given(SPANS)
def test_the_books_balance_whatever_the_clock_and_the_heartbeats_say(
    spans: list[tuple[float, GoodputState | None, float, float]],
) -> None:
    booked, now = BookedTime(opened(GoodputAccount(), NOW), {}), NOW
    for jump, rest, productive, waited in spans:
        now += jump
        account = TrainerSeconds(productive=productive, data_wait=waited)
        booked = book(
            booked.account, booked.attempt_seconds, now, rest, beat(1, 1, phase=TrainerPhase.STEP, seconds=account)
        )
        assert sum(booked.account.seconds.values()) == pytest.approx(booked.account.since - NOW, abs=1e-6)
        assert all(value >= 0 for value in booked.account.seconds.values())
    lost, steps = lose(booked, Attempt(number=1, created_at=NOW, resume_step=10, last_step=30), 20)
    assert sum(lost.account.seconds.values()) == pytest.approx(lost.account.since - NOW, abs=1e-6)
    assert steps == 10


def test_half_of_the_steps_lost_is_half_of_the_productive_time() -> None:
    booked = BookedTime(GoodputAccount(seconds={"productive": 80.0}, since=NOW), {"productive": 40.0})
    after, steps = lose(booked, Attempt(number=1, created_at=0, resume_step=10, last_step=30), 20)
    assert (steps, after.account.seconds, after.attempt_seconds["lost"]) == (
        10,
        {"productive": 60.0, "lost": 20.0},
        20.0,
    )
    for attempt in (Attempt(number=1, created_at=0), Attempt(number=1, created_at=0, resume_step=9, last_step=5)):
        assert lose(booked, attempt, 0) == (booked, 0)


def test_active_time_leaves_out_queue_and_suspension() -> None:
    account = GoodputAccount(seconds={"queue": 5, "suspended": 7, "productive": 11}, since=NOW)
    assert active_seconds(account, Phase.RUNNING, NOW + 2) == 13
    assert active_seconds(account, Phase.QUEUED, NOW + 2) == 11
    assert active_seconds(account, Phase.RUNNING, NOW - 50) == 11


@pytest.mark.parametrize("now", [-1e12, 0.0, NOW, 1e18])
def test_conditions_survive_any_clock(now: float) -> None:
    first = phase_conditions((), Phase.RUNNING, "Training", "it trains", now, 3)
    assert [(c.type, c.status, c.reason, c.observed_generation) for c in first] == [("Running", "True", "Training", 3)]
    then = phase_conditions(first, Phase.CANCELLED, "Cancelled", "you did", now, 4)
    assert {c.type: c.status for c in then} == {"Running": "False", "Failed": "True"}
    assert phase_conditions(then, Phase.CANCELLED, "Cancelled", "you did, again", now, 5) == then
