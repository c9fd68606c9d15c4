"""The same failure twice ends the job, if it is the program's own; data that can't be learnt from is passed over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.seen import (
    committed,
    crew,
    exited,
    gone,
    running,
    settled,
    spec,
    starting,
    with_status,
    worker,
    write,
)  # fmt: skip
from tests.unit.core.test_core_decide import check

from muster.operator.core.codes import Code
from muster.operator.core.crash_loops import AT_ONCE_SECONDS
from muster.operator.core.observed import ObservedJob
from muster.words.signals import Cause
from muster.words.status import DataSkip, GoodputState, Phase

PATIENT = {"backoffSeconds": 0, "excludeNodeAfter": 100, "budgets": {"user_error": 5, "out_of_memory": 5, "numeric": 5}}


def trains(**changes: Any) -> ObservedJob:
    return running(spec=spec(recovery=PATIENT), **changes)


def ended(seen: ObservedJob, code: int, message: str, step: int | None = 5, **changes: Any) -> ObservedJob:
    """The state when the attempt has ended so and nobody is left; the next one trains already, if there is one."""
    end = exited(0, code, attempt=seen.status.attempt, message=message, **changes)
    assert end.exit is not None
    end = replace(end, exit=end.exit.model_copy(update={"step": step}))
    seen = write(replace(seen, workers=(end, crew(seen.status.attempt)[1])))
    seen = settled(gone(seen))
    if seen.status.phase is not Phase.STARTING:
        return seen
    return settled(replace(seen, workers=crew(seen.status.attempt)))


@pytest.mark.parametrize(
    ("code", "first", "second"),
    [
        (1, "KeyError: 'text'", "KeyError: 'text'"),
        (1, "IndexError: sample 4711 at 0x7f01", "IndexError: sample 12 at 0x7fff"),
        (80, "training.data: is empty", "training.data: is empty"),
        (139, "rank 1 was killed by SIGSEGV", "rank 1 was killed by SIGSEGV"),
        (
            1,
            "RuntimeError: CUDA error: device-side assert triggered",
            "RuntimeError: CUDA error: device-side assert triggered",
        ),
    ],
)
def test_the_same_failure_at_the_same_step_is_not_tried_a_third_time(code: int, first: str, second: str) -> None:
    seen = ended(trains(), code, first)
    assert (seen.status.phase, seen.status.attempt) == (Phase.RUNNING, 2)
    seen = ended(seen, code, second)
    assert (seen.status.phase, seen.status.code) == (Phase.FAILED, Code.REPEATED_FAILURE)
    assert "twice the same after step 5" in seen.status.because
    assert seen.status.because.endswith(second)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (137, "rank 1 was killed by SIGKILL"),
        (88, "RuntimeError: connection closed by peer"),
        (84, "ValueError: the port is taken"),
        (83, "StorageError: the bucket does not answer"),
        (82, "NumericError: the loss is nan"),
        (1, "ConnectionResetError: [Errno 104]"),
        (1, "OSError: [Errno 5] Input/output error"),
        (1, "DistBackendError: NCCL error: unhandled system error"),
        (1, "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
        (1, "rank 0 ended with exit code 1, and did not say why; see its log"),
    ],
)
def test_what_the_world_did_is_tried_again(code: int, message: str) -> None:
    seen = ended(ended(trains(), code, message), code, message)
    assert seen.status.attempt == 3, seen.status.because


@pytest.mark.parametrize(
    ("step", "message"), [(6, "KeyError: 'text'"), (5, "KeyError: 'other'"), (None, "KeyError: 'text'")]
)
def test_another_failure_is_another_matter(step: int | None, message: str) -> None:
    seen = ended(ended(trains(), 1, "KeyError: 'text'"), 1, message, step)
    assert seen.status.attempt == 3


def test_twice_means_in_a_row() -> None:
    seen = ended(trains(), 1, "KeyError: 'text'")
    seen = ended(seen, 137, "rank 1 was killed by SIGKILL")
    assert ended(seen, 1, "KeyError: 'text'").status.attempt == 4


# --- data that is passed over ---


def test_after_a_numeric_failure_the_data_up_to_it_is_passed_over() -> None:
    seen = trains(committed=committed(3))
    assert seen.status.data_skip is None
    seen = ended(seen, 82, "the loss is nan", step=7)  # the batch of step 8 was one too many
    assert (seen.status.attempt, seen.status.resume_step) == (2, 3)
    assert seen.status.data_skip == DataSkip(after_step=3, steps=5)

    again = ended(seen, 82, "the loss is nan", step=4)  # no new commit: what follows is passed over too
    assert again.status.data_skip == DataSkip(after_step=3, steps=7)
    given_up = ended(replace(seen, committed=committed(1)), 82, "the loss is nan", step=4)  # with the commit of step 3
    assert given_up.status.resume_step == 1
    assert given_up.status.data_skip == DataSkip(after_step=1, steps=9), "two of steps 2 to 5 met later data"
    kept = ended(seen, 137, "rank 1 was killed by SIGKILL")
    assert kept.status.data_skip == DataSkip(after_step=3, steps=5), "whatever ends the next attempt, it stays so"
    further = ended(replace(seen, committed=committed(9)), 137, "rank 1 was killed by SIGKILL")
    assert (further.status.resume_step, further.status.data_skip) == (9, None), "that checkpoint's cursor is past it"


def test_data_is_passed_over_from_the_start_too() -> None:
    seen = ended(trains(), 82, "the loss is nan", step=None)
    assert seen.status.data_skip == DataSkip(after_step=0, steps=1)
    assert check(seen).status.data_skip == seen.status.data_skip


# --- programs that end at once ---


def begins(**changes: Any) -> ObservedJob:
    """A program whose workers run, and of which nothing else is known."""
    policy = {"backoffSeconds": 0, "excludeNodeAfter": 100}
    seen = starting(spec=spec(training=None, program={"command": ["train.py"]}, recovery=policy), **changes)
    return silent(seen)


def silent(seen: ObservedJob) -> ObservedJob:
    attempt = seen.status.attempt
    return settled(replace(seen, workers=tuple(worker(index, attempt=attempt, heartbeats=()) for index in range(2))))


def ended_at_once(seen: ObservedJob, message: str, code: int = 3) -> ObservedJob:
    end = exited(0, code, attempt=seen.status.attempt, message=message)
    assert end.exit is not None
    end = replace(end, exit=end.exit.model_copy(update={"step": 0, "log_tail": "Traceback"}))
    others = tuple(each for each in seen.workers if each.worker)
    seen = settled(gone(write(replace(seen, workers=(end, *others)))))
    return silent(seen) if seen.status.phase is Phase.STARTING else seen


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("rank 0 ended with exit code 3, and said nothing; see its log",) * 2,
        ("rank 0 ended with exit code 3: the flag --data is missing",) * 2,
        ("rank 0 ended with exit code 3: KeyError: 'lr'", "rank 1 ended with exit code 3: KeyError: 'lr'"),
        ("rank 0 ended with exit code 3: FileNotFoundError: [Errno 2] No such file or directory: 'data'",) * 2,
    ],
)
def test_a_program_that_ends_at_once_twice_alike_is_its_users_error(first: str, second: str) -> None:
    seen = ended_at_once(begins(), first)
    assert (seen.status.phase, seen.status.attempt) == (Phase.RUNNING, 2)
    assert seen.status.last_failure is not None
    assert seen.status.last_failure.cause is Cause.UNKNOWN
    seen = ended_at_once(seen, second)
    assert (seen.status.phase, seen.status.code) == (Phase.FAILED, Code.REPEATED_FAILURE)
    assert seen.status.because == (
        f"user_error: twice the same at once, before any step, so a third try would end alike: {second}"
    )
    failure = seen.status.last_failure
    assert failure is not None
    assert (failure.cause, failure.log_tail) == (Cause.USER_ERROR, "Traceback")
    assert seen.status.attempts[-1].cause is Cause.USER_ERROR


@pytest.mark.parametrize(
    ("message", "code", "again", "code_again"),
    [
        ("rank 0 ended with exit code 3: no data", 3, "rank 0 ended with exit code 4: no data", 4),
        ("rank 0 ended with exit code 3: no data", 3, "rank 0 ended with exit code 3: no weights", 3),
        ("rank 0 was killed by SIGKILL", 137, "rank 0 was killed by SIGKILL", 137),
        ("rank 0 ended with exit code 1: ConnectionError: the hub", 1) * 2,
    ],
)
def test_a_program_that_ends_at_once_otherwise_is_tried_again(
    message: str, code: int, again: str, code_again: int
) -> None:
    assert ended_at_once(ended_at_once(begins(), message, code), again, code_again).status.attempt == 3


def test_a_program_that_ran_for_long_has_not_ended_at_once() -> None:
    seen = ended_at_once(begins(), "rank 0 ended with exit code 3: no data")
    first = seen.status.attempts[0]
    long = first.model_copy(update={"seconds": {GoodputState.PRODUCTIVE: AT_ONCE_SECONDS + 1.0}})
    seen = with_status(seen, seen.status.model_copy(update={"attempts": (long, *seen.status.attempts[1:])}))
    assert ended_at_once(seen, "rank 0 ended with exit code 3: no data").status.attempt == 3


def test_the_error_that_a_program_ends_with_is_looked_for_behind_its_launchers_words() -> None:
    """It has trained before, so that it is no mistake of its start; the same error at the same step is the same."""
    words = "rank 1 ended with exit code 1: KeyError: 'text'"
    seen = ended(ended(trains(), 1, words), 1, words)
    assert (seen.status.phase, seen.status.code) == (Phase.FAILED, Code.REPEATED_FAILURE)
    failure = seen.status.last_failure
    assert failure is not None
    assert failure.cause is Cause.UNKNOWN
