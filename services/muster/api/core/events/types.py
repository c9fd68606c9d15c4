"""The types of events, and which follow from two successive statuses. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from muster.words.status import LIVING, Attempt, JobStatus, Phase


class EventType(StrEnum):
    JOB_CREATED = "job.created"
    JOB_IMPORTED = "job.imported"  # made in the cluster by other means than this API
    JOB_SUSPEND_REQUESTED = "job.suspend_requested"
    JOB_RESUME_REQUESTED = "job.resume_requested"
    JOB_CANCEL_REQUESTED = "job.cancel_requested"
    JOB_QUEUED = "job.queued"
    JOB_WAITING = "job.waiting"  # still waiting, for another reason
    JOB_STARTING = "job.starting"
    JOB_RUNNING = "job.running"
    JOB_SUSPECTED = "job.suspected"  # something looks wrong with its gang, and is being watched
    JOB_RESTARTING = "job.restarting"
    JOB_STOPPING = "job.stopping"
    JOB_SUSPENDED = "job.suspended"
    JOB_SUCCEEDED = "job.succeeded"
    JOB_FAILED = "job.failed"
    JOB_CANCELLED = "job.cancelled"
    JOB_DELETED = "job.deleted"
    JOB_CHANGED = "job.changed"  # a phase that this version does not know
    ATTEMPT_STARTED = "attempt.started"
    ATTEMPT_RUNNING = "attempt.running"  # its first step is done
    ATTEMPT_SUCCEEDED = "attempt.succeeded"
    ATTEMPT_FAILED = "attempt.failed"
    ATTEMPT_SUSPENDED = "attempt.suspended"
    ATTEMPT_CANCELLED = "attempt.cancelled"
    ATTEMPT_PREEMPTED = "attempt.preempted"
    ATTEMPT_RESIZED = "attempt.resized"  # nothing failed: it goes on with more nodes
    ATTEMPT_REJECTED = "attempt.rejected"  # a quota or the platform lets its workers not exist
    CHECKPOINT_COMMITTED = "checkpoint.committed"
    EVALUATION_COMPLETED = "evaluation.completed"
    NODE_EXCLUDED = "node.excluded"
    CONDITION_CHANGED = "condition.changed"  # a straggler, waiting for data, an overdue commit, a skipped batch


@dataclass(frozen=True)
class NewEvent:
    """An event before it has a number."""

    type: EventType
    at: float
    message: str
    attempt: int | None = None
    data: dict[str, Any] = field(default_factory=dict)


_UNSEEN = ("Created", "Submitted")  # the operator has not looked at the job yet
_SUSPECTED = ("Stalling", "WouldRestart")
_OF_PHASES = frozenset({"Suspended", "Running", "Restarting", "Complete", "Failed"})
_WAITING = (Phase.QUEUED, Phase.RESTARTING, Phase.SUSPENDED)


def events_between(old: JobStatus, new: JobStatus, at: float) -> tuple[NewEvent, ...]:
    """Return the events between two statuses of a job, in the order in which they must have happened.

    The newer one was written `at` so many seconds since the epoch.
    """
    return (
        *_attempts(old, new, at),
        *_progress(old, new, at),
        *_checkpoint(old, new, at),
        *_ended_attempts(old, new, at),
        *_nodes(old, new, at),
        *_conditions(old, new, at),
        *_phase(old, new, at),
    )


def _attempts(old: JobStatus, new: JobStatus, at: float) -> tuple[NewEvent, ...]:
    old_attempts = {attempt.number: attempt for attempt in old.attempts}
    events: list[NewEvent] = []
    for attempt in new.attempts:
        before = old_attempts.get(attempt.number)
        if before is None and attempt.number > old.attempt:
            events.append(_started(attempt))
        if attempt.first_step_at is not None and (before is None or before.first_step_at is None):
            seconds = attempt.first_step_at - attempt.created_at
            message = f"attempt {attempt.number} did its first step after {seconds:.1f} s"
            events.append(
                NewEvent(
                    EventType.ATTEMPT_RUNNING, attempt.first_step_at, message, attempt.number, {"seconds": seconds}
                )
            )
    if new.attempt > old.attempt and new.attempt not in {attempt.number for attempt in new.attempts}:
        data = {"resumeStep": new.resume_step, "nodes": list(new.gang.nodes)}
        events.append(
            NewEvent(EventType.ATTEMPT_STARTED, at, _start_message(new.attempt, new.resume_step), new.attempt, data)
        )
    return tuple(events)


def _started(attempt: Attempt) -> NewEvent:
    data = {"resumeStep": attempt.resume_step, "nodes": list(attempt.nodes), "worldSize": attempt.world_size}
    message = _start_message(attempt.number, attempt.resume_step)
    return NewEvent(EventType.ATTEMPT_STARTED, attempt.created_at, message, attempt.number, data)


def _start_message(number: int, resume_step: int) -> str:
    return f"attempt {number} starts " + (
        f"from the checkpoint of step {resume_step}" if resume_step else "from the beginning"
    )


def _ended_attempts(old: JobStatus, new: JobStatus, at: float) -> tuple[NewEvent, ...]:
    ended_before = {attempt.number for attempt in old.attempts if attempt.outcome not in LIVING}
    return tuple(
        _ended(attempt, new, at)
        for attempt in new.attempts
        if attempt.outcome not in LIVING and attempt.number not in ended_before
    )


def _ended(attempt: Attempt, status: JobStatus, at: float) -> NewEvent:
    data: dict[str, Any] = {
        "cause": attempt.cause,
        "lastStep": attempt.last_step,
        "lostSteps": attempt.lost_steps,
        "seconds": attempt.seconds,
    }
    failure = status.last_failure
    if failure is not None and failure.attempt == attempt.number:
        data |= {key: value for key in _FAILURE_KEYS if (value := getattr(failure, key)) is not None}
        if failure.exit_code is not None:
            data["exitCode"] = failure.exit_code
    kind = EventType(f"attempt.{attempt.outcome}")
    message = attempt.message or f"attempt {attempt.number} {attempt.outcome}"
    return NewEvent(kind, attempt.ended_at or at, message, attempt.number, data)


_FAILURE_KEYS = ("worker", "rank", "node")


def _progress(old: JobStatus, new: JobStatus, at: float) -> tuple[NewEvent, ...]:
    if new.progress is None or new.progress.evaluation_loss is None:
        return ()
    step, loss = new.progress.evaluation_step, new.progress.evaluation_loss
    if old.progress is not None and (old.progress.evaluation_step, old.progress.evaluation_loss) == (step, loss):
        return ()
    step = new.progress.step if step is None else step
    message = f"evaluation loss {loss:.4f} at step {step}"
    return (NewEvent(EventType.EVALUATION_COMPLETED, at, message, new.attempt or None, {"step": step, "loss": loss}),)


def _checkpoint(old: JobStatus, new: JobStatus, at: float) -> tuple[NewEvent, ...]:
    now, before = new.checkpoint, old.checkpoint
    if now is None or (before is not None and before.step == now.step and before.committed_at == now.committed_at):
        return ()
    data = {"step": now.step, "uri": now.uri, "best": now.best_step == now.step}
    message = f"the checkpoint of step {now.step} is saved"
    return (NewEvent(EventType.CHECKPOINT_COMMITTED, now.committed_at, message, new.attempt or None, data),)


def _nodes(old: JobStatus, new: JobStatus, at: float) -> tuple[NewEvent, ...]:
    before = {(node.node, node.until) for node in old.excluded_nodes}
    return tuple(
        NewEvent(
            EventType.NODE_EXCLUDED,
            at,
            f"{node.node} is avoided: {node.why}",
            new.attempt or None,
            {"node": node.node, "until": node.until},
        )
        for node in new.excluded_nodes
        if (node.node, node.until) not in before
    )


def _conditions(old: JobStatus, new: JobStatus, at: float) -> tuple[NewEvent, ...]:
    """Return the events of changed conditions, except those that only repeat the phase."""
    before = {condition.type: (condition.status, condition.message) for condition in old.conditions}
    return tuple(
        NewEvent(
            EventType.CONDITION_CHANGED,
            at,
            f"{condition.type} is {condition.status}: {condition.message}",
            new.attempt or None,
            {"condition": condition.type, "status": condition.status, "reason": condition.reason},
        )
        for condition in new.conditions
        if condition.type not in _OF_PHASES
        and before.get(condition.type, ("False", "")) != (condition.status, condition.message)
        and not (condition.status == "False" and condition.type not in before)
    )


def _phase(old: JobStatus, new: JobStatus, at: float) -> tuple[NewEvent, ...]:
    if new.code in _UNSEEN:
        return ()
    data, attempt = {"code": new.code}, new.attempt or None
    if new.phase != old.phase:
        kind = EventType(f"job.{new.phase.lower()}")
        return (NewEvent(kind, new.since or at, new.because, attempt, data | {"from": old.phase}),)
    if new.phase in _WAITING and new.code != old.code:
        kind = EventType.JOB_QUEUED if old.code in _UNSEEN else EventType.JOB_WAITING
        return (NewEvent(kind, at, new.because, attempt, data),)
    if new.code != old.code and new.code in _SUSPECTED:
        return (NewEvent(EventType.JOB_SUSPECTED, at, new.because, attempt, data),)
    return ()
