"""The rules for a gang that starts or runs: whether it is whole, fails, hangs or may grow, and what it is doing."""

from __future__ import annotations

from typing import Any

from muster.operator.core.causes import (
    FailureDiagnosis,
    diagnose,
    diagnose_failed_rendezvous,
    diagnose_hang,
    diagnose_inconsistent_status,
    diagnose_missing_workers,
    diagnose_preemption,
    diagnose_refusal,
    diagnose_uneven_end,
)
from muster.operator.core.codes import Code
from muster.operator.core.conditions import training_conditions
from muster.operator.core.decision import ACTIONS_MAX, CreateWorker, JobDecision
from muster.operator.core.goodput import active_seconds
from muster.operator.core.observed import WorkerState
from muster.operator.core.shutdown import checkpoint_status, fail, rejected, sweep
from muster.operator.core.stalls import StallDetector, check_refused, check_running, check_starting
from muster.operator.core.transitions import (
    awaits_scheduler,
    between_attempts,
    replace_last,
    transition,
    transition_with_progress,
    write_or_act,
)
from muster.operator.core.worker_summary import WorkerSummary
from muster.operator.pacing import LOOK_SECONDS
from muster.words.names import FIRST_INCARNATION
from muster.words.signals import TrainerPhase
from muster.words.status import GangStatus, JobStatus, Phase
from muster.words.text import plural

# A gang says that its first step (which compiles, reads cold data, or shares its cores) has taken so many minutes.
FIRST_STEP_MINUTES = (1, 2, 5, 10, 20, 30, 60)


def inconsistent_status(summary: WorkerSummary) -> JobDecision | None:
    """Decide about a STARTING or RUNNING job whose status can't be true (somebody edited it): start anew rather than
    guess."""
    status, gang = summary.status, summary.gang
    if status.phase not in (Phase.STARTING, Phase.RUNNING):
        return None
    places = gang.nodes if summary.seen.spec.gang.share_nodes else set(gang.nodes)
    if len(places) == gang.wanted > 0 and not between_attempts(status):
        return None
    what = f"{status.phase} with {plural(len(gang.nodes), 'node')} for {plural(gang.wanted, 'worker')}"
    return write_or_act(
        summary,
        fail(summary, diagnose_inconsistent_status(summary, f"the status contradicts itself: {what}; beginning anew")),
    )


def failed(summary: WorkerSummary) -> JobDecision | None:
    """Decide about a STARTING or RUNNING job whose gang has a problem."""
    status = summary.status
    if (diagnosis := diagnose(summary)) is not None and not _is_dry_run(summary, diagnosis):
        return write_or_act(summary, fail(summary, diagnosis))
    if status.phase is Phase.RUNNING and summary.missing:
        return write_or_act(summary, fail(summary, diagnose_missing_workers(summary)), trusts_absence=True)
    return None


def preempted(summary: WorkerSummary) -> JobDecision | None:
    """Decide about a STARTING or RUNNING job whose nodes go to another job: it is asked to commit, and returns to the
    queue."""
    granted = summary.seen.reservation(summary.status.reservation)
    if granted is None or not granted.yields_to or summary.status.phase not in (Phase.STARTING, Phase.RUNNING):
        return None
    # An old read may show an order that was taken back since.
    return write_or_act(summary, fail(summary, diagnose_preemption(summary, granted)), trusts_absence=True)


