"""A worker that the world lets not exist: what never passes ends the job at once, what may pass holds no nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.unit.core.seen import NODES, NOW, granted, spec, starting, with_status, worker

from muster.operator.core.decide import decide
from muster.operator.core.decision import RemoveWorker
from muster.operator.core.observed import ObservedJob, Rejection
from muster.words.signals import Cause
from muster.words.status import Phase

QUOTA = 'pods "job-1-1" is forbidden: exceeded quota: two'
ACCOUNT = 'pods "job-1-0" is forbidden: error looking up service account team/trainer: not found'


def rejected(kind: Rejection, why: str, after: float, attempt: int = 1, **changes: Any) -> ObservedJob:
    """Both workers of a starting gang are refused for the first time now, and are looked at `after` seconds later."""
    seen = starting(**changes)
    crew = tuple(worker(i, attempt, state="starting", since=NOW, reason=why, rejection=kind) for i in range(len(NODES)))
    return replace(seen, workers=crew, now=NOW + after)


def through(seen: ObservedJob) -> ObservedJob:
    """Carry out what follows until nothing more does: the orders are taken back, so that nobody is in sight."""
    for _ in range(10):
        decision = decide(seen)
        if any(isinstance(action, RemoveWorker) for action in decision.actions):
            seen = replace(seen, workers=())
        elif decision.status == seen.status:
            return seen
        else:
            seen = with_status(seen, decision.status)
    raise AssertionError("no end")


def test_what_never_passes_is_the_users_error_and_gives_the_nodes_back_at_once() -> None:
    seen = through(rejected(Rejection.PERMANENT, ACCOUNT, after=6.0))
    status = seen.status
    assert (status.phase, status.gang.nodes, status.reservation) == (Phase.FAILED, (), 2)
    assert status.last_failure is not None
    assert status.last_failure.cause is Cause.USER_ERROR
    assert ACCOUNT in status.because


def test_what_is_created_together_with_the_job_may_come_a_moment_later() -> None:
    seen = rejected(Rejection.PERMANENT, ACCOUNT, after=1.0)
    decision = decide(seen)
    assert decision.status.phase is Phase.STARTING
    assert ACCOUNT in decision.because, "and meanwhile the reason is said"


def test_what_may_pass_goes_back_into_the_queue_and_charges_nobody() -> None:
    assert decide(rejected(Rejection.TEMPORARY, QUOTA, after=10.0)).status.phase is Phase.STARTING
    seen = through(rejected(Rejection.TEMPORARY, QUOTA, after=16.0))
    status = seen.status
    assert (status.phase, status.gang.nodes, status.reservation) == (Phase.QUEUED, (), 1)
    assert QUOTA in status.because
    assert "free for others" in status.because
    assert (status.restarts.total, status.restarts.by_cause, status.restarts.without_progress) == (0, {}, 0)
    assert status.attempts[-1].outcome == "rejected"
    assert status.last_failure is None
    assert status.retry_at == seen.now + 15.0


def test_the_pause_doubles_up_to_the_jobs_own_and_a_quota_that_is_raised_ends_it() -> None:
    seen = through(rejected(Rejection.TEMPORARY, QUOTA, after=16.0, spec=spec(recovery={"backoffSecondsMax": 50})))
    pauses = []
    for attempt in range(2, 5):
        pauses.append((seen.status.retry_at or 0.0) - seen.now)
        seen = replace(seen, now=seen.status.retry_at or 0.0, reservations=(granted(seen.status.reservation),))
        seen = with_status(seen, decide(seen).status)
        assert (seen.status.phase, seen.status.attempt) == (Phase.STARTING, attempt)
        crew = tuple(
            worker(i, attempt, state="starting", since=seen.now, reason=QUOTA, rejection=Rejection.TEMPORARY)
            for i in range(2)
        )
        seen = through(replace(seen, workers=crew, now=seen.now + 20.0))
    assert pauses == [15.0, 30.0, 50.0]
    seen = replace(seen, now=seen.status.retry_at or 0.0, reservations=(granted(seen.status.reservation),))
    assert decide(seen).status.phase is Phase.STARTING


def test_a_rejected_gang_obeys_its_user() -> None:
    seen = rejected(Rejection.TEMPORARY, QUOTA, after=3.0)
    seen = replace(seen, spec=seen.spec.model_copy(update={"cancel": True}))
    assert through(seen).status.phase is Phase.CANCELLED
