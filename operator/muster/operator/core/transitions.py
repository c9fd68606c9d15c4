"""Changes of a status: always through `transition`, which keeps goodput, attempt history and conditions."""

from __future__ import annotations

import math
from typing import Any

from muster.operator.core.codes import Code
from muster.operator.core.conditions import phase_conditions
from muster.operator.core.decision import ACTIONS_MAX, Action, JobDecision
from muster.operator.core.goodput import book, lose, opened, rest_of_phase
from muster.operator.core.worker_summary import WorkerSummary
from muster.operator.pacing import MORE_SECONDS, PROGRESS_SECONDS
from muster.words.signals import Heartbeat
from muster.words.status import Attempt, JobStatus, Phase, Progress

ATTEMPTS_KEPT = 50
NODES_KEPT = 16  # of an attempt that is over; a status must fit in etcd


def transition(
    summary: WorkerSummary, code: Code, because: str, phase: Phase | None = None, **updates: Any
) -> JobStatus:
    """The status after this change; the very same object if nothing changes.

    Time since the last change is booked under the phase that it was spent in.
    """
    seen, status = summary.seen, summary.status
    phase = phase or status.phase
    updates |= {"phase": phase, "code": code.value, "because": because}
    updates["observed_generation"] = max(seen.generation, status.observed_generation)
    fields = status.__dict__
    changed = {key: value for key, value in updates.items() if value is not fields[key] and value != fields[key]}
    if not changed:
        return status
    if phase != status.phase:
        changed["since"] = seen.now
        # The last chance to tell the attempt's last step: when its gang is gone, so are the heartbeats.
        if "progress" not in changed and (newest := current_progress(summary)) is not None:
            changed["progress"] = newest
    changed |= _books(summary, phase, changed.get("attempts", status.attempts))
    if {"phase", "code"} & changed.keys():
        changed["conditions"] = phase_conditions(
            changed.get("conditions", status.conditions), phase, code.value, because, seen.now, seen.generation
        )
    return status.model_copy(update=changed)


def write_or_act(
    summary: WorkerSummary,
    status: JobStatus,
    actions: tuple[Action, ...] = (),
    wake_after: float | None = None,
    trusts_absence: bool = False,
) -> JobDecision:
    """A changed status is written, and nothing else is done; if it is the one that is there, its actions are due."""
    if status is not summary.status:
        return JobDecision(status, (), None, status.code, status.because, trusts_absence)
    wake_after = MORE_SECONDS if len(actions) >= ACTIONS_MAX else wake_after
    return JobDecision(status, actions, wake_after, status.code, status.because, trusts_absence)


def transition_with_progress(
    summary: WorkerSummary, code: Code, because: str, phase: Phase | None = None, **updates: Any
) -> JobStatus:
    """Return the `transition` that also reports progress, if there is enough news of it."""
    if (phase not in (None, summary.status.phase) or _worth_a_write(summary)) and (
        progress := current_progress(summary)
    ):
        updates["progress"] = progress
    return transition(summary, code, because, phase, **updates)


def between_attempts(status: JobStatus) -> bool:
    """The last attempt is over and its gang is gone (also true before the first)."""
    return not status.attempts or status.attempts[-1].ended_at is not None


def awaits_scheduler(status: JobStatus) -> bool:
    """Return whether another scheduler has not placed the gang of the current attempt yet."""
    return status.phase is Phase.STARTING and status.code == Code.AWAITING_SCHEDULER


def replace_last(attempts: tuple[Attempt, ...], **updates: Any) -> tuple[Attempt, ...]:
    return (*attempts[:-1], attempts[-1].model_copy(update=updates))


def current_progress(summary: WorkerSummary) -> Progress | None:
    """Return rank 0's last report on the training."""
    beat, before = summary.beat, summary.status.progress
    if beat is None:
        return None
    if beat.last_step is None and beat.first_step_at is not None and summary.seen.spec.program is not None:
        return _counted_progress(summary, beat)
    if beat.last_step is None:
        return _resumed_progress(summary.status, beat.step, summary.seen.now)
    if _is_old(summary.status, beat.last_step.step):
        return None
    step = beat.last_step
    evaluated = beat.last_evaluation or (step if step.evaluation_loss is not None else None)
    # Step 0 is an evaluation before the first step: nothing is known of the speed yet.
    left = max(0, step.steps - step.step) if step.steps is not None and step.step_seconds > 0 else None
    return Progress.model_construct(
        at=summary.seen.now,
        step=step.step,
        steps=step.steps,
        loss=_finite(step.loss),
        evaluation_loss=_finite(evaluated.evaluation_loss)
        if evaluated
        else (before.evaluation_loss if before else None),
        evaluation_step=evaluated.step if evaluated else (before.evaluation_step if before else None),
        values=dict(step.values),
        evaluation_values=dict(evaluated.evaluation_values)
        if evaluated
        else (before.evaluation_values if before else {}),
        tokens_per_second=_finite(step.tokens_per_second),
        mfu=_finite(step.mfu),
        eta_seconds=_finite(left * step.step_seconds) if left is not None else None,
    )


