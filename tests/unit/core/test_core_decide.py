"""The life of a job, decision by decision, compared as whole values where a person would want to see them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from tests.unit.core.seen import (
    NODES,
    NOW,
    beat,
    committed,
    crew,
    exited,
    gone,
    granted,
    observed,
    running,
    settled,
    spec,
    starting,
    with_status,
    worker,
    write,
)

from muster.operator.core.audit import audit
from muster.operator.core.codes import Code
from muster.operator.core.decide import decide
from muster.operator.core.decision import CreateWorker, JobDecision, RemoveJob, RemoveWorker
from muster.operator.core.observed import ObservedJob, QueueWait
from muster.operator.core.shutdown import FAILURE_SECONDS, STOP_SECONDS
from muster.operator.pacing import LOOK_SECONDS
from muster.words.base import dump_json
from muster.words.names import ExitCode, WorkerId
from muster.words.signals import Cause, TrainerPhase
from muster.words.status import STATUS_VERSION, CheckpointStatus, GangStatus, GoodputState, Phase


def check(seen: ObservedJob) -> JobDecision:
    decision = decide(seen)
    assert audit(seen, decision) == ()
    return decision


def restarting(seen: ObservedJob) -> ObservedJob:
    """The state after the failure in `seen` was noticed."""
    seen = write(seen, check(seen))
    assert seen.status.phase is Phase.RESTARTING, seen.status.because
    return seen


def closed(seen: ObservedJob) -> ObservedJob:
    """The gang is gone and the attempt is closed."""
    seen = gone(seen)
    decision = check(seen)
    assert decision.trusts_absence
    return write(seen, decision)


# --- the way up ---


def test_a_new_job_waits_in_words() -> None:
    decision = check(observed())
    assert (decision.status.phase, decision.code) == (Phase.QUEUED, Code.AWAITING_ADMISSION)


def test_an_attempts_words_say_what_the_world_notes() -> None:
    """Such as network settings of ours that the user's own replaced."""
    seen = observed(reservations=(granted(),), notes=("by your settings A=1 instead of 2",))
    assert (
        decide(seen).because == "attempt 1 on 2 nodes of pool pool-a, from the start; by your settings A=1 instead of 2"
    )


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.RUNNING, Phase.SUCCEEDED])
def test_what_an_older_muster_wrote_is_written_anew_before_anything_else(phase: Phase) -> None:
    """Also of a job that is over, though nothing else of its status may ever change."""
    today = running().status.model_copy(update={"phase": phase})
    seen = observed(today.model_copy(update={"schema_version": STATUS_VERSION - 1}), deleting=True)
    decision = check(seen)
    assert (decision.status, decision.actions) == (today, ())
    changed = today.model_copy(update={"gang": GangStatus()})
    assert not phase.terminal or f"changes a job that is {phase}" in audit(seen, replace(decision, status=changed))


def test_the_reason_of_admission_is_told() -> None:
    wait = QueueWait(Code.AWAITING_CAPACITY, "gang needs 2 nodes with 8 GPUs each, 1 free in pool a")
    decision = check(observed(wait=wait))
    assert (decision.status.code, decision.status.because) == (wait.code, wait.because)


def test_an_attempt_is_minted_on_the_nodes_that_the_ledger_holds() -> None:
    decision = check(observed(reservations=(granted(),), committed=committed(40)))
    status = decision.status
    assert decision.trusts_absence
    assert decision.actions == ()
    assert (status.phase, status.attempt, status.resume_step, status.gang.nodes) == (Phase.STARTING, 1, 40, NODES)
    assert status.attempts[0].world_size == 16


def test_a_grant_for_another_request_is_not_used() -> None:
    assert check(observed(reservations=(granted(number=1),))).status.phase is Phase.QUEUED


def test_workers_are_created_with_nothing_left_to_choose() -> None:
    seen = starting(committed=committed(40))
    assert check(seen) == JobDecision(
        seen.status,
        (CreateWorker(WorkerId(1, 0), "a", NODES, 40), CreateWorker(WorkerId(1, 1), "b", NODES, 40)),
        LOOK_SECONDS,
        Code.CREATING_WORKERS,
        seen.status.because,
    )


def test_only_the_missing_worker_is_created() -> None:
    seen = starting()
    seen = with_status(seen, seen.status, workers=(worker(0),))
    assert [action.id.worker for action in check(settled(seen)).actions] == [1]


