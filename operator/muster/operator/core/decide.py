"""What to do about one job: pure, total, and told in the order in which things matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from muster.contract.signals import TrainerPhase
from muster.contract.status import STATUS_VERSION, Attempt, GangStatus, JobStatus, Phase
from muster.contract.text import plural
from muster.operator.core.budgets import remaining_backoff_seconds
from muster.operator.core.causes import (
    FailureDiagnosis,
    diagnose,
    diagnose_failed_rendezvous,
    diagnose_hang,
    diagnose_inconsistent_status,
    diagnose_missing_workers,
    seconds_until_peer_report,
)
from muster.operator.core.codes import GIVEN_UP, Code, code_of
from muster.operator.core.conditions import training_conditions
from muster.operator.core.data_skips import data_skip
from muster.operator.core.decision import ACTIONS_MAX, Action, CreateWorker, Decision, RemoveJob
from muster.operator.core.goodput import active_seconds
from muster.operator.core.observed import Observed, Reservation, WorkerState
from muster.operator.core.shutdown import (
    AWAIT_COMMITS_SECONDS,
    amend,
    await_commits,
    checkpoint_status,
    clear,
    close,
    end,
    fail,
    finish,
    reason_not_to_resume,
    reason_to_release,
    rejected,
    requeue,
    stop,
    sweep,
)
from muster.operator.core.stalls import Stall, check_running, check_starting
from muster.operator.core.transitions import (
    ATTEMPTS_KEPT,
    awaits_scheduler,
    between_attempts,
    reaching,
    replace_last,
    transition,
    transition_with_progress,
)
from muster.operator.core.worker_summary import WorkerSummary, summarize_workers
from muster.operator.pacing import LOOK_SECONDS, MORE_SECONDS

# A gang says that its first step (which compiles, reads cold data, or shares its cores) has taken so many minutes.
FIRST_STEP_MINUTES = (1, 2, 5, 10, 20, 30, 60)

Rule = Callable[[WorkerSummary], Decision | None]


def decide(seen: Observed) -> Decision:
    """The first rule that has an opinion decides. Total: every state that a status can be in has its rule."""
    summary = summarize_workers(seen)
    for rule in RULES:
        if (decision := rule(summary)) is not None:
            return decision
    raise AssertionError(f"no rule for phase {seen.status.phase}")


def newer(summary: WorkerSummary) -> Decision | None:
    """A status in a form that we don't know: another, newer operator is responsible."""
    version = summary.status.schema_version
    if version <= STATUS_VERSION:
        return None
    because = (
        f"the status has schema version {version} and this operator knows {STATUS_VERSION}: not touched; "
        "upgrade the operator, or stop the older one if a newer one runs beside it"
    )
    return Decision(summary.status, code=Code.NEWER_STATUS, because=because)


def outdated(summary: WorkerSummary) -> Decision | None:
    """A status that an earlier release wrote is written in today's form first of all, also of a job that is over: the
    definition of today's TrainingJob may refuse every other change of an object whose status has another form.
    """
    if summary.status.schema_version >= STATUS_VERSION:
        return None
    return _turn(summary, summary.status.model_copy(update={"schema_version": STATUS_VERSION}))


def finished(summary: WorkerSummary) -> Decision | None:
    """A job that is over keeps sweeping, and goes when it is deleted or its time to live is up."""
    if not summary.status.phase.terminal:
        return None
    if not summary.empty:
        return _stay(summary, sweep(summary, (*summary.mine, *summary.older)), LOOK_SECONDS)
    if summary.seen.deleting:
        return _stay(summary, (RemoveJob(),), LOOK_SECONDS, trusts_absence=True)
    ttl = summary.seen.spec.ttl_seconds_after_finished
    if ttl is None:
        return _stay(summary)
    left = (summary.status.finished_at or summary.seen.now) + ttl - summary.seen.now
    if left > 0:
        return _stay(summary, wake_after=left)
    return _stay(summary, (RemoveJob(),), LOOK_SECONDS, trusts_absence=True)


def done(summary: WorkerSummary) -> Decision | None:
    """All workers ended well: that counts, whatever else was asked for meanwhile."""
    if not summary.all_done or summary.older or between_attempts(summary.status) or summary.seen.deleting:
        return None
    because = f"{_all_workers(summary.gang.wanted)} finished"
    return _turn(summary, finish(summary, because))


