"""End of an attempt: the gang is asked to stop, is removed, and then the account is settled."""

from __future__ import annotations

from itertools import islice, takewhile
from typing import Any

from muster.operator.core.budgets import (
    FREE,
    backoff_seconds,
    charge,
    charge_failed_node,
    exclude_node,
    preemptions_in_a_row,
    refusal,
)
from muster.operator.core.causes import (
    LEAVING,
    UNREACHABLE_SECONDS,
    FailureDiagnosis,
    current_signals,
    diagnose,
    strength,
)
from muster.operator.core.codes import GIVEN_UP, OF_CAUSE, Code, code_of
from muster.operator.core.crash_loops import ends_at_once
from muster.operator.core.decision import ACTIONS_MAX, Action, RemoveWorker
from muster.operator.core.observed import ObservedWorker, Rejection, WorkerState
from muster.operator.core.transitions import NODES_KEPT, between_attempts, last_step, replace_last, transition
from muster.operator.core.worker_summary import WorkerSummary
from muster.words.signals import Cause
from muster.words.status import CheckpointStatus, Failure, GangStatus, JobStatus, Phase

# Time to commit before a wanted stop: AWS gives two minutes of notice, of which ten seconds are for learning of it.
STOP_SECONDS = 110.0
# After a failure there is nothing to wait for: the collectives are broken, and whoever holds them learns it at once.
FAILURE_SECONDS = 5.0
# Ranks that hang can do nothing with more time. Their launcher has their stacks written down, and what is in their
# memory committed (decision 0048).
HUNG_SECONDS = 10.0
OVERDUE_SECONDS = 60.0  # past its grace a worker should long be gone; then it is taken away without asking its node
# Nodes are kept through a pause that is shorter than giving them up and asking again; a longer one would let them idle.
HOLD_SECONDS_MAX = 60.0
# A quota counts pods that are gone for a few seconds more, and an API server may be slow for as long. Whoever is still
# rejected then gives the nodes back, and asks again after a pause that doubles, up to the backoff of the job.
REJECTED_SECONDS, REJECTED_BACKOFF_SECONDS = 15.0, 15.0
# A store that fails for a moment should not cost a gang its nodes, one that is down should not keep them.
AWAIT_COMMITS_SECONDS = 15.0
DRAIN_HOURS = 1.0  # a drained node is often back after a reboot

_GRACE: dict[str, float] = {
    Code.PREEMPTED: STOP_SECONDS,
    Code.EVICTED: STOP_SECONDS,
    Code.REGROWING: STOP_SECONDS,
    Code.SUSPENDING: STOP_SECONDS,
    Code.MONTH_LIMIT: STOP_SECONDS,
    Code.CANCELLING: STOP_SECONDS,
    Code.DEADLINE_EXCEEDED: STOP_SECONDS,
    Code.FINISHING: STOP_SECONDS,
    Code.DELETING: 30.0,  # as Kubernetes deletes
    Code.HANG: HUNG_SECONDS,
}
_OUTCOMES = {
    Phase.SUCCEEDED: "succeeded",
    Phase.FAILED: "failed",
    Phase.CANCELLED: "cancelled",
    Phase.SUSPENDED: "suspended",
}
_ENDED: dict[Code, Code] = {
    Code.SUSPENDING: Code.SUSPENDED,
    Code.CANCELLING: Code.CANCELLED,
    Code.DELETING: Code.DELETED,
    Code.FINISHING: Code.FINISHED,
}


def stop(summary: WorkerSummary, ends_as: Phase, code: Code, because: str) -> JobStatus:
    """Begin to stop for good (or for a suspension). What comes when the last worker is gone is written down now."""
    return transition(summary, code, because, Phase.STOPPING, ends_as=ends_as, suspicion=None)


def finish(summary: WorkerSummary, because: str) -> JobStatus:
    """Close the attempt of a gang that ended well. All workers are in sight, so none is left who could train, commit or
    hold a node: one write closes the attempt, gives the nodes back and ends the job. What is left of the workers is
    swept afterwards.
    """
    closed = _closed(summary, own_failure(summary.status), False, Phase.SUCCEEDED, because)
    first = next((worker.exit for worker in summary.exited if worker.worker == 0), None)
    if first is not None and (first.results or first.results_fault):
        closed |= {"results": first.results, "results_fault": first.results_fault}
        because += f"; its results are left out: {first.results_fault}" if first.results_fault else ""
    return _over(summary, Code.FINISHED, because, Phase.SUCCEEDED, closed)