def test_nothing_is_created_while_an_older_worker_is_there() -> None:
    seen = starting()
    old = worker(1, attempt=0)
    seen = settled(with_status(seen, seen.status, workers=(old,)))
    decision = check(seen)
    assert seen.status.code == Code.AWAITING_REMOVAL
    assert decision.actions == (RemoveWorker(WorkerId(0, 1), FAILURE_SECONDS),)


def test_running_when_the_ranks_have_met() -> None:
    seen = starting()
    up = tuple(worker(i) for i in range(2))
    assert settled(with_status(seen, seen.status, workers=up)).status.code == Code.AWAITING_RANKS
    loading = tuple(worker(i, heartbeats=(beat(1, 0, phase=TrainerPhase.LOAD, rank=i),)) for i in range(2))
    status = settled(with_status(seen, seen.status, workers=loading)).status
    assert (status.phase, status.code) == (Phase.RUNNING, Code.PREPARING)


def test_the_first_step_is_when_it_was_done_and_not_when_it_was_noticed() -> None:
    begun = with_status(starting(), starting().status, workers=())
    loading = tuple(worker(i, heartbeats=(beat(1, 0, phase=TrainerPhase.LOAD, rank=i),)) for i in range(2))
    seen = settled(replace(begun, workers=loading))
    evaluated = beat(1, 9).last_step
    assert evaluated is not None
    step_0 = beat(1, 0, last_step=evaluated.model_copy(update={"step": 0, "step_seconds": 0.0}))
    seen = settled(replace(seen, workers=(worker(0, heartbeats=(step_0,)), loading[1])))
    assert seen.status.attempts[-1].first_step_at is None, "step 0 is an evaluation"
    noticed = tuple(worker(i, heartbeats=(beat(1, 5, NOW + 9, rank=i, first_step_at=NOW + 4),)) for i in range(2))
    seen = settled(replace(seen, now=NOW + 9, workers=noticed))
    assert seen.status.attempts[-1].first_step_at == NOW + 4
    later = tuple(worker(i, heartbeats=(beat(1, 9, NOW + 60, rank=i, first_step_at=NOW + 4),)) for i in range(2))
    assert settled(replace(seen, now=NOW + 60, workers=later)).status.attempts[-1].first_step_at == NOW + 4
    silent = tuple(worker(i, heartbeats=(beat(1, 5, NOW + 9, rank=i),)) for i in range(2))
    old = settled(replace(begun, now=NOW + 9, workers=silent))
    assert old.status.attempts[-1].first_step_at == NOW + 9, "an older trainer does not say"


def test_progress_is_reported_and_a_stale_heartbeat_does_not_take_it_back() -> None:
    seen = running(step=5)
    assert seen.status.progress is not None
    assert seen.status.progress.step == 5
    later = replace(seen, now=NOW + 60, workers=crew(step=9, now=NOW + 60))
    later = settled(later)
    assert later.status.progress is not None
    assert later.status.progress.step == 9
    stale = replace(later, now=NOW + 120, fresh=False, workers=crew(step=7, now=NOW + 119))
    assert check(stale).status.progress == later.status.progress


@pytest.mark.parametrize(
    ("committed", "loaded", "shown"), [(100, 100, 100), (80, 80, 94), (None, 100, 94), (100, 0, 94)]
)
def test_an_attempt_that_had_no_step_left_to_do_ends_at_the_last_step(
    committed: int | None, loaded: int, shown: int
) -> None:
    """The one before was killed after its last commit, whose steps nobody had heard of."""
    seen = running(step=94)
    commit = None if committed is None else CheckpointStatus(step=committed, committed_at=NOW - 9, uri="file:///ckpt")
    done = tuple(exited(i, 0, heartbeats=(beat(1, loaded, NOW, rank=i, last_step=None),)) for i in range(2))
    status = write(replace(seen, workers=done, status=seen.status.model_copy(update={"checkpoint": commit}))).status
    assert status.phase is Phase.SUCCEEDED
    assert status.progress is not None
    assert (status.progress.step, status.progress.steps, status.progress.loss) == (shown, 100, 2.0)


