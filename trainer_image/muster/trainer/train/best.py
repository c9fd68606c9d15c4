"""The best evaluation so far, by the metric that decides: which commit is marked, and when to stop early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from muster.recipe.evaluation_config import Better, EarlyStopping, Evaluation
from muster.trainer.errors import UserError
from muster.trainer.train.evaluation import HeldOutResult


@dataclass
class BestMetric:
    """The best value of a metric so far, and for how many evaluations in a row it has not been beaten.

    An evaluation that improves is committed at its step and marked as best. The one at step 0 only sets the mark: the
    weights before training are nobody's result.
    """

    rule: EarlyStopping | None
    metric: str = "loss"
    better: Better = "lower"
    value: float | None = None
    step: int | None = None
    without_improvement: int = 0

    @classmethod
    def of(cls, evaluation: Evaluation | None) -> BestMetric:
        """Judge by what the configuration says."""
        if evaluation is None:
            return cls(None)
        return cls(evaluation.early_stopping, evaluation.metric, evaluation.direction())

    def judge(self, result: HeldOutResult, step: int) -> bool:
        """Take note of the evaluation after `step`; whether it is the best so far. Raises UserError where it did not
        measure the metric."""
        value = {"loss": result.loss, **result.values}.get(self.metric)
        if value is None:
            raise UserError(
                f"evaluation.metric {self.metric}: the evaluation after step {step} could not measure it; it measured "
                f"{', '.join(('loss', *result.values))}"
            )
        if self.value is None or self._gain(value) > (self.rule.min_delta if self.rule else 0.0):
            self.value, self.step, self.without_improvement = value, step, 0
            return True
        self.without_improvement += 1
        return False

    def _gain(self, value: float) -> float:
        assert self.value is not None
        return self.value - value if self.better == "lower" else value - self.value

    @property
    def stop(self) -> bool:
        return self.rule is not None and self.without_improvement >= self.rule.patience

    def state(self) -> dict[str, Any]:
        # The value is called `loss` for what reads it in commits of earlier releases.
        judged = {"metric": self.metric, "better": self.better, "loss": self.value}
        return {**judged, "step": self.step, "withoutImprovement": self.without_improvement}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where a commit stood. One that was judged by another metric says nothing of this one."""
        if (state.get("metric", "loss"), state.get("better", "lower")) != (self.metric, self.better):
            return
        self.value, self.step = state.get("loss"), state.get("step")
        self.without_improvement = int(state.get("withoutImprovement", 0))
