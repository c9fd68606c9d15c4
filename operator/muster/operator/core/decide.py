"""Decision about one job: pure and total, with its rules in the order in which they matter."""

from __future__ import annotations

from collections.abc import Callable

from muster.operator.core.budgets import remaining_backoff_seconds
from muster.operator.core.causes import seconds_until_peer_report
from muster.operator.core.codes import GIVEN_UP, Code, code_of
from muster.operator.core.data_skips import data_skip
from muster.operator.core.decision import JobDecision, RemoveJob
from muster.operator.core.gang_rules import (
    deadline_left,
    failed,
    inconsistent_status,
    preempted,
    running,
    starting,
)
from muster.operator.core.observed import ObservedJob
from muster.operator.core.shutdown import (
    AWAIT_COMMITS_SECONDS,
    amend,
    await_commits,
    checkpoint_status,
    clear,
    close,
    end,
    finish,
    reason_not_to_resume,
    reason_to_release,
    requeue,
    stop,
    sweep,
)
from muster.operator.core.transitions import (
    ATTEMPTS_KEPT,
    between_attempts,
    reaching,
    transition,
    write_or_act,
)
from muster.operator.core.worker_summary import WorkerSummary, summarize_workers
from muster.operator.pacing import LOOK_SECONDS
from muster.words.status import STATUS_VERSION, Attempt, GangStatus, JobStatus, Phase
from muster.words.text import plural

Rule = Callable[[WorkerSummary], JobDecision | None]


def decide(seen: ObservedJob) -> JobDecision:
    """The first rule that has an opinion decides. Total: every state that a status can be in has its rule."""
    summary = summarize_workers(seen)
    for rule in RULES:
        if (decision := rule(summary)) is not None:
            return decision
    raise AssertionError(f"no rule for phase {seen.status.phase}")


def newer(summary: WorkerSummary) -> JobDecision | None:
    """A status in a form that we don't know: another, newer operator is responsible."""
    version = summary.status.schema_version
    if version <= STATUS_VERSION:
        return None
    because = (
        f"the status has schema version {version} and this operator knows {STATUS_VERSION}: not touched; "
        "upgrade the operator, or stop the older one if a newer one runs beside it"
    )
    return JobDecision(summary.status, code=Code.NEWER_STATUS, because=because)


def outdated(summary: WorkerSummary) -> JobDecision | None:
    """A status that an earlier release wrote is written in today's form first of all, also of a job that is over: the
    definition of today's TrainingJob may refuse every other change of an object whose status has another form.
    """
    if summary.status.schema_version >= STATUS_VERSION:
        return None
    return write_or_act(summary, summary.status.model_copy(update={"schema_version": STATUS_VERSION}))


def finished(summary: WorkerSummary) -> JobDecision | None:
    """A job that is over keeps sweeping, and goes when it is deleted or its time to live is up."""
    if not summary.status.phase.terminal:
        return None
    if not summary.empty:
        return write_or_act(summary, summary.status, sweep(summary, (*summary.mine, *summary.older)), LOOK_SECONDS)
    if summary.seen.deleting:
        return write_or_act(summary, summary.status, (RemoveJob(),), LOOK_SECONDS, trusts_absence=True)
    ttl = summary.seen.spec.ttl_seconds_after_finished
    if ttl is None:
        return write_or_act(summary, summary.status)
    left = (summary.status.finished_at or summary.seen.now) + ttl - summary.seen.now
    if left > 0:
        return write_or_act(summary, summary.status, wake_after=left)
    return write_or_act(summary, summary.status, (RemoveJob(),), LOOK_SECONDS, trusts_absence=True)


_HOLDING = (Phase.STARTING, Phase.RUNNING, Phase.RESTARTING)


def done(summary: WorkerSummary) -> JobDecision | None:
    """Decide about a gang whose workers all ended well: that counts, whatever else was requested meanwhile."""
    if not summary.all_done or summary.older or between_attempts(summary.status) or summary.seen.deleting:
        return None
    because = f"{summary.describe_gang} finished"
    return write_or_act(summary, finish(summary, because))


def user_request(summary: WorkerSummary) -> JobDecision | None:
    """The user (or a deadline) wants it to end. A stronger request replaces a weaker one, also while stopping."""
    seen, status = summary.seen, summary.status
    ends_as, code = status.ends_as, code_of(status.code) if status.phase is Phase.STOPPING else None
    if ends_as is Phase.SUCCEEDED:
        return None
    if seen.deleting:
        request = (Phase.CANCELLED, Code.DELETING, "the job was deleted")
    elif ends_as is Phase.CANCELLED or code in GIVEN_UP:
        return None
    elif seen.spec.cancel:
        request = (Phase.CANCELLED, Code.CANCELLING, seen.spec.cancel_reason or "the user cancelled the job")
    elif code is Code.DEADLINE_EXCEEDED:
        return None
    elif deadline_left(summary) <= 0:
        seconds = seen.spec.active_deadline_seconds
        request = (
            Phase.FAILED,
            Code.DEADLINE_EXCEEDED,
            f"the job was active for longer than its deadline of {seconds} s",
        )
    elif seen.spec.suspend and status.phase is not Phase.SUSPENDED:
        request = (Phase.SUSPENDED, Code.SUSPENDING, "the user suspended the job")
    elif seen.budget is not None and seen.budget.code == Code.MONTH_LIMIT and status.phase in _HOLDING:
        request = (Phase.SUSPENDED, Code.MONTH_LIMIT, seen.budget.because)
    else:
        return None
    if (ends_as, code) == request[:2]:
        return None
    return write_or_act(summary, stop(summary, *request))


