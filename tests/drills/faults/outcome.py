"""What became of a fault, read from the records that operator, launcher and ranks wrote themselves."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from tests.drills.faults.house import Job
from tests.drills.faults.kinds import Kind

from muster.words.signals import Cause
from muster.words.status import JobStatus, Phase

LEDGER_ERROR_MAX = 0.005
_CAUSE_OF_FINDING = {"BatchesSkipped": Cause.NUMERIC}
_ENDING = (Phase.RESTARTING, Phase.STOPPING)


@dataclass
class Outcome:
    """One fault. Seconds are from the fault; lost_steps were trained twice; ledger_error is relative.

    pause: the longest time without a step from the fault on. noticed_after: steps until a condition said so.
    faults_found: what speaks against it, one line each; empty: all as it ought to be.
    """

    kind: str
    says: str
    injected: str
    assigned: str
    detected: float | None
    recovered: float | None
    pause: float
    lost_steps: int
    attempts: int
    phase: str
    ledger_error: float
    orphans: int
    message: str = ""
    noticed_after: int | None = None
    faults_found: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.faults_found

    def document(self) -> dict[str, Any]:
        return asdict(self)


def judge(kind: Kind, job: Job, at: float, status: JobStatus, reference: dict[int, float]) -> Outcome:
    """After the job's end, or after the drill's patience with it."""
    first = next((entry for entry in status.attempts if entry.number == 1), None)
    assigned = first.cause if first else None
    if assigned is None and status.last_failure is not None and status.last_failure.attempt == 1:
        assigned = status.last_failure.cause
    detected, steps = _detected(job, at), None
    if assigned is None and (found := _found(job, at, kind.finding)) is not None:
        detected, steps = found - at, sum(at < record.at <= found for record in job.records(1))
        assigned = _CAUSE_OF_FINDING.get(kind.finding)
    after = job.first_step_after(1)
    created, finished = job.created_at(), status.finished_at
    booked = sum(status.ledger.seconds.values())
    outcome = Outcome(
        kind=kind.name,
        says=kind.says,
        injected=str(kind.cause or "none"),
        assigned=str(assigned or "none"),
        detected=detected,
        recovered=after - at if after is not None else None,
        pause=_longest_pause(job, at),
        lost_steps=_trained_twice(job, status),
        attempts=status.attempt,
        phase=str(status.phase),
        ledger_error=abs(booked - (finished - created)) / (finished - created) if finished else 1.0,
        orphans=job.left_running() if status.phase.terminal else 0,
        message=status.last_failure.message if status.last_failure else "",
        noticed_after=steps,
    )
    outcome.faults_found = list(_complaints(kind, job, outcome, reference))
    return outcome


def not_done(kind: Kind, why: str) -> Outcome:
    """The fault could not be done, or its end not be seen."""
    injected = str(kind.cause or "none")
    outcome = Outcome(kind.name, kind.says, injected, "none", None, None, 0.0, 0, 0, "", 1.0, 0)
    outcome.faults_found = [why]
    return outcome


def _complaints(kind: Kind, job: Job, outcome: Outcome, reference: dict[int, float]):  # type: ignore[no-untyped-def]
    if outcome.injected != outcome.assigned:
        yield f"judged {outcome.assigned}, not {outcome.injected}"
    if kind.attempts not in (None, outcome.attempts):
        yield f"{outcome.attempts} attempts, not {kind.attempts}"
    if kind.finding and outcome.noticed_after is None:
        yield f"no condition {kind.finding} was set"
    if outcome.phase != kind.ends:
        yield f"the job is {outcome.phase}, not {kind.ends}"
        return
    if kind.ends == Phase.SUCCEEDED:
        losses = job.losses()
        if sorted(losses) != list(range(1, job.steps + 1)):
            yield f"steps are missing: {len(losses)} of {job.steps} were trained"
        elif kind.same_losses and (other := [step for step in losses if losses[step] != reference[step]]):
            yield f"another loss than without a fault from step {other[0]} on"
    if outcome.ledger_error > LEDGER_ERROR_MAX:
        yield f"the goodput account is {outcome.ledger_error:.1%} off the wall clock"
    if outcome.orphans:
        yield f"{outcome.orphans} processes outlived the job"


def _detected(job: Job, at: float) -> float | None:
    """When the operator wrote down that the attempt has ended."""
    ended = (c.at for c in job.changes() if c.at >= at and c.status.attempt == 1 and c.status.phase in _ENDING)
    healthy_end = job.status().phase == Phase.SUCCEEDED and job.status().attempt == 1
    return None if healthy_end else next((moment - at for moment in ended), None)


def _found(job: Job, at: float, finding: str) -> float | None:
    """When the condition was first seen to be true."""
    for change in job.changes():
        told = any(condition.type == finding and condition.status == "True" for condition in change.status.conditions)
        if told and change.at >= at:
            return change.at
    return None


def _longest_pause(job: Job, at: float) -> float:
    moments = sorted(record.at for n in range(1, job.status().attempt + 1) for record in job.records(n))
    before = [moment for moment in moments if moment <= at][-1:]
    line = before + [moment for moment in moments if moment > at]
    return max((later - sooner for sooner, later in pairwise(line)), default=0.0)


def _trained_twice(job: Job, status: JobStatus) -> int:
    trained = [record.step for n in range(1, status.attempt + 1) for record in job.records(n)]
    return len(trained) - len(set(trained))
