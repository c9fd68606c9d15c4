"""The second model of a job, and the commits whose weights it reads: what it starts from, and the second model's."""

from __future__ import annotations

from muster.contract.model_config import FromCommit
from muster.contract.second_model import SecondModel
from muster.contract.training import TrainingConfig


def second_model(training: TrainingConfig) -> tuple[str, SecondModel] | None:
    """The model that the job computes forward beside its own, with the path of its field. A job has at most one, for
    task grpo and distillation exclude each other."""
    if training.distillation is not None:
        return "distillation.teacher", training.distillation.teacher
    if training.grpo is not None and training.grpo.reward_model is not None:
        return "grpo.rewardModel", training.grpo.reward_model
    return None


def commits_read(training: TrainingConfig) -> dict[str, FromCommit]:
    """By the path of the field that names each."""
    named = {"model.from": training.model.from_}
    if (second := second_model(training)) is not None:
        named[f"{second[0]}.from"] = second[1].from_
    return {path: origin for path, origin in named.items() if origin is not None}


def with_folder(training: TrainingConfig, path: str, uri: str) -> TrainingConfig:
    """The same where the commit that the field `path` names lies in the folder `uri`."""
    origin = commits_read(training)[path].model_copy(update={"uri": uri})
    if path == "model.from":
        return training.model_copy(update={"model": training.model.model_copy(update={"from_": origin})})
    if training.distillation is not None:
        teacher = training.distillation.teacher.model_copy(update={"from_": origin})
        distillation = training.distillation.model_copy(update={"teacher": teacher})
        return training.model_copy(update={"distillation": distillation})
    assert training.grpo is not None, "only a teacher and a reward model are second models"
    assert training.grpo.reward_model is not None, "the commit is the reward model's"
    scorer = training.grpo.reward_model.model_copy(update={"from_": origin})
    return training.model_copy(update={"grpo": training.grpo.model_copy(update={"reward_model": scorer})})