def user_request(summary: WorkerSummary) -> Decision | None:
    """The user (or a deadline) wants it to end. A stronger request replaces a weaker one, also while stopping."""
    seen, status = summary.seen, summary.status
    ends_as, code = status.ends_as, code_of(status.code) if status.phase is Phase.STOPPING else None
    if ends_as is Phase.SUCCEEDED:
        return None
    if seen.deleting:
        wanted = (Phase.CANCELLED, Code.DELETING, "the job was deleted")
    elif ends_as is Phase.CANCELLED or code in GIVEN_UP:
        return None
    elif seen.spec.cancel:
        wanted = (Phase.CANCELLED, Code.CANCELLING, "the user cancelled the job")
    elif code is Code.DEADLINE_EXCEEDED:
        return None
    elif _deadline_left(summary) <= 0:
        seconds = seen.spec.active_deadline_seconds
        wanted = (
            Phase.FAILED,
            Code.DEADLINE_EXCEEDED,
            f"the job was active for longer than its deadline of {seconds} s",
        )
    elif seen.spec.suspend and status.phase is not Phase.SUSPENDED:
        wanted = (Phase.SUSPENDED, Code.SUSPENDING, "the user suspended the job")
    else:
        return None
    if (ends_as, code) == wanted[:2]:
        return None
    return _turn(summary, stop(summary, *wanted))


def stopping(summary: WorkerSummary) -> Decision | None:
    """Clear the gang away, close the attempt when it is gone, and only then give the nodes back."""
    status, closed = summary.status, between_attempts(summary.status)
    if status.phase is not Phase.STOPPING and (status.phase is not Phase.RESTARTING or closed):
        return None
    failing = status.phase is Phase.RESTARTING or status.code in GIVEN_UP
    if failing and not closed and (better := amend(summary)) is not None:
        return _turn(summary, better)
    if failing and not closed and (patience := seconds_until_peer_report(summary)) > 0:
        return _stay(summary, (), patience)
    if not summary.empty:
        return _stay(summary, clear(summary), LOOK_SECONDS)
    return _turn(summary, end(summary) if closed else close(summary), trusts_absence=True)


def suspended(summary: WorkerSummary) -> Decision | None:
    if summary.status.phase is not Phase.SUSPENDED:
        return None
    if not summary.empty:
        return _stay(summary, sweep(summary, (*summary.mine, *summary.older)), LOOK_SECONDS)
    if summary.seen.spec.suspend:
        return _stay(summary)
    because = "the user resumed the job; asking for nodes"
    return _turn(
        summary,
        transition(summary, Code.AWAITING_ADMISSION, because, Phase.QUEUED, queued_at=summary.seen.now, retry_at=None),
    )


def queued(summary: WorkerSummary) -> Decision | None:
    """In the queue: begin when nodes are reserved for this very request."""
    seen, status = summary.seen, summary.status
    if status.phase is not Phase.QUEUED:
        return None
    if not summary.empty:
        return _stay(summary, sweep(summary, (*summary.mine, *summary.older)), LOOK_SECONDS)
    pause = remaining_backoff_seconds(seen.spec.recovery, status.retry_at, seen.now)
    if pause > 0:
        return _stay(summary, wake_after=pause)
    granted = _reservation(seen, status.reservation)
    if granted is not None:
        gang = GangStatus(
            wanted=len(granted.nodes),
            nodes=granted.nodes,
            pool=granted.pool,
            capacity=granted.capacity,
            instance_type=granted.instance_type,
        )
        if because := reason_not_to_resume(summary):
            return _turn(summary, await_commits(summary, because), trusts_absence=True)
        return _turn(summary, _start_attempt(summary, gang), trusts_absence=True)
    if seen.wait is not None:
        return _turn(summary, transition(summary, code_of(seen.wait.code), seen.wait.because))
    if status.code in (Code.CREATED, Code.BACKING_OFF):
        return _turn(summary, transition(summary, Code.AWAITING_ADMISSION, "in the queue; not yet considered"))
    return _stay(summary)


def restart_pending(summary: WorkerSummary) -> Decision | None:
    """RESTARTING with the attempt closed: after a pause the next one on the same nodes, or back into the queue."""
    seen, status = summary.seen, summary.status
    if status.phase is not Phase.RESTARTING:
        return None
    if not summary.empty:
        return _stay(summary, sweep(summary, (*summary.mine, *summary.older)), LOOK_SECONDS)
    pause = remaining_backoff_seconds(seen.spec.recovery, status.retry_at, seen.now)
    if (because := reason_to_release(summary, pause)) is not None:
        return _turn(summary, requeue(summary, because), trusts_absence=True)
    if pause > 0:
        return _stay(summary, wake_after=pause)
    if because := reason_not_to_resume(summary):
        if status.code == Code.AWAITING_COMMITS:
            return _turn(summary, await_commits(summary, because), trusts_absence=True)
        retry_at = seen.now + AWAIT_COMMITS_SECONDS
        waiting = transition(summary, Code.AWAITING_COMMITS, because, retry_at=retry_at)
        return _turn(summary, waiting, trusts_absence=True)
    return _turn(summary, _start_attempt(summary, status.gang), trusts_absence=True)