def starting(summary: WorkerSummary) -> JobDecision | None:
    """Create the whole gang, and wait until its ranks have connected."""
    if summary.status.phase is not Phase.STARTING:
        return None
    if summary.older:
        because = f"still there: {_describe_older(summary)}"
        status = transition(summary, Code.AWAITING_REMOVAL, because)
        return write_or_act(summary, status, sweep(summary, summary.older), LOOK_SECONDS)
    some_wait = not summary.missing and summary.ready < len(summary.mine)
    if some_wait and (waiting := next((worker.waiting for worker in summary.mine if worker.waiting), "")):
        # Another scheduler's queue may be long: that is no failure, however long.
        attempts = replace_last(summary.status.attempts, outcome="waiting")
        status = transition(
            summary, Code.AWAITING_SCHEDULER, waiting, gang=_gang(summary), suspicion=None, attempts=attempts
        )
        return write_or_act(summary, status, wake_after=LOOK_SECONDS)
    if because := rejected(summary):
        return write_or_act(
            summary, transition(summary, Code.WORKERS_REJECTED, because, Phase.RESTARTING, ends_as=None, suspicion=None)
        )
    refused = check_refused(summary)
    stall = refused or check_starting(summary, _begun_at(summary))
    if stall.confirmed and stall.suspicion is not None:
        diagnose_stall = diagnose_hang if stall.suspicion.rank is not None else diagnose_failed_rendezvous
        if refused:
            diagnose_stall = diagnose_refusal
        return write_or_act(summary, fail(summary, diagnose_stall(summary, stall.suspicion)), trusts_absence=True)
    updates: dict[str, Any] = {"gang": _placed(summary), "suspicion": stall.suspicion} | _begins(summary)
    if summary.missing:
        said = summary.status.because if summary.status.code == Code.CREATING_WORKERS else ""
        because = said or f"creating {plural(len(summary.missing), 'worker')} of attempt {summary.status.attempt} again"
        if trouble := summary.seen.trouble:
            because = f"workers of attempt {summary.status.attempt} can't be created: {trouble}"
        actions = tuple(_create(summary, index) for index in summary.missing[:ACTIONS_MAX])
        status = transition(summary, Code.CREATING_WORKERS, because, **updates)
        # A life begins when the one before it is seen gone. An attempt's first ones began with it, after such a look.
        follows = any(action.id.incarnation != FIRST_INCARNATION for action in actions)
        return write_or_act(summary, status, actions, LOOK_SECONDS, trusts_absence=follows)
    if summary.ready < summary.gang.wanted:
        reason = next((f"; worker {w.worker} on {w.node}: {w.reason}" for w in summary.mine if w.reason), "")
        because = f"up: {summary.ready} of {plural(summary.gang.wanted, 'worker')}{reason}"
        status = transition(summary, Code.AWAITING_WORKERS, because, **updates)
        return write_or_act(summary, status, wake_after=LOOK_SECONDS)
    # A program need not report anything: that all its workers are up is all that can be waited for.
    if summary.seen.spec.program is None and (summary.beat is None or summary.beat.phase is TrainerPhase.INIT):
        because = f"{summary.describe_gang} started; the ranks are meeting"
        status = transition(summary, Code.AWAITING_RANKS, because, **updates)
        return write_or_act(summary, status, wake_after=LOOK_SECONDS)
    return write_or_act(summary, _running(summary, StallDetector(None)))


def running(summary: WorkerSummary) -> JobDecision | None:
    """Report progress; stop for a larger gang when one is offered, and for good when the ranks hang."""
    if summary.status.phase is not Phase.RUNNING:
        return None
    if (uneven := diagnose_uneven_end(summary)) is not None and not summary.seen.spec.recovery.dry_run:
        return write_or_act(summary, fail(summary, uneven), trusts_absence=True)
    stall = check_running(summary)
    if stall.confirmed and summary.seen.spec.recovery.dry_run:
        stall = StallDetector(summary.status.suspicion, confirmed=True)
    elif stall.confirmed and stall.suspicion is not None:
        # Cached reads repeat old heartbeats; only a fresh one shows that there is really nothing new.
        return write_or_act(summary, fail(summary, diagnose_hang(summary, stall.suspicion)), trusts_absence=True)
    offer = summary.seen.reservation(summary.status.reservation + 1)
    if offer is not None and len(offer.nodes) > summary.gang.wanted:
        because = f"capacity returned: going on with {len(offer.nodes)} nodes instead of {summary.gang.wanted}"
        return write_or_act(summary, transition(summary, Code.REGROWING, because, Phase.RESTARTING, suspicion=None))
    wake_after = min(LOOK_SECONDS, max(0.0, deadline_left(summary)), stall.wake_after or LOOK_SECONDS)
    return write_or_act(summary, _running(summary, stall), sweep(summary, summary.older), wake_after)