def test_nothing_is_known_of_the_speed_at_step_0() -> None:
    """`ETA 0s` at step 0: its step took no time, because it is an evaluation."""
    last = beat(1, 9).last_step
    assert last is not None

    def eta(**changes: Any) -> float | None:
        told = beat(1, 9, NOW + 60, last_step=last.model_copy(update=changes))
        crew = (worker(0, heartbeats=(told,)), worker(1, heartbeats=(beat(1, 9, NOW + 60, rank=1),)))
        status = check(replace(starting(), now=NOW + 60, workers=crew)).status
        assert status.progress is not None
        return status.progress.eta_seconds

    assert eta(step=0, step_seconds=0.0) is None
    assert eta(step=10, step_seconds=2.0) == 180.0


def test_an_attempt_reached_at_least_its_last_commit() -> None:
    """An evicted gang committed step 522 after the heartbeat of step 502; `TO STEP` said 502, and steps were lost."""
    evicted = tuple(exited(index, ExitCode.PREEMPTED_COMMITTED) for index in range(2))
    stopping = settled(replace(running(step=502), committed=committed(400), now=NOW + 30, workers=evicted))

    def closed(step: int) -> tuple[str, int | None, int]:
        over = settled(replace(stopping, now=NOW + 40, workers=(), committed=committed(step)))
        attempt = over.status.attempts[0]
        return attempt.outcome, attempt.last_step, attempt.lost_steps

    assert closed(522) == ("preempted", 522, 0)
    assert closed(400) == ("preempted", 502, 102)


def test_a_commit_seen_late_counts_for_the_attempt_that_made_it() -> None:
    seen = replace(running(step=502), committed=committed(400))
    evicted = tuple(exited(index, ExitCode.PREEMPTED_COMMITTED) for index in range(2))
    stopped = settled(replace(seen, now=NOW + 30, workers=evicted))
    ended = settled(replace(stopped, now=NOW + 40, workers=()))
    assert ended.status.attempts[0].outcome == "preempted"
    later = replace(ended, now=NOW + 200, workers=(), committed=committed(522), reservations=(granted(1), granted(2)))
    again = settled(later)
    assert [a.number for a in again.status.attempts] == [1, 2]
    assert (again.status.attempts[0].last_step, again.status.attempts[1].resume_step) == (522, 522)


def test_a_loss_that_is_not_a_number_does_not_keep_the_status_from_being_written() -> None:
    seen = running()
    last = beat(1, 9).last_step
    assert last is not None
    diverged = beat(1, 9, NOW + 60, last_step=last.model_copy(update={"loss": float("nan"), "mfu": float("inf")}))
    status = check(replace(seen, now=NOW + 60, workers=(worker(0, heartbeats=(diverged,)), crew()[1]))).status
    assert status.progress is not None
    assert (status.progress.step, status.progress.loss, status.progress.mfu) == (9, None, None)
    assert dump_json(status)


# --- ends ---


def test_success_in_one_write_when_every_worker_ended_well() -> None:
    seen = running()
    seen = with_status(seen, seen.status, workers=(exited(0, 0), exited(1, 0)))
    seen = write(seen, check(seen))
    assert (seen.status.phase, seen.status.code, seen.status.gang.nodes) == (Phase.SUCCEEDED, Code.FINISHED, ())
    assert (seen.status.finished_at, seen.status.attempts[-1].ended_at) == (NOW, NOW)
    assert seen.status.attempts[-1].outcome == "succeeded"
    assert check(seen).actions == (RemoveWorker(WorkerId(1, 0), 0.0), RemoveWorker(WorkerId(1, 1), 0.0))
    assert check(gone(seen)).actions == ()


def test_no_success_while_a_worker_of_an_earlier_attempt_is_there() -> None:
    seen = running()
    left = worker(0, attempt=seen.status.attempt - 1)
    seen = settled(with_status(seen, seen.status, workers=(left, exited(0, 0), exited(1, 0))))
    assert seen.status.phase is Phase.RUNNING
    assert check(seen).actions == (RemoveWorker(WorkerId(left.attempt, 0), 5.0),)


def test_one_worker_that_ended_well_is_not_success() -> None:
    seen = running()
    seen = with_status(seen, seen.status, workers=(exited(0, 0), crew()[1]))
    assert check(seen).status.phase is Phase.RUNNING