def inconsistent_status(summary: WorkerSummary) -> Decision | None:
    """STARTING or RUNNING by a status that can't be true (somebody edited it): begin anew rather than guess."""
    status, gang = summary.status, summary.gang
    if status.phase not in (Phase.STARTING, Phase.RUNNING):
        return None
    if len(set(gang.nodes)) == gang.wanted > 0 and not between_attempts(status):
        return None
    what = f"{status.phase} with {plural(len(gang.nodes), 'node')} for {plural(gang.wanted, 'worker')}"
    return _turn(
        summary,
        fail(summary, diagnose_inconsistent_status(summary, f"the status contradicts itself: {what}; beginning anew")),
    )


def failed(summary: WorkerSummary) -> Decision | None:
    """STARTING or RUNNING, and something is wrong with the gang."""
    status = summary.status
    if (diagnosis := diagnose(summary)) is not None and not _only_said(summary, diagnosis):
        return _turn(summary, fail(summary, diagnosis))
    if status.phase is Phase.RUNNING and summary.missing:
        return _turn(summary, fail(summary, diagnose_missing_workers(summary)), trusts_absence=True)
    return None


def starting(summary: WorkerSummary) -> Decision | None:
    """Let the whole gang exist, and wait until its ranks have met."""
    if summary.status.phase is not Phase.STARTING:
        return None
    if summary.older:
        because = f"still there: {plural(len(summary.older), 'worker')} of earlier attempts"
        status = transition(summary, Code.AWAITING_REMOVAL, because)
        return _turn(summary, status, sweep(summary, summary.older), LOOK_SECONDS)
    if not summary.missing and (waiting := next((worker.waiting for worker in summary.mine if worker.waiting), "")):
        # Another scheduler's queue may be long: that is no failure, however long.
        attempts = replace_last(summary.status.attempts, outcome="waiting")
        status = transition(
            summary, Code.AWAITING_SCHEDULER, waiting, gang=_gang(summary), suspicion=None, attempts=attempts
        )
        return _turn(summary, status, wake_after=LOOK_SECONDS)
    if because := rejected(summary):
        return _turn(
            summary, transition(summary, Code.WORKERS_REJECTED, because, Phase.RESTARTING, ends_as=None, suspicion=None)
        )
    stall = check_starting(summary, _begun_at(summary))
    if stall.confirmed and stall.suspicion is not None:
        diagnose_stall = diagnose_hang if stall.suspicion.rank is not None else diagnose_failed_rendezvous
        return _turn(summary, fail(summary, diagnose_stall(summary, stall.suspicion)), trusts_absence=True)
    updates: dict[str, Any] = {"gang": _placed(summary), "suspicion": stall.suspicion} | _begins(summary)
    if summary.missing:
        said = summary.status.because if summary.status.code == Code.CREATING_WORKERS else ""
        because = said or f"creating {plural(len(summary.missing), 'worker')} of attempt {summary.status.attempt} again"
        if trouble := summary.seen.trouble:
            because = f"workers of attempt {summary.status.attempt} can't be created: {trouble}"
        actions = tuple(_create(summary, index) for index in summary.missing[:ACTIONS_MAX])
        status = transition(summary, Code.CREATING_WORKERS, because, **updates)
        return _turn(summary, status, actions, LOOK_SECONDS)
    if summary.ready < summary.gang.wanted:
        reason = next((f"; worker {w.worker} on {w.node}: {w.reason}" for w in summary.mine if w.reason), "")
        because = f"up: {summary.ready} of {plural(summary.gang.wanted, 'worker')}{reason}"
        return _turn(summary, transition(summary, Code.AWAITING_WORKERS, because, **updates), wake_after=LOOK_SECONDS)
    if summary.beat is None or summary.beat.phase is TrainerPhase.INIT:
        because = f"{_all_workers(summary.gang.wanted)} started; the ranks are meeting"
        return _turn(summary, transition(summary, Code.AWAITING_RANKS, because, **updates), wake_after=LOOK_SECONDS)
    return _turn(summary, _running(summary, Stall(None)))


