"""Decisions of an evaluation: the checkpoints that it starts, and its end."""

from __future__ import annotations

from typing import Any

import pytest

from muster.api.core.evaluations.decisions import REFUSED, EvaluationDecision, EvaluationRun, EvaluationState, decide
from muster.words.status import Phase

THREE = [(10, False), (20, True), (30, False)]


def seen(*runs: tuple[int, str], **more: Any) -> EvaluationState:
    made = {"each": "kept", "target": "base", "target_ended": False, "checkpoints": THREE, **more}
    return EvaluationState(runs=[EvaluationRun(step, phase) for step, phase in runs], **made)


def test_each_checkpoint_that_has_no_run_is_started() -> None:
    assert decide(seen()).starts == (10, 20, 30)
    assert decide(seen((20, "Running"), (5, "Succeeded"))).starts == (10, 30)
    assert decide(seen((10, REFUSED), (20, "Failed"), (30, "Succeeded"))).starts == ()


@pytest.mark.parametrize(("each", "step"), [("best", 20), ("last", 30)])
def test_the_best_and_the_last_are_known_when_the_job_has_ended(each: str, step: int) -> None:
    assert decide(seen(each=each)).starts == ()
    assert decide(seen(each=each, target_ended=True)).starts == (step,)
    assert decide(seen((10, "Queued"), each=each, target_ended=True)).starts == ()
    unjudged = seen(each=each, target_ended=True, checkpoints=[(10, False), (20, False)])
    assert decide(unjudged).starts == (20,)


def test_a_single_step_is_evaluated_when_it_is_there() -> None:
    assert decide(seen(each=25)).starts == ()
    assert decide(seen(each=20)).starts == (20,)
    done = decide(seen((20, "Succeeded"), each=20))  # the job goes on, and nothing more is asked of it
    assert (done.starts, done.phase) == ((), Phase.SUCCEEDED)
    missing = decide(seen(each=25, target_ended=True))
    assert (missing.phase, missing.because) == (
        Phase.FAILED,
        "job base has ended and has no checkpoint of step 25",
    )


@pytest.mark.parametrize(
    ("situation", "phase", "because"),
    [
        (
            seen((10, "Running")),
            "Running",
            "0 of 1 checkpoint of job base evaluated, 1 to come; job base has not ended",
        ),
        (
            seen((10, "Succeeded"), (20, "Failed"), (30, "Succeeded"), target_ended=True),
            "Failed",
            "2 of 3 checkpoints of job base evaluated, 1 failed",
        ),
        (
            seen((10, "Succeeded"), (20, "Succeeded"), (30, "Succeeded"), target_ended=True),
            "Succeeded",
            "3 of 3 checkpoints of job base evaluated",
        ),
        (
            seen(target_ended=True, checkpoints=[]),
            "Failed",
            "job base has ended and has no checkpoint to evaluate",
        ),
        (
            seen((10, "Running"), cancelled=True),
            "Stopping",
            "the user cancelled the job; 0 of 1 checkpoint of job base evaluated, 1 to come",
        ),
        (
            seen((10, "Cancelled"), cancelled=True),
            "Cancelled",
            "the user cancelled the job; 0 of 1 checkpoint of job base evaluated, 1 failed",
        ),
        (
            seen(suspended=True),
            "Running",
            "suspended: no more evaluations start; 0 of 0 checkpoints of job base evaluated",
        ),
    ],
)
def test_the_phase_and_its_reason(situation: EvaluationState, phase: str, because: str) -> None:
    decision = decide(situation)
    assert (decision.phase, decision.because) == (phase, because)


def test_checkpoints_that_can_not_be_listed_end_nothing() -> None:
    unreadable = seen((10, "Succeeded"), target_ended=True, checkpoints=None)
    assert decide(unreadable, "no answer") == EvaluationDecision(
        (), Phase.RUNNING, "1 of 1 checkpoint of job base evaluated; no answer"
    )