def fail(summary: WorkerSummary, diagnosis: FailureDiagnosis) -> JobStatus:
    """Stop an attempt that can't go on. Whether another follows is decided when it is gone, but announced already."""
    failure = _with_step(summary, diagnosis.failure)
    if failure.cause is Cause.UNKNOWN and ends_at_once(summary.seen.spec, summary.status, failure):
        failure = failure.model_copy(update={"cause": Cause.USER_ERROR})
    refused = refusal(summary.seen.spec, summary.status, failure, progressed(summary), summary.seen.now)
    excluded = summary.status.excluded_nodes
    if diagnosis.excludes_node:
        excluded = exclude_node(summary.seen.spec.recovery, excluded, failure, summary.seen.now)
    elif diagnosis.alive and failure.cause is Cause.EVICTION and failure.node not in summary.seen.nodes_unfit:
        # An alert wants the node drained, and nothing else keeps the next attempt away from it.
        excluded = exclude_node(summary.seen.spec.recovery, excluded, failure, summary.seen.now, DRAIN_HOURS)
    if refused:
        return transition(
            summary,
            refused.code,
            refused.because,
            Phase.STOPPING,
            ends_as=Phase.FAILED,
            last_failure=failure,
            excluded_nodes=excluded,
            suspicion=None,
        )
    because = f"attempt {summary.status.attempt} ended: {failure.cause}: {failure.message}"
    code = OF_CAUSE[failure.cause]
    return transition(
        summary,
        code,
        because,
        Phase.RESTARTING,
        ends_as=None,
        last_failure=failure,
        excluded_nodes=excluded,
        suspicion=None,
    )


def amend(summary: WorkerSummary) -> JobStatus | None:
    """Better evidence of why the attempt ended, found while its gang is cleared away."""
    recorded = own_failure(summary.status)
    diagnosis = diagnose(summary)
    if diagnosis is None or (recorded is not None and diagnosis.strength >= strength(recorded)):
        return None
    return fail(summary, diagnosis)


def clear(summary: WorkerSummary) -> tuple[Action, ...]:
    """Remove the gang. Workers that ended stay in sight as evidence until all have."""
    everybody = (*summary.mine, *summary.older)
    if all(worker.state is WorkerState.EXITED for worker in everybody):
        return tuple(RemoveWorker(worker.id, 0.0) for worker in everybody[:ACTIONS_MAX])
    grace = _GRACE.get(summary.status.code, FAILURE_SECONDS)
    overdue = summary.seen.now - summary.status.since > grace + OVERDUE_SECONDS
    live = (worker for worker in everybody if worker.state is not WorkerState.EXITED)
    due = (action for worker in live if (action := _remove(summary, worker, grace, overdue)) is not None)
    return tuple(islice(due, ACTIONS_MAX))


def sweep(summary: WorkerSummary, workers: tuple[ObservedWorker, ...]) -> tuple[Action, ...]:
    """Remove workers that should not be there at all."""
    return tuple(
        action for worker in workers if (action := _remove(summary, worker, FAILURE_SECONDS, False)) is not None
    )


def close(summary: WorkerSummary) -> JobStatus:
    """Close the attempt of a gang that is gone, and charge its failure. From this write on, a worker of the attempt
    that was created late is refused by the fence. The nodes are still held: they are given back (or used again) by a
    later write, after one more look that finds nobody, so that a late worker can't be on them (docs/decisions/0004).
    """
    seen, status = summary.seen, summary.status
    failure = own_failure(status)
    failing = status.phase is Phase.RESTARTING or status.code in GIVEN_UP
    if failure is None or not failing:
        closed = _closed(summary, failure, False, status.ends_as, status.because)
        if status.code == Code.WORKERS_REJECTED:
            closed["retry_at"] = seen.now + _rejected_backoff_seconds(summary)
        return transition(summary, code_of(status.code), status.because, **closed)
    made_progress = progressed(summary)
    refused = refusal(seen.spec, status, failure, made_progress, seen.now)
    updates = _closed(summary, failure, refused is None, status.ends_as, status.because)
    if refused is not None:
        return transition(summary, refused.code, refused.because, Phase.STOPPING, **updates, ends_as=Phase.FAILED)
    after = status.model_copy(update=updates)
    pause = backoff_seconds(seen.spec.recovery, seen.uid, status.attempt, failure, after, made_progress)
    when = f"in {pause:.1f} s" if pause > 0 else "at once"
    because = f"attempt {status.attempt} ended: {failure.cause}: {failure.message}; the next begins {when}"
    retry_at = seen.now + pause if pause > 0 else None
    return transition(summary, Code.BACKING_OFF, because, Phase.RESTARTING, **updates, ends_as=None, retry_at=retry_at)


