"""Where a teacher comes from, what speaks against it, and that a resumed job has the very same one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from muster.contract.checkpoint import Commit, seal_of
from muster.contract.distillation import Teacher
from muster.contract.training import TrainingConfig
from muster.storage.errors import Refused
from muster.storage.model_folder import open_folder
from muster.trainer.checkpoint import DamagedCommit, read_commit
from muster.trainer.checkpoint.failures import GoneCommit
from muster.trainer.convert.weights import begin_with
from muster.trainer.data import Tokenizer, load_tokenizer, tokenizer_from_commit, tokenizer_of_folder
from muster.trainer.errors import UserError, final_errors_are_the_users
from muster.trainer.models.adapter import adapter_of
from muster.trainer.models.definition import ModelDefinition
from muster.trainer.models.files import open_files
from muster.trainer.models.from_commit import definition_of
from muster.trainer.models.sharding import Layout
from muster.trainer.models.teacher import TeacherModel
from muster.trainer.train.origin import Origin

CHANGED = (
    "distillation.teacher {words}: has other weights than when the job began ({what}), so what was learnt until now "
    "came from another model; put the old ones back, or submit a new job with model.from"
)


@dataclass(frozen=True)
class TeacherOrigin:
    """A teacher before it is built."""

    words: str  # its address, for messages
    model: ModelDefinition
    commit: Commit | None = None  # the one that holds its weights; None: they are in a folder
    uri: str | None = None  # the folder of that commit


@dataclass(frozen=True)
class LoadedTeacher:
    """A teacher with its weights, and what the job's commits say of it."""

    words: str
    model: TeacherModel
    described: dict[str, Any]

    @staticmethod
    def load(origin: TeacherOrigin, training: TrainingConfig, layout: Layout, device: torch.device) -> LoadedTeacher:
        """Build it and read its weights. Collective."""
        model = TeacherModel(origin.model, training, layout, device, values=origin.commit is None)
        if origin.commit is None:
            return LoadedTeacher(origin.words, model, dict(origin.model.describe()["source"]))
        assert origin.uri is not None, "a commit lies in a folder"
        begin_with(origin.uri, origin.commit.step, model.module)
        document = origin.commit.model_dump(mode="json", by_alias=True)
        seal = seal_of({key: value for key, value in document.items() if key != "seal"})
        told = {"address": origin.uri, "step": origin.commit.step, "seal": seal}
        return LoadedTeacher(origin.words, model, told)

    def must_be(self, before: dict[str, Any] | None) -> None:
        """Raises UserError where these are not the weights that a commit tells of. Of a file the checksum may be
        missing, where ranks read other parts of it."""
        before, now = before or {}, self.described
        for key in ("address", "revision", "files", "step", "seal"):
            if before.get(key) != now.get(key):
                raise UserError(CHANGED.format(words=self.words, what=f"{key} {before.get(key)} → {now.get(key)}"))
        old, new = before.get("crc32") or {}, now.get("crc32") or {}
        if changed := sorted(name for name in old.keys() & new.keys() if old[name] != new[name]):
            raise UserError(CHANGED.format(words=self.words, what=f"the bytes of {', '.join(changed[:5])}"))


def find_teacher(training: TrainingConfig, origin: Origin) -> TeacherOrigin | None:
    """The teacher of a job; None where it has none.

    `origin` is what the job begins with: a resumed one has the step of the teacher's commit that it had before. Raises
    UserError for one that can't teach it, before a weight is read.
    """
    if training.distillation is None:
        return None
    teacher = training.distillation.teacher
    before = origin.resume.state.get("teacher") if origin.resume is not None else None
    found, own = _of_folder(teacher, training) if teacher.source is not None else _of_commit(teacher, before)
    _must_fit(found, own, training, origin)
    return found


@final_errors_are_the_users("distillation.teacher.source")
def _of_folder(teacher: Teacher, training: TrainingConfig) -> tuple[TeacherOrigin, Tokenizer]:
    from muster.trainer.models import transformers_model

    assert teacher.source is not None, "the teacher is a folder"
    folder = open_folder(open_files(teacher.source))
    if folder.tokenizer is not None:
        beside = folder.companions.get("tokenizer_config.json")
        own: Tokenizer = tokenizer_of_folder(folder.tokenizer, beside, teacher.source)
    else:
        own = load_tokenizer(training.data.tokenizer)
    return TeacherOrigin(teacher.words, transformers_model.from_folder(folder, None)), own


def _of_commit(teacher: Teacher, before: dict[str, Any] | None) -> tuple[TeacherOrigin, Tokenizer]:
    source = teacher.from_
    assert source is not None, "the teacher is a commit"
    if source.uri is None:
        raise UserError(
            f"distillation.teacher.from.job {source.job!r} was not resolved to a checkpoint folder: submit through the "
            "API, or give uri"
        )
    try:
        commit = read_commit(source.uri, before["step"] if before and "step" in before else source.step)
    except (DamagedCommit, GoneCommit, Refused) as error:
        raise UserError(f"distillation.teacher.from: {error}") from error
    adapter_of(commit)  # one that is not known here is told now
    model = definition_of(commit, source.uri, None)
    return TeacherOrigin(teacher.words, model, commit, source.uri), tokenizer_from_commit(commit.tokenizer)


def _must_fit(teacher: TeacherOrigin, own: Tokenizer, training: TrainingConfig, origin: Origin) -> None:
    tokenizer = origin.tokenizer
    where = f"distillation.teacher {teacher.words}"
    if teacher.model.scores is not None:
        raise UserError(f"{where}: scores texts and predicts no tokens; name the model that it was trained from")
    if _vocabulary(own) != _vocabulary(tokenizer):
        raise UserError(
            f"{where}: its tokenizer is not that of the model that learns (vocabularies of {own.vocab_size:,} and "
            f"{tokenizer.vocab_size:,} tokens), so that what they predict can't be compared token by token; take a "
            "teacher of the same family, or let the teacher write texts and learn from those with task sft"
        )
    if training.data.packing and origin.model.packs and not teacher.model.packs:
        raise UserError(f"{where}: can't take packed rows: {teacher.model.why_not_packed}; set data.packing false")
    limit = teacher.model.position_limit
    if limit is not None and training.data.sequence_length > limit:
        raise UserError(
            f"{where}: has {limit} positions, and data.sequenceLength is {training.data.sequence_length}; shorten the "
            "sequences, or take another teacher"
        )


def _vocabulary(tokenizer: Tokenizer) -> dict[str, Any]:
    return {key: value for key, value in tokenizer.describe().items() if key != "chat_template"}