def test_the_first_cause_is_told_not_the_time_outs_of_the_others() -> None:
    seen = running()
    peers = (exited(0, 1, at=NOW - 3, message="connection closed by peer"), exited(1, 137, at=NOW - 5, signal=9))
    seen = restarting(with_status(seen, seen.status, workers=peers))
    failure = seen.status.last_failure
    assert failure is not None
    assert (failure.cause, failure.worker, failure.exit_code) == (Cause.INFRASTRUCTURE, 1, 137)


def test_a_rank_that_says_what_it_did_wrong_outranks_everything() -> None:
    seen = running()
    crashed = (exited(0, 137, at=NOW - 9), exited(1, 80, at=NOW - 1, message="KeyError: 'messages'"))
    status = check(with_status(seen, seen.status, workers=crashed)).status
    assert (status.phase, status.ends_as, status.code) == (Phase.STOPPING, Phase.FAILED, Code.BUDGET_SPENT)
    assert "KeyError: 'messages'" in status.because


@pytest.mark.parametrize(
    ("code", "reason", "cause"),
    [
        (80, "", Cause.USER_ERROR),
        (81, "", Cause.OUT_OF_MEMORY),
        (137, "OOMKilled", Cause.OUT_OF_MEMORY),
        (82, "", Cause.NUMERIC),
        (83, "", Cause.STORAGE),
        (84, "", Cause.INFRASTRUCTURE),
        (85, "", Cause.PREEMPTION),
        (86, "", Cause.PREEMPTION),
        (87, "", Cause.INFRASTRUCTURE),
        (137, "", Cause.INFRASTRUCTURE),
        (139, "", Cause.INFRASTRUCTURE),
        (137, "Evicted", Cause.EVICTION),
        (137, 'DiskLimitExceeded: Usage of EmptyDir volume "cache" exceeds the limit "1Gi".', Cause.UNKNOWN),
        (143, "PreemptionByScheduler", Cause.PREEMPTION),
        (1, "", Cause.UNKNOWN),
    ],
)
def test_what_an_end_means(code: int, reason: str, cause: Cause) -> None:
    seen = running()
    seen = with_status(seen, seen.status, workers=(exited(0, code, reason=reason), crew()[1]))
    failure = check(seen).status.last_failure
    assert failure is not None
    assert failure.cause is cause


def test_better_evidence_amends_the_cause_until_the_gang_is_gone() -> None:
    seen = running()
    seen = restarting(with_status(seen, seen.status, workers=(exited(0, 1), crew()[1])))
    assert seen.status.last_failure is not None
    assert seen.status.last_failure.cause is Cause.UNKNOWN
    lost = worker(1, state="unreachable", since=NOW - 30)
    seen = write(replace(seen, workers=(exited(0, 1), lost)))
    assert seen.status.last_failure is not None
    assert (seen.status.last_failure.cause, seen.status.last_failure.node) == (Cause.INFRASTRUCTURE, "b")


def test_ends_that_we_asked_for_explain_nothing() -> None:
    seen = running()
    seen = restarting(with_status(seen, seen.status, workers=(exited(0, 1), crew()[1])))
    seen = replace(seen, now=NOW + 3, workers=(exited(0, 1), exited(1, 137, at=NOW + 2)))
    assert check(seen).status == seen.status


def test_a_flap_is_not_a_failure_but_a_lost_node_is() -> None:
    seen = running()
    flap = with_status(seen, seen.status, workers=(crew()[0], worker(1, state="unreachable", since=NOW - 5)))
    assert check(flap).status.phase is Phase.RUNNING
    lost = with_status(seen, seen.status, workers=(crew()[0], worker(1, state="unreachable", since=NOW - 11)))
    assert check(lost).status.phase is Phase.RESTARTING


@pytest.mark.parametrize(("heard", "phase"), [(NOW - 2, Phase.RUNNING), (NOW - 12, Phase.RESTARTING)])
def test_a_worker_that_is_heard_of_is_not_lost_with_its_node(heard: float, phase: Phase) -> None:
    """An API server that was away calls every node silent for a moment, and all their gangs train."""
    seen = running()
    lost = worker(1, state="unreachable", since=NOW - 20, heartbeats=(beat(1, 5, heard, rank=1),))
    assert check(with_status(seen, seen.status, workers=(crew()[0], lost))).status.phase is phase