def _counted_progress(summary: WorkerSummary, beat: Heartbeat) -> Progress | None:
    """Return the progress of a program whose steps are counted from outside, and of which no more is known."""
    total = summary.seen.spec.program.steps if summary.seen.spec.program is not None else None
    if _is_old(summary.status, beat.step):
        return None
    resumed = summary.status.attempts[-1].resume_step if summary.status.attempts else 0
    more = beat.step - resumed - 1  # steps since the first one ended
    spent = beat.progressed_at - beat.first_step_at if beat.first_step_at is not None else 0.0
    left = max(0, total - beat.step) if total is not None else None
    return Progress.model_construct(
        at=summary.seen.now,
        step=beat.step,
        steps=total,
        eta_seconds=_finite(left * spent / more) if left is not None and more > 0 and spent > 0 else None,
    )


def last_step(beat: Heartbeat) -> int | None:
    """Return the newest step that this process has done, as it reported or as it was counted; None before the first."""
    if beat.last_step is not None:
        return beat.last_step.step
    return beat.step if beat.first_step_at is not None else None


def _resumed_progress(status: JobStatus, step: int, now: float) -> Progress | None:
    """Return the progress of a gang that has done no step itself yet: it resumes from a checkpoint of a later step than
    was ever reported, because its writer was gone before. If that was the last step, nothing more will be reported."""
    before, commit = status.progress, status.checkpoint
    if before is None or commit is None or not before.step < commit.step <= step:
        return None
    return before.model_copy(update={"at": now, "step": commit.step, "eta_seconds": None})


def _finite(value: float | None) -> float | None:
    """A status is JSON, which has no word for NaN; the loss of a diverged run must not keep it from being written."""
    return value if value is not None and math.isfinite(value) else None


def _worth_a_write(summary: WorkerSummary) -> bool:
    """Cheap, because it is asked in every pass over a running gang."""
    beat, before = summary.beat, summary.status.progress
    step = last_step(beat) if beat is not None else None
    if beat is None or step is None or before is None:
        return step is not None
    if beat.last_evaluation is not None and beat.last_evaluation.step != before.evaluation_step:
        return True  # rare, and an event for the history
    return before.step != step and not 0 <= summary.seen.now - before.at < PROGRESS_SECONDS


def _books(summary: WorkerSummary, phase: Phase, attempts: tuple[Attempt, ...]) -> dict[str, Any]:
    """Goodput account and attempt history at this moment; the lost work of an attempt that ends now is booked apart."""
    seen, status = summary.seen, summary.status
    if status.phase.terminal:
        return {}
    live = not between_attempts(status)
    beat = summary.beat if live else None
    ending = phase != Phase.RUNNING
    rest = rest_of_phase(status.phase, ending, between_attempts=not live, waiting=awaits_scheduler(status))
    account = opened(status.ledger, seen.created_at)
    booked = book(account, status.attempts[-1].seconds if live else {}, seen.now, rest, beat)
    if not live:
        return {"ledger": booked.account, "attempts": attempts}
    current = attempts[-1]
    updates: dict[str, Any] = {}
    if beat is not None and (step := last_step(beat)) is not None and not _is_old(status, step):
        updates["last_step"] = step
        updates["first_step_at"] = current.first_step_at or _first_step_at(beat)
    if current.ended_at is not None:
        current = reaching(current.model_copy(update=updates), summary.committed_step)
        updates["last_step"] = current.last_step
        booked, updates["lost_steps"] = lose(booked, current, summary.committed_step)
    updates["seconds"] = booked.attempt_seconds
    return {"ledger": booked.account, "attempts": replace_last(attempts, **updates)}


def reaching(attempt: Attempt, committed_step: int) -> Attempt:
    """The attempt with `last_step` at least its last commit.

    Workers that are evicted train on while they are asked to stop and commit then: steps that no heartbeat reported.
    """
    step = attempt.resume_step if attempt.last_step is None else attempt.last_step
    return attempt.model_copy(update={"last_step": committed_step}) if committed_step > step else attempt


def _first_step_at(beat: Heartbeat) -> float | None:
    """An older trainer does not say: then what it did last is the best estimate. Step 0 is only an evaluation."""
    step_at = beat.last_step.at if beat.last_step is not None and beat.last_step.step_seconds > 0 else None
    return step_at if beat.first_step_at is None else beat.first_step_at


def _is_old(status: JobStatus, step: int) -> bool:
    """A cached read may show an earlier heartbeat than the one before it did."""
    last = status.attempts[-1].last_step if status.attempts else None
    return last is not None and step < last
