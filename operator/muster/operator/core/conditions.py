"""The conditions of a TrainingJob, in the habits of Kubernetes: `kubectl wait --for=condition=Complete` works."""

from __future__ import annotations

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
        stamp = datetime.fromtimestamp(min(max(0.0, now), _YEAR_9999), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        after.append(
            Condition.model_construct(
                type=kind,
                status=value,
                reason=reason,
                message=because,
                last_transition_time=stamp,
                observed_generation=generation,
            )
        )
    return (*after, *known.values())
