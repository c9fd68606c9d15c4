"""Lives of a worker within one attempt: an older one is like a worker of an older attempt, a newer one left alone."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.unit.core.seen import NODES, NOW, beat, exited, running, starting, with_status, worker, write
from tests.unit.core.test_core_decide import check, closed, restarting

from muster.operator.core.audit import audit
from muster.operator.core.codes import Code
from muster.operator.core.decide import decide
from muster.operator.core.decision import CreateWorker, JobDecision, RemoveWorker
from muster.operator.core.observed import ObservedJob, ObservedWorker, WorkerState, from_json, to_json
from muster.operator.core.shutdown import FAILURE_SECONDS
from muster.words.base import dump
from muster.words.names import WorkerId, worker_name
from muster.words.signals import Cause, Heartbeat, Signal, SignalKind
from muster.words.status import GangStatus, JobStatus, Phase

FIRST, SECOND = WorkerId(1, 1, 1), WorkerId(1, 1, 2)


def replaced(seen: ObservedJob, incarnations: tuple[int, ...] = (1, 2)) -> ObservedJob:
    """The status names these lives, as a later release's rule will have it."""
    gang = seen.status.gang.model_copy(update={"incarnations": incarnations})
    return with_status(seen, seen.status.model_copy(update={"gang": gang}))


def living(incarnation: int, index: int = 1, step: int = 5, at: float = NOW) -> ObservedWorker:
    own = beat(1, step, at, rank=index, incarnation=incarnation)
    return worker(index, incarnation=incarnation, heartbeats=(own,))


def test_an_absent_incarnation_is_the_first() -> None:
    seen = running()
    document = dump(seen.status)
    del document["gang"]["incarnations"]
    assert JobStatus.model_validate(document).current(1) == FIRST
    told = dump(beat(1, 5))
    del told["incarnation"]
    assert Heartbeat.model_validate(told).incarnation == 1
    lines = to_json(seen).decode().splitlines()
    written = "\n".join(line for line in lines if '"incarnation":' not in line)
    written = re.sub(r",(\s*})", r"\1", written)  # of what was the last of its object
    assert len(written.splitlines()) < len(lines)
    assert [each.id for each in from_json(written).workers] == [WorkerId(1, 0, 1), FIRST]


def test_lives_have_an_order_and_names_of_their_own() -> None:
    assert WorkerId(1, 0, 9) < WorkerId(1, 1, 1) < WorkerId(1, 1, 2) < WorkerId(2, 0, 1)
    names = [worker_name("job", FIRST), worker_name("job", SECOND), worker_name("job-1", WorkerId(1, 2))]
    assert names == ["job-1-1", "job-1-1-i2", "job-1-1-2"]


def test_a_replaced_worker_is_removed_before_its_successor_is_made() -> None:
    seen = replaced(starting(workers=(worker(0), worker(1))))
    seen = write(seen)
    assert (seen.status.phase, seen.status.code) == (Phase.STARTING, Code.AWAITING_REMOVAL)
    assert "1 earlier incarnation of workers" in seen.status.because
    assert check(seen).actions == (RemoveWorker(FIRST, FAILURE_SECONDS),)
    seen = write(replace(seen, workers=(worker(0),)))
    made = check(seen)
    assert (made.actions, made.trusts_absence) == ((CreateWorker(SECOND, NODES[1], NODES, 0),), True)
    seen = replace(seen, workers=(living(1, 0), living(2)))
    assert write(seen).status.phase is Phase.RUNNING


def test_a_late_life_of_the_past_explains_nothing_and_is_swept() -> None:
    """Created by a delayed call, say. Neither its end nor its silence is the gang's."""
    seen = replaced(running())
    seen = replace(seen, workers=(living(1, 0), living(2)))
    for late in (living(1, at=NOW - 500.0), exited(1, 137, incarnation=1), exited(1, 80, incarnation=1)):
        with_late = replace(seen, workers=(*seen.workers, late))
        assert check(with_late).status == seen.status
        grace = 0.0 if late.state is WorkerState.EXITED else FAILURE_SECONDS
        assert check(with_late).actions == (RemoveWorker(FIRST, grace),)


def test_a_running_gang_that_lost_a_life_restarts_as_ever() -> None:
    """That a worker of it is to be replaced changes nothing yet: who is missing ends the attempt."""
    seen = write(replaced(running()))
    assert (seen.status.phase, seen.status.last_failure and seen.status.last_failure.incarnation) == (
        Phase.RESTARTING,
        2,
    )
    assert {action.id for action in check(seen).actions if isinstance(action, RemoveWorker)} == {WorkerId(1, 0), FIRST}


def test_the_death_of_a_later_life_ends_the_attempt_and_the_next_begins_anew() -> None:
    seen = replace(replaced(running()), workers=(living(1, 0), exited(1, 139, incarnation=2)))
    seen = restarting(seen)
    failure = seen.status.last_failure
    assert failure is not None
    assert (failure.worker, failure.incarnation, failure.exit_code) == (1, 2, 139)
    seen = write(replace(closed(seen), now=NOW + 600.0))
    assert (seen.status.attempt, seen.status.phase, seen.status.gang.incarnations) == (2, Phase.STARTING, ())


