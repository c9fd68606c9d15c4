"""Decision about an evaluation: which checkpoints are evaluated now, and whether it has ended. Pure.

The rows are the only memory, so the decision after a crash is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from muster.words.status import Phase
from muster.words.text import plural

REFUSED = "Refused"


@dataclass(frozen=True)
class EvaluationRun:
    """The evaluation of one checkpoint: its job's phase, or REFUSED where there is none."""

    step: int
    phase: str

    @property
    def over(self) -> bool:
        """Return whether nothing comes of it any more."""
        return self.phase == REFUSED or (self.phase in list(Phase) and Phase(self.phase).terminal)


@dataclass(frozen=True)
class EvaluationState:
    """State of an evaluation. `target` is the name of the job whose checkpoints are evaluated, and `target_ended` says
    whether no more of them come. `checkpoints` are those that it has now, each with whether it is the best; None where
    they can't be listed."""

    each: Literal["kept", "best", "last"] | int
    target: str
    target_ended: bool
    checkpoints: Sequence[tuple[int, bool]] | None
    runs: Sequence[EvaluationRun]
    cancelled: bool = False
    suspended: bool = False


@dataclass(frozen=True)
class EvaluationDecision:
    """The steps whose evaluations start now, and the phase with its reason."""

    starts: tuple[int, ...]
    phase: Phase
    because: str


def decide(seen: EvaluationState, hindrance: str = "") -> EvaluationDecision:
    """Decide about an evaluation. `hindrance` is what kept the last ones from starting."""
    live = [run for run in seen.runs if not run.over]
    counts = _counts(seen, len(live))
    if seen.cancelled:
        phase = Phase.STOPPING if live else Phase.CANCELLED
        return EvaluationDecision((), phase, f"the user cancelled the job; {counts}")
    starts = _due(seen)
    if seen.suspended and (starts or not seen.target_ended):
        return EvaluationDecision((), Phase.RUNNING, f"suspended: no more evaluations start; {counts}")
    if hindrance:
        counts += f"; {hindrance}"
    more_may_come = not seen.target_ended and not (isinstance(seen.each, int) and seen.runs)
    if starts or live or more_may_come or seen.checkpoints is None:
        more = "" if seen.target_ended else f"; job {seen.target} has not ended"
        return EvaluationDecision(starts, Phase.RUNNING, counts + more)
    if not seen.runs:
        which = f"checkpoint of step {seen.each}" if isinstance(seen.each, int) else "checkpoint to evaluate"
        return EvaluationDecision((), Phase.FAILED, f"job {seen.target} has ended and has no {which}")
    good = all(run.phase == Phase.SUCCEEDED for run in seen.runs)
    return EvaluationDecision((), Phase.SUCCEEDED if good else Phase.FAILED, counts)


def _due(seen: EvaluationState) -> tuple[int, ...]:
    """The steps that are to be evaluated and are not yet, ascending."""
    begun = {run.step for run in seen.runs}
    steps = [step for step, _ in seen.checkpoints or ()]
    if seen.each == "kept":
        return tuple(sorted(set(steps) - begun))
    if isinstance(seen.each, int):
        return (seen.each,) if seen.each in steps and not begun else ()
    if not seen.target_ended or begun or not steps:  # what is the best, or the last, is decided once
        return ()
    best = max((step for step, is_best in seen.checkpoints or () if is_best), default=max(steps))
    return (best if seen.each == "best" else max(steps),)


def _counts(seen: EvaluationState, live: int) -> str:
    good = sum(run.phase == Phase.SUCCEEDED for run in seen.runs)
    failed = len(seen.runs) - live - good
    words = f"{good} of {plural(len(seen.runs), 'checkpoint')} of job {seen.target} evaluated"
    return words + (f", {live} to come" if live else "") + (f", {failed} failed" if failed else "")