def stopping(summary: WorkerSummary) -> JobDecision | None:
    """Clear the gang away, close the attempt when it is gone, and only then give the nodes back."""
    status, closed = summary.status, between_attempts(summary.status)
    if status.phase is not Phase.STOPPING and (status.phase is not Phase.RESTARTING or closed):
        return None
    failing = status.phase is Phase.RESTARTING or status.code in GIVEN_UP
    if failing and not closed and (better := amend(summary)) is not None:
        return write_or_act(summary, better)
    if failing and not closed and (patience := seconds_until_peer_report(summary)) > 0:
        return write_or_act(summary, summary.status, (), patience)
    if not summary.empty:
        return write_or_act(summary, summary.status, clear(summary), LOOK_SECONDS)
    return write_or_act(summary, end(summary) if closed else close(summary), trusts_absence=True)


def suspended(summary: WorkerSummary) -> JobDecision | None:
    if summary.status.phase is not Phase.SUSPENDED:
        return None
    if not summary.empty:
        return write_or_act(summary, summary.status, sweep(summary, (*summary.mine, *summary.older)), LOOK_SECONDS)
    if summary.seen.spec.suspend:
        return write_or_act(summary, summary.status)
    because = "the user resumed the job; asking for nodes"
    if summary.status.code == Code.MONTH_LIMIT:
        if summary.seen.budget is None or summary.seen.budget.code != Code.AWAITING_ADMISSION:
            return write_or_act(summary, summary.status)
        because = summary.seen.budget.because
    return write_or_act(
        summary,
        transition(summary, Code.AWAITING_ADMISSION, because, Phase.QUEUED, queued_at=summary.seen.now, retry_at=None),
    )


def queued(summary: WorkerSummary) -> JobDecision | None:
    """Decide about a job in the queue: start it when nodes are reserved for this very request."""
    seen, status = summary.seen, summary.status
    if status.phase is not Phase.QUEUED:
        return None
    if not summary.empty:
        return write_or_act(summary, summary.status, sweep(summary, (*summary.mine, *summary.older)), LOOK_SECONDS)
    pause = remaining_backoff_seconds(seen.spec.recovery, status.retry_at, seen.now)
    if pause > 0:
        return write_or_act(summary, summary.status, wake_after=pause)
    granted = seen.reservation(status.reservation)
    spent = seen.wait is not None and seen.wait.code == Code.MONTH_LIMIT  # another scheduler grants all the same
    if granted is not None and not spent:
        gang = GangStatus(
            wanted=len(granted.nodes),
            nodes=granted.nodes,
            pool=granted.pool,
            capacity=granted.capacity,
            instance_type=granted.instance_type,
        )
        if because := reason_not_to_resume(summary):
            return write_or_act(summary, await_commits(summary, because), trusts_absence=True)
        return write_or_act(summary, _start_attempt(summary, gang), trusts_absence=True)
    if seen.wait is not None:
        return write_or_act(summary, transition(summary, code_of(seen.wait.code), seen.wait.because))
    if status.code in (Code.CREATED, Code.BACKING_OFF):
        return write_or_act(summary, transition(summary, Code.AWAITING_ADMISSION, "in the queue; not yet considered"))
    return write_or_act(summary, summary.status)


def restart_pending(summary: WorkerSummary) -> JobDecision | None:
    """Decide about a RESTARTING job whose attempt is closed: after a pause, the next attempt starts on the same nodes,
    or the job returns to the queue."""
    seen, status = summary.seen, summary.status
    if status.phase is not Phase.RESTARTING:
        return None
    if not summary.empty:
        return write_or_act(summary, summary.status, sweep(summary, (*summary.mine, *summary.older)), LOOK_SECONDS)
    pause = remaining_backoff_seconds(seen.spec.recovery, status.retry_at, seen.now)
    if (because := reason_to_release(summary, pause)) is not None:
        return write_or_act(summary, requeue(summary, because), trusts_absence=True)
    if pause > 0:
        return write_or_act(summary, summary.status, wake_after=pause)
    if because := reason_not_to_resume(summary):
        if status.code == Code.AWAITING_COMMITS:
            return write_or_act(summary, await_commits(summary, because), trusts_absence=True)
        retry_at = seen.now + AWAIT_COMMITS_SECONDS
        waiting = transition(summary, Code.AWAITING_COMMITS, because, retry_at=retry_at)
        return write_or_act(summary, waiting, trusts_absence=True)
    return write_or_act(summary, _start_attempt(summary, status.gang), trusts_absence=True)


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
    preempted,
    starting,
    running,
)


def _start_attempt(summary: WorkerSummary, gang: GangStatus) -> JobStatus:
    """The next attempt. What it resumes from is chosen here, in the write that makes it exist."""
    seen, status = summary.seen, summary.status
    gang = gang.model_copy(update={"ready": 0, "incarnations": ()})
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