def test_a_vanished_worker_is_believed_only_when_fresh() -> None:
    seen = running()
    seen = with_status(seen, seen.status, workers=crew()[:1])
    decision = check(seen)
    assert decision.trusts_absence
    assert decision.status.phase is Phase.RESTARTING
    assert "vanished" in decision.because


def test_the_next_attempt_resumes_from_the_newest_commit_on_the_same_nodes() -> None:
    seen = running(spec=spec(recovery={"backoffSeconds": 0}))
    seen = restarting(with_status(seen, seen.status, workers=(exited(0, 137), crew()[1])))
    assert check(seen).actions == (RemoveWorker(WorkerId(1, 1), FAILURE_SECONDS),)
    seen = replace(closed(seen), committed=committed(4))
    assert seen.status.restarts.by_cause == {"infrastructure": 1}
    seen = write(seen, check(seen))
    assert (seen.status.attempt, seen.status.resume_step, seen.status.gang.nodes) == (2, 4, NODES)
    assert seen.status.phase is Phase.STARTING


def test_nodes_go_back_when_one_of_them_is_lost() -> None:
    seen = running(spec=spec(recovery={"backoffSeconds": 0}))
    lost = worker(1, state="unreachable", since=NOW - 11)
    seen = restarting(with_status(seen, seen.status, workers=(crew()[0], lost)))
    assert RemoveWorker(WorkerId(1, 1), 0.0) in check(seen).actions
    seen = replace(closed(seen), nodes_unfit=("b",))
    seen = write(seen, check(seen))
    assert (seen.status.phase, seen.status.gang.nodes, seen.status.reservation) == (Phase.QUEUED, (), 1)


def test_a_long_pause_does_not_keep_the_nodes() -> None:
    seen = running(spec=spec(recovery={"backoffSeconds": 200}))
    seen = closed(restarting(with_status(seen, seen.status, workers=(exited(0, 137), crew()[1]))))
    seen = write(seen, check(seen))
    assert (seen.status.phase, seen.status.code) == (Phase.QUEUED, Code.BACKING_OFF)
    waiting = check(replace(seen, reservations=(granted(1),)))
    assert waiting.wake_after is not None
    assert 100 <= waiting.wake_after <= 200
    later = check(replace(seen, now=NOW + 201, reservations=(granted(1),)))
    assert later.status.phase is Phase.STARTING


# --- wishes ---


def test_suspend_lets_the_gang_commit_and_resume_asks_again() -> None:
    seen = running()
    seen = replace(seen, spec=seen.spec.model_copy(update={"suspend": True}))
    seen = write(seen, check(seen))
    assert (seen.status.phase, seen.status.code) == (Phase.STOPPING, Code.SUSPENDING)
    assert check(seen).actions == tuple(RemoveWorker(WorkerId(1, i), STOP_SECONDS) for i in range(2))
    seen = settled(gone(seen))
    assert (seen.status.phase, seen.status.code, seen.status.gang.nodes) == (Phase.SUSPENDED, Code.SUSPENDED, ())
    assert seen.status.restarts.total == 0
    seen = settled(replace(seen, spec=seen.spec.model_copy(update={"suspend": False})))
    assert seen.status.phase is Phase.QUEUED
    assert [c.status for c in seen.status.conditions if c.type == "Suspended"] == ["False"]


def test_exits_after_suspension_are_no_preemption() -> None:
    seen = running()
    seen = replace(seen, spec=seen.spec.model_copy(update={"suspend": True}))
    seen = write(seen)
    seen = replace(seen, workers=(exited(0, 85), exited(1, 85)))
    seen = settled(gone(settled(seen)))
    assert (seen.status.phase, seen.status.restarts.by_cause) == (Phase.SUSPENDED, {})


WISHES = ("suspend", "cancel", "delete", "none")


def test_a_gang_whose_workers_share_a_node_starts_trains_and_starts_again() -> None:
    """The audit took every such gang for a mistake, so that none ever started."""
    together = {"spec": spec(gang={"nodes": 2, "gpusPerNode": 2, "shareNodes": True})}
    seen = observed(reservations=(granted(nodes=("a", "a")),), **together)
    seen = write(seen, check(seen))
    assert (seen.status.phase, seen.status.gang.nodes) == (Phase.STARTING, ("a", "a"))
    assert [action.node for action in check(seen).actions if isinstance(action, CreateWorker)] == ["a", "a"]
    seen = replace(seen, workers=tuple(replace(each, node="a") for each in crew()))
    while (decision := check(seen)).status != seen.status:
        seen = write(seen, decision)
    assert seen.status.phase is Phase.RUNNING
    seen = replace(seen, workers=(replace(exited(0, 1), node="a"), seen.workers[1]))
    seen = replace(closed(restarting(seen)), now=NOW + 3600.0)  # after the backoff
    again = check(seen).status
    assert (again.attempt, again.gang.nodes) == (2, ("a", "a"))


