"""The commits whose weights a job reads: those that it starts from, and its teacher's."""

from __future__ import annotations

from muster.contract.model_config import FromCommit
from muster.contract.training import TrainingConfig


def commits_read(training: TrainingConfig) -> dict[str, FromCommit]:
    """By the path of the field that names each."""
    teacher = None if training.distillation is None else training.distillation.teacher.from_
    named = {"model.from": training.model.from_, "distillation.teacher.from": teacher}
    return {path: origin for path, origin in named.items() if origin is not None}


def with_folder(training: TrainingConfig, path: str, uri: str) -> TrainingConfig:
    """The same where the commit that the field `path` names lies in the folder `uri`."""
    origin = commits_read(training)[path].model_copy(update={"uri": uri})
    if path == "model.from":
        return training.model_copy(update={"model": training.model.model_copy(update={"from_": origin})})
    assert training.distillation is not None, "only distillation has a teacher"
    teacher = training.distillation.teacher.model_copy(update={"from_": origin})
    return training.model_copy(update={"distillation": training.distillation.model_copy(update={"teacher": teacher})})