def test_the_last_lives_of_a_job_that_is_over_are_swept() -> None:
    seen = replaced(running())
    seen = write(replace(seen, workers=(exited(0, 0), exited(1, 0, incarnation=2))))
    assert (seen.status.phase, seen.status.gang.incarnations) == (Phase.SUCCEEDED, (1, 2))
    assert check(seen).actions == (RemoveWorker(WorkerId(1, 0), 0.0), RemoveWorker(SECOND, 0.0))


def test_a_newer_life_than_the_status_knows_is_left_alone() -> None:
    """A status that was read earlier does not make the gang whole: nothing is decided without a fresh look."""
    seen = replace(running(), workers=(living(1, 0), living(2)), fresh=False)
    decision = decide(seen)
    assert decision.trusts_absence
    swept = [action for action in decide(write(seen)).actions if isinstance(action, RemoveWorker)]
    assert [action.id for action in swept] == [WorkerId(1, 0)]


def about(incarnation: int, **changes: object) -> Signal:
    facts = {"kind": SignalKind.NUMERIC, "attempt": 1, "at": NOW, "worker": 1, "incarnation": incarnation}
    return Signal.model_validate(facts | changes)


@pytest.mark.parametrize("incarnation", [1, 3])
@pytest.mark.parametrize("kind", list(SignalKind))
def test_a_signal_about_another_life_changes_nothing(kind: SignalKind, incarnation: int) -> None:
    seen = replace(replaced(running()), workers=(living(1, 0), living(2)))
    assert check(replace(seen, signals=(about(incarnation, kind=kind, node="b"),))).status == seen.status


def test_a_signal_about_the_current_life_or_about_none_counts() -> None:
    seen = replace(replaced(running()), workers=(living(1, 0), living(2)))
    for signal in (about(2), about(1, worker=None), about(1, worker=0)):
        failure = check(replace(seen, signals=(signal,))).status.last_failure
        assert failure is not None
        assert (failure.cause, failure.worker, failure.incarnation) == (
            Cause.NUMERIC,
            signal.worker,
            signal.incarnation,
        )


def test_heartbeats_of_another_life_are_not_heard() -> None:
    seen = replaced(running(), (2, 1))
    mixed = replace(living(2, 0, step=7), heartbeats=(beat(1, 50, NOW, rank=0), beat(1, 7, NOW, incarnation=2)))
    progress = write(replace(seen, workers=(mixed, living(1)), now=NOW + 60.0)).status.progress
    assert progress is not None
    assert progress.step == 7


def test_a_suspicion_of_one_life_is_none_of_the_next() -> None:
    refused = {"state": "starting", "refusal": "ErrImagePull: not found", "heartbeats": ()}
    first, second = worker(1, **refused), worker(1, incarnation=2, **refused)
    seen = write(replace(starting(), workers=(worker(0), first)))
    assert seen.status.suspicion is not None
    later = replace(replaced(seen), now=NOW + 500.0)
    seen = write(replace(later, workers=(worker(0), second)))
    assert seen.status.phase is Phase.STARTING
    assert seen.status.suspicion is not None
    assert (seen.status.suspicion.incarnation, seen.status.suspicion.at) == (2, NOW + 500.0)


def test_audit_knows_lives() -> None:
    seen = replaced(starting(workers=(worker(0), worker(1))))

    def faults(*actions: CreateWorker | RemoveWorker, status: JobStatus = seen.status) -> str:
        return "; ".join(audit(seen, JobDecision(status, actions, 1.0, "AwaitingWorkers", "why")))

    def create(id: WorkerId) -> CreateWorker:
        return CreateWorker(id, NODES[id.worker], NODES, 0)

    assert "creates worker 1 of attempt 1, which is not the current one" in faults(create(FIRST))
    assert "while an earlier incarnation of it may be there" in faults(create(SECOND))
    unsure = audit(replace(seen, workers=()), JobDecision(seen.status, (create(SECOND),), 1.0, "Training", "why"))
    assert unsure == (f"creates {SECOND} without looking whether the incarnation before it is gone",)
    assert not faults(RemoveWorker(FIRST, 0.0))
    assert "removes worker 1 of attempt 1, incarnation 2, which is alive" in faults(RemoveWorker(SECOND, 0.0))
    assert "incarnation 3, which is newer" in faults(RemoveWorker(WorkerId(1, 1, 3), 0.0))

    def jump(*incarnations: int) -> str:
        gang = seen.status.gang.model_copy(update={"incarnations": incarnations})
        return faults(status=seen.status.model_copy(update={"gang": gang}))

    assert "worker 1 goes from incarnation 2 to 1" in jump(1, 1)
    assert "worker 1 goes from incarnation 2 to 4" in jump(1, 4)
    assert not jump(2, 2)


def test_whoever_is_not_listed_has_its_first_life() -> None:
    gang = GangStatus(wanted=3, nodes=("a", "b", "c"), incarnations=(1, 4))
    assert [gang.incarnation(index) for index in range(3)] == [1, 4, 1]
