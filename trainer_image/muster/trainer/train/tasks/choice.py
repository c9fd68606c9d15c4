"""Choice of the objective for a configuration's task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from muster.recipe.commits_read import REFERENCE, TEACHER
from muster.recipe.objectives import Task
from muster.recipe.training import TrainingConfig
from muster.trainer.models.forward_model import ForwardModel
from muster.trainer.models.teacher import TeacherModel
from muster.trainer.train.tasks import dpo, grpo, kto, next_token, orpo, reward, simpo
from muster.trainer.train.tasks.distilled import DistillationObjective
from muster.trainer.train.tasks.objective import TrainingObjective

# Of every task but grpo, which may ask for a second model.
MAKERS: Final[dict[Task, Callable[[TrainingConfig], TrainingObjective]]] = {
    "pretrain": next_token.make_objective,
    "sft": next_token.make_objective,
    "dpo": dpo.make_objective,
    "orpo": orpo.make_objective,
    "simpo": simpo.make_objective,
    "kto": kto.make_objective,
    "reward": reward.make_objective,
}


def objective_of(
    training: TrainingConfig, beside: Mapping[str, ForwardModel] = MappingProxyType({})
) -> TrainingObjective:
    """The objective of the configuration's task, with the second models that it asks for, by the paths of their
    fields."""
    if training.distillation is not None:
        return DistillationObjective(TeacherModel(beside[TEACHER], training.distillation))
    if training.grpo is not None:
        return grpo.GrpoObjective(training.grpo, beside.get(REFERENCE))
    return MAKERS[training.task](training)