def _describe_older(summary: WorkerSummary) -> str:
    replaced = [worker for worker in summary.older if worker.attempt == summary.status.attempt]
    if len(replaced) < len(summary.older):
        return f"{plural(len(summary.older) - len(replaced), 'worker')} of earlier attempts"
    return f"{plural(len(replaced), 'earlier incarnation')} of workers"


def _create(summary: WorkerSummary, index: int) -> CreateWorker:
    nodes = summary.gang.nodes
    return CreateWorker(summary.status.current(index), nodes[index], nodes, summary.status.resume_step)


def _running(summary: WorkerSummary, stall: StallDetector) -> JobStatus:
    code, because = _activity(summary, stall)
    updates = {"gang": _gang(summary), "checkpoint": checkpoint_status(summary), "suspicion": stall.suspicion}
    return transition_with_progress(summary, code, because, Phase.RUNNING, **(updates | training_conditions(summary)))


def _activity(summary: WorkerSummary, stall: StallDetector) -> tuple[Code, str]:
    if summary.seen.spec.recovery.dry_run and (would := _would(summary, stall)):
        return Code.WOULD_RESTART, f"nothing is done, for recovery.dryRun is on; else the gang would restart: {would}"
    if stall.suspicion is not None:
        return Code.STALLING, stall.suspicion.why
    gang, beat = summary.gang, summary.beat
    where = f"{plural(gang.wanted, 'node')} of pool {gang.pool}"
    if summary.seen.spec.program is not None:
        return Code.TRAINING, f"the program runs on {where}{_unwatched(summary)}"
    preparing = beat is not None and beat.phase in (TrainerPhase.INIT, TrainerPhase.DATA, TrainerPhase.LOAD)
    if preparing and summary.status.code != Code.TRAINING:
        return Code.PREPARING, f"preparing data and loading state on {where}"
    return Code.TRAINING, f"training on {where}{_slow_first_step(summary)}"


def _unwatched(summary: WorkerSummary) -> str:
    """Say what is not known of a program. It is decided by rank 0, so that the words do not change with every rank."""
    if summary.beat is None or summary.beat.watched:
        return ""
    hang = summary.seen.spec.program.hang if summary.seen.spec.program is not None else None
    if hang is not None and hang.off:
        return "; hangs are not looked for"
    return "; no step of it has been counted yet" if summary.beat.first_step_at is None else "; its steps are over"


def _slow_first_step(summary: WorkerSummary) -> str:
    """Said in minutes that are passed, so that the words change seldom: each change is a write of the status."""
    beat = summary.beat
    if beat is None or beat.phase is not TrainerPhase.STEP or beat.last_step is not None:
        return ""
    passed = max((minutes for minutes in FIRST_STEP_MINUTES if beat.at - beat.progressed_at >= minutes * 60), default=0)
    return f"; the first step has taken more than {passed} min so far" if passed else ""


def _is_dry_run(summary: WorkerSummary, diagnosis: FailureDiagnosis) -> bool:
    """Return whether the end of this attempt is left out because of a dry run, which ends nothing that has not ended by
    itself."""
    return diagnosis.alive and summary.status.phase is Phase.RUNNING and summary.seen.spec.recovery.dry_run


def _would(summary: WorkerSummary, stall: StallDetector) -> str:
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
    doubled = len(set(chosen)) < len(chosen) and not summary.seen.spec.gang.share_nodes
    if chosen == gang.nodes or not all(chosen) or doubled:
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
    """Return the time from which the ranks could connect: the attempt's start, or when the last worker was placed."""
    created_at = summary.status.attempts[-1].created_at if summary.status.attempts else summary.status.since
    if summary.ready == len(summary.mine):  # a large gang is asked in every pass
        return created_at
    placed = [worker.since for worker in summary.mine if worker.state is WorkerState.STARTING]
    return max([created_at, *placed])


def deadline_left(summary: WorkerSummary) -> float:
    """Seconds of activity left; infinite without a deadline or while nothing is active."""
    deadline, status = summary.seen.spec.active_deadline_seconds, summary.status
    if deadline is None or status.phase in (Phase.QUEUED, Phase.SUSPENDED):
        return float("inf")
    return deadline - active_seconds(status.ledger, status.phase, summary.seen.now, awaits_scheduler(status))