def running(summary: WorkerSummary) -> Decision | None:
    """Report progress; stop for a larger gang when one is offered, and for good when the ranks hang."""
    if summary.status.phase is not Phase.RUNNING:
        return None
    stall = check_running(summary)
    if stall.confirmed and summary.seen.spec.recovery.dry_run:
        stall = Stall(summary.status.suspicion, confirmed=True)
    elif stall.confirmed and stall.suspicion is not None:
        # Cached reads repeat old heartbeats; only a fresh one shows that there is really nothing new.
        return _turn(summary, fail(summary, diagnose_hang(summary, stall.suspicion)), trusts_absence=True)
    offer = _reservation(summary.seen, summary.status.reservation + 1)
    if offer is not None and len(offer.nodes) > summary.gang.wanted:
        because = f"capacity returned: going on with {len(offer.nodes)} nodes instead of {summary.gang.wanted}"
        return _turn(summary, transition(summary, Code.REGROWING, because, Phase.RESTARTING, suspicion=None))
    wake_after = min(LOOK_SECONDS, max(0.0, _deadline_left(summary)), stall.wake_after or LOOK_SECONDS)
    return _turn(summary, _running(summary, stall), sweep(summary, summary.older), wake_after)


RULES: tuple[Rule, ...] = (
    newer,
    outdated,
    finished,
    done,
    user_request,
    stopping,
    suspended,
    queued,
    restart_pending,
    inconsistent_status,
    failed,
    starting,
    running,
)


def _turn(
    summary: WorkerSummary,
    status: JobStatus,
    actions: tuple[Action, ...] = (),
    wake_after: float | None = None,
    trusts_absence: bool = False,
) -> Decision:
    """Either the status changes, or the actions that it already calls for are due."""
    if status is not summary.status:
        return Decision(status, (), None, status.code, status.because, trusts_absence)
    wake_after = MORE_SECONDS if len(actions) >= ACTIONS_MAX else wake_after
    return Decision(status, actions, wake_after, status.code, status.because, trusts_absence)


def _stay(
    summary: WorkerSummary,
    actions: tuple[Action, ...] = (),
    wake_after: float | None = None,
    trusts_absence: bool = False,
) -> Decision:
    wake_after = MORE_SECONDS if len(actions) >= ACTIONS_MAX else wake_after
    return Decision(summary.status, actions, wake_after, summary.status.code, summary.status.because, trusts_absence)


def _start_attempt(summary: WorkerSummary, gang: GangStatus) -> JobStatus:
    """The next attempt. What it resumes from is chosen here, in the write that makes it exist."""
    seen, status = summary.seen, summary.status
    gang = gang.model_copy(update={"ready": 0})
    number, resume_step = status.attempt + 1, seen.committed.step if seen.committed else 0
    attempt = Attempt.model_construct(
        number=number,
        created_at=seen.now,
        nodes=gang.nodes,
        workers=gang.wanted,
        gpus_per_worker=seen.spec.gang.gpus_per_node,
        instance_type=gang.instance_type,
        capacity=gang.capacity,
        world_size=gang.wanted * seen.spec.gang.ranks_per_node,
        resume_step=resume_step,
    )
    whence = f"resuming from step {resume_step}" if resume_step else "from the start"
    return transition(
        summary,
        Code.CREATING_WORKERS,
        "; ".join(
            [
                f"attempt {number} on {plural(gang.wanted, 'node')} of pool {gang.pool}, {whence}",
                *seen.notes,
            ]
        ),
        Phase.STARTING,
        attempt=number,
        resume_step=resume_step,
        gang=gang,
        attempts=(*_with_last_commit(status.attempts, resume_step), attempt)[-ATTEMPTS_KEPT:],
        checkpoint=checkpoint_status(summary),
        data_skip=data_skip(summary, resume_step),
        retry_at=None,
        started_at=status.started_at if status.started_at is not None else seen.now,
        ends_as=None,
        suspicion=None,
    )


def _with_last_commit(attempts: tuple[Attempt, ...], committed_step: int) -> tuple[Attempt, ...]:
    """A cached read may have closed the last attempt before its last commit was seen; this fresh one sees it."""
    return (*attempts[:-1], reaching(attempts[-1], committed_step)) if attempts else ()


def _create(summary: WorkerSummary, index: int) -> CreateWorker:
    nodes = summary.gang.nodes
    return CreateWorker(summary.status.attempt, index, nodes[index], nodes, summary.status.resume_step)