def every_phase() -> dict[str, ObservedJob]:
    alive = running()
    failing = with_status(alive, alive.status, workers=(exited(0, 137), crew()[1]))
    dying = write(failing)
    paused = replace(closed(dying), now=NOW)
    stopped = settled(gone(write(replace(alive, spec=alive.spec.model_copy(update={"suspend": True})))))
    done = settled(gone(write(with_status(alive, alive.status, workers=(exited(0, 0), exited(1, 0))))))
    refused = write(with_status(alive, alive.status, workers=(exited(0, 80), crew()[1])))
    return {
        "new": observed(),
        "waiting": settled(observed()),
        "granted": observed(reservations=(granted(),)),
        "starting": starting(),
        "half there": with_status(starting(), starting().status, workers=(worker(0),)),
        "running": alive,
        "failing": failing,
        "dying": dying,
        "pausing": paused,
        "being suspended": write(replace(alive, spec=alive.spec.model_copy(update={"suspend": True}))),
        "suspended": replace(stopped, spec=alive.spec.model_copy(update={"suspend": True})),
        "failing for good": refused,
        "failed": settled(gone(refused)),
        "succeeded": done,
    }


@pytest.mark.parametrize(("name", "wish"), list(product(every_phase(), WISHES)))
def test_every_wish_in_every_phase_leads_where_it_should(name: str, wish: str) -> None:
    """Followed to the end with a gang that does what it is told."""
    seen = every_phase()[name]
    updates = {wish: True} if wish in ("suspend", "cancel") else {}
    base = seen.spec.model_copy(update={"suspend": False} | updates)
    seen = replace(seen, spec=base, deleting=wish == "delete")
    for _ in range(40):
        decision = check(seen)
        if decision.status != seen.status:
            seen = write(seen, decision)
        elif any(isinstance(action, RemoveJob) for action in decision.actions):
            assert wish == "delete"
            assert seen.workers == ()
            return
        elif decision.actions:
            gone_ones = {a.id for a in decision.actions if isinstance(a, RemoveWorker)}
            left = tuple(w for w in seen.workers if w.id not in gone_ones)
            made = tuple(worker(a.id.worker, a.id.attempt) for a in decision.actions if isinstance(a, CreateWorker))
            seen = replace(seen, workers=left + made)
        else:
            break
    assert wish != "delete", "a deleted job must go"
    ended = name in ("failed", "succeeded", "failing for good")
    expected = {
        "suspend": {Phase.SUSPENDED},
        "cancel": {Phase.CANCELLED},
        "none": {Phase.QUEUED, Phase.STARTING, Phase.RUNNING, Phase.RESTARTING},
    }
    if not ended:
        assert seen.status.phase in expected[wish], f"{wish} while {name}: {seen.status.because}"
    elif name == "failing for good" and wish == "cancel":
        assert seen.status.phase is Phase.FAILED  # it had failed before it was cancelled
    assert seen.status.because


def test_the_deadline_counts_active_time_only() -> None:
    late = running(spec=spec(activeDeadlineSeconds=60))
    seconds = late.status.ledger.seconds
    assert seconds[GoodputState.QUEUE] == pytest.approx(100.0)
    assert check(replace(late, now=NOW + 59, workers=crew(step=6, now=NOW + 59))).status.phase is Phase.RUNNING
    decision = check(replace(late, now=NOW + 61, workers=crew(step=6, now=NOW + 61)))
    assert (decision.status.ends_as, decision.code) == (Phase.FAILED, Code.DEADLINE_EXCEEDED)


def test_time_to_live() -> None:
    seen = running(spec=spec(ttlSecondsAfterFinished=30))
    seen = settled(gone(write(with_status(seen, seen.status, workers=(exited(0, 0), exited(1, 0))))))
    assert check(seen).wake_after == 30
    assert check(replace(seen, now=NOW + 31)).actions == (RemoveJob(),)