def end(summary: WorkerSummary) -> JobStatus:
    """Finish after the last attempt is closed and no worker is left: the nodes go back, and the job takes the phase
    that was decided."""
    status = summary.status
    code = code_of(status.code)
    updates = {"checkpoint": checkpoint_status(summary)}
    return _over(summary, _ENDED.get(code, code), status.because, status.ends_as or Phase.FAILED, updates)


def _over(summary: WorkerSummary, code: Code, because: str, phase: Phase, updates: dict[str, Any]) -> JobStatus:
    updates |= released(summary.status) | {"ends_as": None, "retry_at": None}
    updates["reservation"] += 1  # an offer to grow has the number after its own and is void as well
    if phase.terminal:
        updates["finished_at"] = summary.seen.now
    return transition(summary, code, because, phase, **updates)


def requeue(summary: WorkerSummary, because: str) -> JobStatus:
    """Give the nodes back and ask for others."""
    code = Code.BACKING_OFF if summary.status.retry_at is not None else Code.AWAITING_ADMISSION
    return transition(summary, code, because, Phase.QUEUED, **released(summary.status), queued_at=summary.seen.now)


def reason_not_to_resume(summary: WorkerSummary) -> str:
    """Return why the next attempt's checkpoint can't be determined; empty if it can."""
    seen, checkpoint = summary.seen, summary.status.checkpoint
    if seen.commits_unreadable:
        return f"the next attempt waits, for the job's checkpoints can't be read: {seen.commits_unreadable}"
    if seen.committed is None and checkpoint is not None:
        return (
            f"the next attempt waits: the checkpoint of step {checkpoint.step} was saved, but "
            f"{seen.checkpoint_uri} holds no checkpoint now; put the folder back, or clone the job to begin anew"
        )
    return ""


def await_commits(summary: WorkerSummary, because: str) -> JobStatus:
    """Wait until it is known where the next attempt resumes. No attempt begins before that, and no nodes are held
    meanwhile."""
    return transition(
        summary,
        Code.AWAITING_COMMITS,
        because,
        Phase.QUEUED,
        **released(summary.status),
        retry_at=summary.seen.now + AWAIT_COMMITS_SECONDS,
        queued_at=summary.status.queued_at if summary.status.phase is Phase.QUEUED else summary.seen.now,
    )


def reason_to_release(summary: WorkerSummary, pause_seconds: float) -> str | None:
    """Return why the ended attempt's nodes should not run the next one; None if they should."""
    status = summary.status
    if any(entry.number > status.reservation for entry in summary.seen.reservations):
        return f"{status.because}; moving to the nodes that are held for it"
    mine = summary.seen.reservation(status.reservation)
    if mine is not None and mine.yields_to:
        return f"{status.because}; its nodes go to another job"
    if status.code == Code.REGROWING:
        return f"{status.because}; asking for nodes again"
    if status.code == Code.WORKERS_REJECTED:
        return f"{status.because}; asking again in {pause_seconds:.0f} s, the nodes are free for others meanwhile"
    if bad := unfit_nodes(summary):
        return f"{status.because}; node {min(bad)} can't be used again, asking for others"
    if pause_seconds > HOLD_SECONDS_MAX:
        return f"{status.because}; the nodes are free for others meanwhile"
    return None


def rejected(summary: WorkerSummary) -> str:
    """Return why a starting gang should give its nodes back; empty unless a worker was refused for too long."""
    for worker in summary.rejected:
        if worker.rejection is Rejection.TEMPORARY and summary.seen.now - worker.since >= REJECTED_SECONDS:
            return f"{worker.id} can't be created: {worker.reason}"
    return ""


def _rejected_backoff_seconds(summary: WorkerSummary) -> float:
    """Doubled with each attempt in a row that was refused; the one that ends now is the last of them."""
    before = list(takewhile(lambda attempt: attempt.outcome == "rejected", reversed(summary.status.attempts[:-1])))
    most = summary.seen.spec.recovery.backoff_seconds_max
    return min(most, REJECTED_BACKOFF_SECONDS * 2.0 ** min(len(before), 16))