def _running(summary: WorkerSummary, stall: Stall) -> JobStatus:
    code, because = _activity(summary, stall)
    updates = {"gang": _gang(summary), "checkpoint": checkpoint_status(summary), "suspicion": stall.suspicion}
    return transition_with_progress(summary, code, because, Phase.RUNNING, **(updates | training_conditions(summary)))


def _activity(summary: WorkerSummary, stall: Stall) -> tuple[Code, str]:
    if summary.seen.spec.recovery.dry_run and (would := _would(summary, stall)):
        return Code.WOULD_RESTART, f"nothing is done, for recovery.dryRun is on; else the gang would restart: {would}"
    if stall.suspicion is not None:
        return Code.STALLING, stall.suspicion.why
    gang, beat = summary.gang, summary.beat
    where = f"{plural(gang.wanted, 'node')} of pool {gang.pool}"
    preparing = beat is not None and beat.phase in (TrainerPhase.INIT, TrainerPhase.DATA, TrainerPhase.LOAD)
    if preparing and summary.status.code != Code.TRAINING:
        return Code.PREPARING, f"preparing data and loading state on {where}"
    return Code.TRAINING, f"training on {where}{_slow_first_step(summary)}"


def _slow_first_step(summary: WorkerSummary) -> str:
    """Said in minutes that are passed, so that the words change seldom: each change is a write of the status."""
    beat = summary.beat
    if beat is None or beat.phase is not TrainerPhase.STEP or beat.last_step is not None:
        return ""
    passed = max((minutes for minutes in FIRST_STEP_MINUTES if beat.at - beat.progressed_at >= minutes * 60), default=0)
    return f"; the first step has taken more than {passed} min so far" if passed else ""


def _only_said(summary: WorkerSummary, diagnosis: FailureDiagnosis) -> bool:
    """In a dry run nothing is ended that has not ended by itself."""
    return diagnosis.alive and summary.status.phase is Phase.RUNNING and summary.seen.spec.recovery.dry_run


def _would(summary: WorkerSummary, stall: Stall) -> str:
    diagnosis = diagnose(summary)
    if diagnosis is not None:
        return f"{diagnosis.failure.cause}: {diagnosis.failure.message}"
    return stall.suspicion.why if stall.confirmed and stall.suspicion is not None else ""


def _gang(summary: WorkerSummary) -> GangStatus:
    return (
        summary.gang
        if summary.gang.ready == summary.ready
        else summary.gang.model_copy(update={"ready": summary.ready})
    )


def _placed(summary: WorkerSummary) -> GangStatus:
    """The gang with the nodes that another scheduler has chosen, once it has chosen them all."""
    gang = _gang(summary)
    if summary.seen.spec.gang.scheduler.kind == "builtin":
        return gang
    nodes = {worker.worker: worker.node for worker in summary.mine}
    chosen = tuple(nodes.get(index, "") for index in range(gang.wanted))
    if chosen == gang.nodes or not all(chosen) or len(set(chosen)) < len(chosen):
        return gang
    return gang.model_copy(update={"nodes": chosen})


def _begins(summary: WorkerSummary) -> dict[str, Any]:
    """An attempt that another scheduler has placed begins now: until then it held nothing, and cost nothing."""
    attempts = summary.status.attempts
    if not attempts or attempts[-1].outcome != "waiting":
        return {}
    nodes = _placed(summary).nodes
    return {"attempts": replace_last(attempts, outcome="running", created_at=summary.seen.now, nodes=nodes)}


def _begun_at(summary: WorkerSummary) -> float:
    """From when on the ranks could meet: the attempt's beginning, or when the last worker got its place."""
    created_at = summary.status.attempts[-1].created_at if summary.status.attempts else summary.status.since
    placed = [worker.since for worker in summary.mine if worker.state is WorkerState.STARTING]
    return max([created_at, *placed])


def _deadline_left(summary: WorkerSummary) -> float:
    """Seconds of activity left; infinite without a deadline or while nothing is active."""
    deadline, status = summary.seen.spec.active_deadline_seconds, summary.status
    if deadline is None or status.phase in (Phase.QUEUED, Phase.SUSPENDED):
        return float("inf")
    return deadline - active_seconds(status.ledger, status.phase, summary.seen.now, awaits_scheduler(status))


def _reservation(seen: Observed, number: int) -> Reservation | None:
    return next((entry for entry in seen.reservations if entry.number == number), None)


def _all_workers(count: int) -> str:
    return "the worker" if count == 1 else f"all {count} workers"
