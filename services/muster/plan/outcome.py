"""Judgement of a training that has succeeded: its best checkpoint, and what was odd about it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from muster.plan.oddities import oddities_of
from muster.plan.warnings import FEW_STEPS
from muster.recipe.training import TrainingConfig
from muster.words.status import JobStatus
from muster.words.text import loss, plural

# A share of a loss. A smaller change from one evaluation to another is mostly chance.
HARDLY = 0.02


def best_checkpoint(training: TrainingConfig, status: JobStatus, evaluations: Sequence[tuple[int, float]]) -> str:
    """Return the sentence on the best checkpoint; empty where there is none. `evaluations` are pairs of a step and its
    evaluation loss, in their order."""
    best = status.checkpoint.best_step if status.checkpoint is not None else None
    if best is None:
        return ""
    losses = dict(evaluations)
    if training.evaluation is None or training.evaluation.metric != "loss" or best not in losses:
        return f"The best checkpoint is step {best:,}."
    last, at_end = evaluations[-1]
    words = f"The best checkpoint is step {best:,} (evaluation {loss(losses[best])})"
    if last > best and at_end > losses[best] * (1 + HARDLY):
        return f"{words}; it overfits from there: the evaluation is {loss(at_end)} at step {last:,}."
    return f"{words}."


def outcome_warnings(
    training: TrainingConfig, status: JobStatus, evaluations: Sequence[tuple[int, float]]
) -> tuple[str, ...]:
    """Return what makes it doubtful that the job has learnt what was meant."""
    steps = status.progress.step if status.progress is not None else None
    doubts = [f"{path}: {words}" for path, words in oddities_of(training, steps, about="")]
    if steps is not None and steps < FEW_STEPS:
        doubts.append(f"length: the run had {plural(steps, 'step')}; few batches teach little")
    if len(evaluations) > 1 and evaluations[0][0] == 0:
        before, after = evaluations[0][1], min(value for _, value in evaluations[1:])
        if after > before * (1 - HARDLY):
            doubts.append(
                f"evaluation: it hardly improved, from {loss(before)} before training to {loss(after)} at best"
            )
    return tuple(doubts)
