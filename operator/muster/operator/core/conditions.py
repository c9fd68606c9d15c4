"""The conditions of a TrainingJob, in the habits of Kubernetes: `kubectl wait --for=condition=Complete` works."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from muster.contract.status import Condition, Phase

_YEAR_9999 = 253_402_300_799  # the last second that a date can say; clocks that jump may ask for more

# Cancelled is a way of not completing: whoever waits for the end waits for Complete or Failed, as for a batch Job.
_TRUE_IN: dict[str, frozenset[Phase]] = {
    "Suspended": frozenset({Phase.SUSPENDED}),
    "Running": frozenset({Phase.RUNNING}),
    "Restarting": frozenset({Phase.RESTARTING}),
    "Complete": frozenset({Phase.SUCCEEDED}),
    "Failed": frozenset({Phase.FAILED, Phase.CANCELLED}),
}


# Only of a gang that trains, and over with it (core/findings.py).
FINDINGS = ("Straggler", "DataBound", "CheckpointOverdue", "BatchesSkipped")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a condition should say."""

    type: str
    true: bool
    reason: str
    message: str


def with_findings(
    before: tuple[Condition, ...], found: tuple[Finding | None, ...], now: float, generation: int
) -> tuple[Condition, ...]:
    """The very same tuple if nothing changes. A finding appears when it first becomes true."""
    known = {condition.type: condition for condition in before}
    changed = {}
    for finding in found:
        if finding is None or (finding.type not in known and not finding.true):
            continue
        old = known.get(finding.type)
        value: Literal["True", "False"] = "True" if finding.true else "False"
        if old is not None and (old.status, old.message) == (value, finding.message):
            continue
        if old is not None and old.status == value == "False":
            continue  # in the words of its last change
        moved = old is None or old.status != value
        changed[finding.type] = Condition.model_construct(
            type=finding.type,
            status=value,
            reason=finding.reason,
            message=finding.message,
            last_transition_time=_stamp(now) if moved or old is None else old.last_transition_time,
            observed_generation=generation,
        )
    return tuple((known | changed).values()) if changed else before


def conditions(
    before: tuple[Condition, ...], phase: Phase, code: str, because: str, now: float, generation: int
) -> tuple[Condition, ...]:
    """A condition appears when it first becomes true and stays from then on, in the words of its last change."""
    known = {condition.type: condition for condition in before}
    after = []
    for kind, phases in _TRUE_IN.items():
        old, true = known.pop(kind, None), phase in phases
        if old is None and not true:
            continue
        value: Literal["True", "False"] = "True" if true else "False"
        if old is not None and old.status == value:
            after.append(old)
            continue
        reason = "Resumed" if kind == "Suspended" and not true else code
        after.append(
            Condition.model_construct(
                type=kind,
                status=value,
                reason=reason,
                message=because,
                last_transition_time=_stamp(now),
                observed_generation=generation,
            )
        )
    rest = tuple(known.values())
    if phase is not Phase.RUNNING:
        over = tuple(Finding(kind, False, "NotTraining", because) for kind in FINDINGS)
        rest = with_findings(rest, over, now, generation)
    return (*after, *rest)


def _stamp(now: float) -> str:
    return datetime.fromtimestamp(min(max(0.0, now), _YEAR_9999), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
