"""The second models of a job, and the commits whose weights it reads: what it starts from, and the second models'."""

from __future__ import annotations

from typing import ClassVar, Final

from muster.recipe.second_model import SecondModel, names_one
from muster.recipe.training import TrainingConfig
from muster.words.model_sources import FromCommit

TEACHER: Final = "distillation.teacher"
REWARD_MODEL: Final = "grpo.rewardModel"
REFERENCE: Final = "model"  # what the job starts from, as it was then


class Reference(SecondModel):
    """The model that a job starts from, which another part of it is held against."""

    whose: ClassVar[str] = "reference model"
    rules = (names_one(whose),)


def second_models(training: TrainingConfig) -> dict[str, SecondModel]:
    """The models that the job computes forward in addition to its own, by the paths of the fields that name them."""
    models: dict[str, SecondModel] = {}
    if training.distillation is not None:
        models[TEACHER] = training.distillation.teacher
    if training.grpo is not None and training.grpo.reward_model is not None:
        models[REWARD_MODEL] = training.grpo.reward_model
    if training.grpo is not None and training.grpo.beta and training.adapter is None:
        models[REFERENCE] = Reference.model_validate({"source": training.model.source, "from": training.model.from_})
    return models


def commits_read(training: TrainingConfig) -> dict[str, FromCommit]:
    """Return the commits that the job reads, by the path of the field that names each."""
    named = {"model.from": training.model.from_}
    named |= {f"{path}.from": second.from_ for path, second in second_models(training).items()}
    return {path: origin for path, origin in named.items() if origin is not None}


def with_folder(training: TrainingConfig, path: str, uri: str, step: int | None = None) -> TrainingConfig:
    """The same where the commit that the field `path` names lies in the folder `uri`, and is of that step, if one is
    given."""
    update = {"uri": uri} | ({} if step is None else {"step": step})
    origin = commits_read(training)[path].model_copy(update=update)
    if path == "model.from":
        return training.model_copy(update={"model": training.model.model_copy(update={"from_": origin})})
    if path == f"{TEACHER}.from":
        assert training.distillation is not None, "the checkpoint is the teacher's"
        teacher = training.distillation.teacher.model_copy(update={"from_": origin})
        distillation = training.distillation.model_copy(update={"teacher": teacher})
        return training.model_copy(update={"distillation": distillation})
    assert training.grpo is not None, "the checkpoint is the reward model's"
    assert training.grpo.reward_model is not None, "the checkpoint is the reward model's"
    scorer = training.grpo.reward_model.model_copy(update={"from_": origin})
    return training.model_copy(update={"grpo": training.grpo.model_copy(update={"reward_model": scorer})})