def own_failure(status: JobStatus) -> Failure | None:
    """The failure of the attempt that is still open."""
    failure = status.last_failure
    return failure if failure and failure.attempt == status.attempt and not between_attempts(status) else None


def progressed(summary: WorkerSummary) -> bool:
    """The current attempt made a new commit."""
    return summary.committed_step > summary.status.resume_step


def checkpoint_status(summary: WorkerSummary) -> CheckpointStatus | None:
    """The newest commit in words of the status. Only a fresh look may show an older one than before (it was found
    corrupt, or somebody removed it); a cached one lags.
    """
    committed, previous = summary.seen.committed, summary.status.checkpoint
    if committed is None or (previous is not None and committed.step < previous.step and not summary.seen.fresh):
        return previous
    if previous is not None and previous.step == committed.step and previous.best_step == committed.best_step:
        return previous
    return CheckpointStatus.model_construct(
        step=committed.step, committed_at=committed.at, uri=summary.seen.checkpoint_uri, best_step=committed.best_step
    )


def released(status: JobStatus) -> dict[str, Any]:
    """Give the nodes back: from now on nobody can use the reservation of this number, so it may be dropped. What the
    last lives of the attempt's workers were stays, or those that are still to be swept would look newer than it.
    """
    return {"gang": GangStatus(incarnations=status.gang.incarnations), "reservation": status.reservation + 1}


def unfit_nodes(summary: WorkerSummary) -> frozenset[str]:
    """Return those of the gang's nodes on which the next attempt should not start."""
    status, nodes = summary.status, set(summary.gang.nodes)
    if summary.seen.spec.gang.scheduler.kind != "builtin":
        return frozenset(nodes & set(summary.seen.nodes_unfit))  # another scheduler keeps its own away from the others
    bad = set(summary.seen.nodes_unfit) | {entry.node for entry in status.excluded_nodes}
    bad |= {s.node for s in current_signals(summary.seen) if s.kind in LEAVING and s.node}
    failure = status.last_failure
    if failure is not None and failure.attempt == status.attempt and failure.cause in FREE and failure.node:
        bad.add(failure.node)  # it was taken away once and may be again
    return frozenset(nodes & bad)


def _closed(
    summary: WorkerSummary, failure: Failure | None, restarting: bool, ends_as: Phase | None, because: str
) -> dict[str, Any]:
    """Return the changes that close the attempt. A failure is charged even if the user stopped the job since."""
    seen, status = summary.seen, summary.status
    updates: dict[str, Any] = {"checkpoint": checkpoint_status(summary), "suspicion": None}
    if between_attempts(status):
        return updates
    made_progress = progressed(summary)
    updates["attempts"] = replace_last(
        status.attempts,
        ended_at=seen.now,
        nodes=status.attempts[-1].nodes[:NODES_KEPT],
        cause=failure.cause if failure else None,
        failed_step=failure.step if failure else None,
        outcome=_outcome(status, ends_as, failure),
        message=failure.message if failure else because,
    )
    if failure is None:
        if made_progress:
            updates["restarts"] = status.restarts.model_copy(update={"without_progress": 0})
        return updates
    faults, excluded = charge_failed_node(seen.spec, status, failure, seen.now)
    return updates | {
        "restarts": charge(seen.spec, status.restarts, failure, made_progress, seen.now, restarting),
        "preemptions_in_a_row": preemptions_in_a_row(status.preemptions_in_a_row, failure),
        "node_faults": faults,
        "excluded_nodes": excluded,
    }


def _outcome(status: JobStatus, ends_as: Phase | None, failure: Failure | None) -> str:
    if failure is not None:
        return "preempted" if failure.cause in FREE else "failed"
    if status.code == Code.WORKERS_REJECTED:
        return "rejected"
    return _OUTCOMES.get(ends_as, "resized") if ends_as else "resized"


def _remove(summary: WorkerSummary, worker: ObservedWorker, grace: float, overdue: bool) -> RemoveWorker | None:
    lost = worker.state is WorkerState.UNREACHABLE and summary.seen.now - worker.since >= UNREACHABLE_SECONDS
    if lost or overdue:
        return RemoveWorker(worker.id, 0.0)
    if worker.removing:
        return None
    return RemoveWorker(worker.id, 0.0 if worker.state is WorkerState.EXITED else grace)


def _with_step(summary: WorkerSummary, failure: Failure) -> Failure:
    step = last_step(summary.beat) if summary.beat is not None else None
    if failure.step is not None or step is None:
        return failure
    return failure.model_copy(update={"step": step})
