"""From which commit an attempt resumes must be known: what can't be read is waited for, and nobody begins anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.seen import NOW, beat, exited, granted, observed, running, spec, with_status, worker

from muster.operator.core.audit import audit
from muster.operator.core.codes import Code
from muster.operator.core.decide import decide
from muster.operator.core.decision import CreateWorker
from muster.operator.core.observed import CommittedSteps, ObservedJob
from muster.words.signals import TrainerPhase
from muster.words.status import CheckpointStatus, JobStatus, Phase

REMEMBERED = CheckpointStatus(step=30, committed_at=NOW - 60.0, uri="file:///ckpt/uid-1")
DOWN = {"commits_unreadable": "s3://ckpt does not answer"}


def follow(seen: ObservedJob, passes: int = 12) -> ObservedJob:
    for _ in range(passes):
        decision = decide(seen)
        assert audit(seen, decision) == ()
        if decision.status == seen.status:
            return seen if seen.workers == () else replace(seen, workers=())
        seen = with_status(seen, decision.status)
    raise AssertionError("no end")


def queued(**changes: Any) -> ObservedJob:
    status = JobStatus(queued_at=NOW - 9.0, since=NOW - 9.0, checkpoint=REMEMBERED)
    return observed(status, reservations=(granted(),), **changes)


@pytest.mark.parametrize("changes", [DOWN, {}], ids=["the store is down", "the folder is empty"])
def test_a_job_whose_commits_are_not_found_waits_and_says_so_and_holds_nothing(changes: dict[str, Any]) -> None:
    decision = decide(queued(**changes))
    status = decision.status
    assert (status.phase, status.code, status.attempt) == (Phase.QUEUED, Code.AWAITING_COMMITS, 0)
    assert (status.reservation, status.retry_at) == (1, NOW + 15.0)
    assert "checkpoint of step 30 was saved" in status.because or DOWN["commits_unreadable"] in status.because


def test_it_goes_on_when_they_are_found_again() -> None:
    waiting = with_status(queued(**DOWN), decide(queued(**DOWN)).status)
    back = replace(
        waiting,
        now=NOW + 20.0,
        reservations=(granted(1),),
        commits_unreadable="",
        committed=CommittedSteps(30, NOW - 60.0),
    )
    status = decide(back).status
    assert (status.phase, status.attempt, status.resume_step) == (Phase.STARTING, 1, 30)


def test_a_job_that_never_committed_begins_at_once() -> None:
    assert decide(observed(reservations=(granted(),))).status.phase is Phase.STARTING


@pytest.mark.parametrize(("wish", "phase"), [("cancel", Phase.CANCELLED), ("suspend", Phase.SUSPENDED)])
def test_the_user_is_obeyed_while_commits_cannot_be_read(wish: str, phase: Phase) -> None:
    seen = replace(running(), **DOWN)
    seen = replace(seen, spec=seen.spec.model_copy(update={wish: True}))
    seen = with_status(seen, decide(seen).status)
    assert seen.status.phase is Phase.STOPPING
    gone = replace(seen, workers=())
    assert follow(gone).status.phase is phase


def test_a_short_silence_of_the_store_costs_a_gang_no_nodes_and_a_long_one_does() -> None:
    seen = running(committed=CommittedSteps(3, NOW))
    seen = with_status(seen, seen.status.model_copy(update={"checkpoint": REMEMBERED}))
    crashed = replace(seen, committed=None, workers=(exited(0, 137), exited(1, 137)), **DOWN)
    crashed = with_status(crashed, decide(crashed).status)
    waits = follow(replace(crashed, workers=()))
    assert (waits.status.phase, waits.status.code) == (Phase.RESTARTING, Code.AWAITING_COMMITS)
    assert waits.status.gang.nodes, "kept for a moment"
    answers = replace(waits, now=waits.status.retry_at or 0.0, commits_unreadable="", committed=CommittedSteps(30, NOW))
    assert decide(answers).status.phase is Phase.STARTING
    silent = follow(replace(waits, now=waits.status.retry_at or 0.0))
    assert (silent.status.phase, silent.status.gang.nodes) == (Phase.QUEUED, ())


def test_a_pass_that_cannot_create_workers_is_said() -> None:
    seen = observed(reservations=(granted(),))
    seen = with_status(seen, decide(seen).status)
    assert all(isinstance(action, CreateWorker) for action in decide(seen).actions)
    decision = decide(replace(seen, trouble="No space left on device"))
    assert "can't be created: No space left on device" in decision.because


@pytest.mark.parametrize(("seconds", "words"), [(30.0, ""), (130.0, "more than 2 min"), (700.0, "more than 10 min")])
def test_a_first_step_that_takes_minutes_is_said(seconds: float, words: str) -> None:
    seen = running(step=0, spec=spec(recovery={"dryRun": True}))
    at = NOW + seconds
    first = beat(1, 0, at, phase=TrainerPhase.STEP, progressed_at=NOW, limit_seconds=3_600.0)
    other = beat(1, 0, at, phase=TrainerPhase.STEP, progressed_at=NOW, limit_seconds=3_600.0, rank=1)
    crew = (worker(0, heartbeats=(first,)), worker(1, heartbeats=(other,)))
    because = decide(replace(seen, now=at, workers=crew)).because
    assert words in because
    assert bool(words) == ("first step" in because)
