"""Programs of the user's own: started without a word of their ranks, judged by what can be counted of them, and done
only when all their workers are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.seen import NOW, beat, exited, settled, spec, starting, with_status, worker, write
from tests.unit.core.test_core_decide import check

from muster.operator.core.causes import UNEVEN_END_SECONDS
from muster.operator.core.codes import Code
from muster.operator.core.observed import ObservedJob, ObservedWorker
from muster.operator.core.stalls import STARTING_SECONDS, alarming
from muster.words.hangs import LIMIT_SECONDS
from muster.words.names import ExitCode
from muster.words.signals import Cause, Heartbeat, TrainerPhase
from muster.words.status import Phase

DAY = 86_400.0


def program(**facts: Any) -> Any:
    return spec(training=None, program={"command": ["train.py"]} | facts)


def program_beat(rank: int, now: float, **facts: Any) -> Heartbeat:
    """The heartbeat that a launcher writes for a rank of a program."""
    return beat(1, facts.pop("step", 0), now, rank=rank, **{"last_step": None} | facts)


def gang(seen: ObservedJob, now: float, **facts: Any) -> ObservedJob:
    workers = tuple(worker(index, heartbeats=(program_beat(index, now, **facts),)) for index in range(2))
    return replace(seen, now=now, workers=workers)


def started(**facts: Any) -> ObservedJob:
    seen = starting(spec=program(**facts))
    silent: tuple[ObservedWorker, ...] = tuple(worker(index, heartbeats=()) for index in range(2))
    return settled(with_status(seen, seen.status, workers=silent))


def test_a_program_runs_as_soon_as_its_workers_do_and_needs_no_heartbeat() -> None:
    seen = started()
    assert (seen.status.phase, seen.status.because) == (Phase.RUNNING, "the program runs on 2 nodes of pool pool-a")
    later = settled(replace(seen, now=NOW + DAY))
    assert (later.status.phase, later.status.attempt) == (Phase.RUNNING, 1)


def test_its_workers_have_time_to_fetch_inputs_before_they_are_up() -> None:
    seen = starting(spec=program())
    bound = STARTING_SECONDS + LIMIT_SECONDS[TrainerPhase.LOAD]
    up = (worker(0), worker(1, state="starting"))
    assert write(replace(seen, now=NOW + bound - 1.0, workers=up)).status.suspicion is None
    late = write(replace(seen, now=NOW + bound + 1.0, workers=up)).status.suspicion
    assert late is not None
    assert late.why == f"the ranks did not meet within {bound:.0f} s: worker 1 on b is not up"


def test_what_is_not_watched_is_never_taken_for_hung() -> None:
    """Neither for its silence, nor for standing still, nor when it is held."""
    seen = started()
    for elapsed in (0.0, DAY, DAY + 3_600.0):
        facts = {"watched": False, "progressed_at": NOW, "stopped": elapsed > DAY}
        seen = write(gang(seen, NOW + elapsed, **facts))
        assert (seen.status.phase, seen.status.suspicion) == (Phase.RUNNING, None)
    assert seen.status.because.endswith("; no step of it has been counted yet")
    seen = write(gang(seen, NOW + 2 * DAY, watched=False, step=9, first_step_at=NOW))
    assert seen.status.because.endswith("; its steps are over")
    assert alarming(seen.workers[0].heartbeats, NOW + 2 * DAY) == (False,) * 4
    seen = write(gang(started(hang={"off": True}), NOW, watched=False))
    assert seen.status.because.endswith("; hangs are not looked for")


def test_a_program_whose_steps_stopped_is_hung_by_its_own_limit() -> None:
    seen, limit = started(), 60.0

    def at(elapsed: float) -> ObservedJob:
        # Rank 1 is a step behind: it is named, and believed no sooner for it.
        now = NOW + elapsed
        facts = {"limit_seconds": limit, "progressed_at": NOW, "first_step_at": NOW - 50.0}
        workers = tuple(
            worker(index, heartbeats=(program_beat(index, now, step=7 - index, **facts),)) for index in range(2)
        )
        return replace(seen, now=now, workers=workers)

    for elapsed in (1.0, limit - 1.0):
        seen = write(at(elapsed))
        assert seen.status.suspicion is None, elapsed
    seen = write(at(limit + 1.0))
    assert seen.status.suspicion is not None
    seen = write(at(limit * 1.5 + 2.0))
    assert (seen.status.phase, seen.status.code) == (Phase.RESTARTING, Code.HANG)
    failure = seen.status.last_failure
    assert failure is not None
    assert (failure.cause, failure.rank, failure.step) == (Cause.HANG, 1, 7)


def test_counted_steps_are_progress_and_count_as_trained() -> None:
    seen = gang(started(steps=100), NOW + 40.0, step=21, first_step_at=NOW + 20.0)
    seen = write(seen)
    progress, attempt = seen.status.progress, seen.status.attempts[-1]
    assert progress is not None
    assert (progress.step, progress.steps, progress.loss, progress.eta_seconds) == (21, 100, None, 79.0)
    assert (attempt.last_step, attempt.first_step_at) == (21, NOW + 20.0)
    before = write(gang(seen, NOW + 50.0, step=20, first_step_at=NOW + 20.0)).status.progress
    assert before is not None
    assert before.step == 21, "a cached read may show an earlier heartbeat"


@pytest.mark.parametrize("watched", [True, False])
def test_a_worker_that_ended_well_long_before_the_others_is_a_fault(watched: bool) -> None:
    seen, ended = started(), NOW + 10.0

    def at(now: float) -> ObservedJob:
        # Watched, it has moved for a minute more.
        moved = program_beat(0, now, step=3, progressed_at=ended + 60.0, limit_seconds=DAY, watched=watched)
        return replace(seen, now=now, workers=(worker(0, heartbeats=(moved,)), exited(1, 0, at=ended)))

    still = ended + UNEVEN_END_SECONDS + (60.0 if watched else 0.0)
    assert check(at(still)).status.phase is Phase.RUNNING
    seen = write(at(still + 1.0))
    failure = seen.status.last_failure
    assert failure is not None
    assert (seen.status.phase, failure.cause, failure.worker, failure.node) == (Phase.RESTARTING, Cause.HANG, 1, None)
    assert failure.message == (
        "worker 1 on b ended with exit code 0 while 1 worker of 2 ran on for 30 min without a step: a program is done "
        "when all its workers have ended"
    )


def test_a_program_is_done_when_all_its_workers_are() -> None:
    seen = started()
    seen = replace(seen, now=NOW + 60.0, workers=(exited(0, 0, at=NOW + 50.0), exited(1, 0, at=NOW + 10.0)))
    assert check(seen).status.phase is Phase.SUCCEEDED


def test_a_peer_that_was_lost_because_it_ended_with_0_is_the_programs_own_doing() -> None:
    """Nobody took it away: it spends the budget of unknown causes, and no node is charged."""
    seen = gang(started(), NOW + 1.0)
    words = "rank 1 ended with exit code 1: RuntimeError: gloo: Connection closed by peer"
    ends = tuple(
        exited(index, code, message=words if code else "") for index, code in ((0, 0), (1, ExitCode.PEER_LOST))
    )
    failure = write(replace(seen, workers=ends)).status.last_failure
    assert failure is not None
    assert failure.cause is Cause.UNKNOWN
    assert failure.message == f"{words}; worker 0 had ended with exit code 0, and was missing"
    failure = write(replace(seen, workers=(worker(0), ends[1]))).status.last_failure
    assert failure is not None
    assert failure.cause is Cause.INFRASTRUCTURE


def test_that_a_lost_peer_had_ended_with_0_may_be_seen_a_moment_later() -> None:
    seen = gang(started(), NOW + 1.0)
    lost = exited(1, ExitCode.PEER_LOST, message="rank 1 ended with exit code 1: RuntimeError: gloo")
    seen = write(replace(seen, workers=(worker(0), lost)))
    assert seen.status.last_failure is not None
    assert seen.status.last_failure.cause is Cause.INFRASTRUCTURE
    seen = write(replace(seen, workers=(exited(0, 0), lost)))
    assert seen.status.last_failure is not None
    assert seen.status.last_failure.cause is Cause.UNKNOWN


def test_the_results_of_worker_0_are_the_jobs() -> None:
    ended = tuple(exited(index, 0) for index in range(2))
    assert ended[0].exit is not None
    first = replace(ended[0], exit=ended[0].exit.model_copy(update={"results": {"acc": 0.5}}))
    other = replace(ended[1], exit=first.exit.model_copy(update={"results": {"acc": 0.1}})) if first.exit else ended[1]
    status = write(replace(started(), workers=(first, other))).status
    assert (status.phase, status.results) == (Phase.SUCCEEDED, {"acc": 0.5})
    assert status.because == "all 2 workers finished"


def test_results_that_are_left_out_are_said_in_the_jobs_reason() -> None:
    ended = exited(0, 0)
    assert ended.exit is not None
    bad = replace(ended, exit=ended.exit.model_copy(update={"results_fault": "results.json is no JSON"}))
    status = write(replace(started(), workers=(bad, exited(1, 0)))).status
    assert (status.phase, status.results_fault) == (Phase.SUCCEEDED, "results.json is no JSON")
    assert status.because == "all 2 workers finished; its results are left out: results.json is no JSON"
