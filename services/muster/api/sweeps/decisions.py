"""Decision about a sweep: which trials start, which stop, and whether it has ended. Pure, so that it can be proved.

The rows are the only memory, so the decision after a crash is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from muster.recipe.evaluation_config import Better
from muster.recipe.sweep import Asha, SweepPhase
from muster.words.base import Many, Record


class MetricValue(Record):
    """The sweep's metric after a step."""

    step: int
    value: float


class TrialRank(MetricValue):
    """Rank of a trial among those that had reached this step: `place` 1 is the best of `of`."""

    place: int
    of: int
    goes_on: bool


class TrialResults(Record):
    """Results of a trial. Evaluations up to `read_step` are included."""

    read_step: int = 0
    last: MetricValue | None = None
    best: MetricValue | None = None
    rungs: Many[TrialRank] = ()


@dataclass(frozen=True)
class SweepRules:
    """Rules of a sweep, from its document: how many trials there are, and how they are judged."""

    trials: int
    concurrency: int
    better: Better
    stopping: Asha | None = None


@dataclass(frozen=True)
class SweepTrial:
    """A trial that was started. It is `live` until its job has ended; `stopped` says why it was asked to stop, if it
    was; `fresh` are evaluations that `results` do not know yet, by step."""

    number: int
    live: bool
    results: TrialResults = field(default_factory=TrialResults)
    stopped: str | None = None
    fresh: tuple[MetricValue, ...] = ()


@dataclass(frozen=True)
class SweepDecision:
    """`trials` with what was fresh taken over, and `stopped` where they shall stop; the numbers of those to start."""

    trials: tuple[SweepTrial, ...]
    starts: tuple[int, ...]
    phase: SweepPhase


def decide(rules: SweepRules, trials: Sequence[SweepTrial], cancelled: bool = False) -> SweepDecision:
    """Decide about a sweep. `trials` are those that were started, 1, 2, 3 … without a gap."""
    by_number = {trial.number: trial for trial in trials}
    arrived = sorted(((each.step, number) for number, trial in by_number.items() for each in trial.fresh))
    for step, number in arrived:
        by_number[number] = _taken_over(rules, by_number, by_number[number], step)
    after = tuple(replace(by_number[number], fresh=()) for number in sorted(by_number))
    live = sum(trial.live for trial in after)
    phase = _phase(rules, after, live, cancelled)
    free = max(0, rules.concurrency - live) if phase == SweepPhase.RUNNING else 0
    first = len(after) + 1
    return SweepDecision(after, tuple(range(first, min(first + free, rules.trials + 1))), phase)


def _phase(rules: SweepRules, trials: Sequence[SweepTrial], live: int, cancelled: bool) -> SweepPhase:
    if cancelled:
        return SweepPhase.STOPPING if live else SweepPhase.CANCELLED
    if live or len(trials) < rules.trials:
        return SweepPhase.RUNNING
    return SweepPhase.SUCCEEDED if best_of(rules.better, trials) else SweepPhase.FAILED


def _taken_over(rules: SweepRules, by_number: dict[int, SweepTrial], trial: SweepTrial, step: int) -> SweepTrial:
    """The trial with its fresh evaluation of that step, and the verdict where the step is one of a rung."""
    measured = next(each for each in trial.fresh if each.step == step)
    results, stopped = trial.results, trial.stopped
    if step <= results.read_step:
        return trial
    best = results.best
    if best is None or is_better(rules.better, measured.value, best.value):
        best = measured
    rungs = results.rungs
    if rules.stopping is not None and stopped is None and is_rung(rules.stopping, step):
        others = [rung.value for each in by_number.values() for rung in each.results.rungs if rung.step == step]
        rung = judged(rules.stopping, rules.better, measured, others)
        rungs = (*rungs, rung)
        if trial.live and not rung.goes_on:
            stopped = f"place {rung.place} of {rung.of} at step {step}; {places(rules.stopping, rung.of)} went on"
    updated = results.model_copy(update={"read_step": step, "last": measured, "best": best, "rungs": rungs})
    return replace(trial, results=updated, stopped=stopped)


def judged(asha: Asha, better: Better, measured: MetricValue, others: Sequence[float]) -> TrialRank:
    """The verdict on a trial, `others` being the values of those that came to this step before it. Equals share one."""
    place = 1 + sum(is_better(better, other, measured.value) for other in others)
    of = len(others) + 1
    return TrialRank(step=measured.step, value=measured.value, place=place, of=of, goes_on=place <= places(asha, of))


def places(asha: Asha, of: int) -> int:
    """Return how many of `of` trials continue: one in `factor`, and always at least the best one."""
    return max(1, of // asha.factor)


def is_rung(asha: Asha, step: int) -> bool:
    """Return whether trials are judged after this step: minSteps, minSteps × factor, minSteps × factor² …"""
    rung = asha.min_steps
    while rung < step:
        rung *= asha.factor
    return rung == step


def is_better(better: Better, one: float, other: float) -> bool:
    return one < other if better == "lower" else one > other


def best_of(better: Better, trials: Sequence[SweepTrial]) -> SweepTrial | None:
    """The trial with the best value; of equals the first. None where none has one."""
    leader: SweepTrial | None = None
    for trial in trials:
        mine, best = trial.results.best, leader.results.best if leader is not None else None
        if mine is not None and (best is None or is_better(better, mine.value, best.value)):
            leader = trial
    return leader
