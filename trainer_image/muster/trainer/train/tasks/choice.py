"""Which objective a configuration's task has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from muster.contract.objectives import Task
from muster.contract.training import TrainingConfig
from muster.trainer.models.forward_model import ForwardModel
from muster.trainer.models.teacher import TeacherModel
from muster.trainer.train.tasks import dpo, grpo, kto, next_token, orpo, reward, simpo
from muster.trainer.train.tasks.distilled import Distilled
from muster.trainer.train.tasks.objective import Objective

MAKERS: Final[dict[Task, Callable[[TrainingConfig], Objective]]] = {
    "pretrain": next_token.make_objective,
    "sft": next_token.make_objective,
    "dpo": dpo.make_objective,
    "orpo": orpo.make_objective,
    "simpo": simpo.make_objective,
    "kto": kto.make_objective,
    "reward": reward.make_objective,
    "grpo": grpo.make_objective,
}


def objective_of(training: TrainingConfig, beside: ForwardModel | None = None) -> Objective:
    """The objective of the configuration's task, with the second model that it asks for."""
    if training.distillation is not None:
        assert beside is not None, "distillation has a teacher"
        return Distilled(TeacherModel(beside, training.distillation))
    return MAKERS[training.task](training)
