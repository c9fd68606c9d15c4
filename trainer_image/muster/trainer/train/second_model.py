"""Second models: the origin of a teacher, a reward model or a reference, the reasons to refuse one, and the check that
a resumed job has the same one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from muster.recipe.commits_read import REFERENCE, REWARD_MODEL, second_models
from muster.recipe.second_model import SecondModel
from muster.recipe.training import TrainingConfig
from muster.storage.errors import StoreRefusal
from muster.storage.model_folder import open_folder
from muster.trainer.checkpoint import DamagedCommit, read_commit
from muster.trainer.checkpoint.failures import GoneCommit
from muster.trainer.convert.weights import begin_with
from muster.trainer.data import Tokenizer, load_tokenizer, tokenizer_from_commit, tokenizer_of_folder
from muster.trainer.errors import UserError, final_errors_are_the_users
from muster.trainer.models.adapter import adapter_of
from muster.trainer.models.definition import ModelDefinition
from muster.trainer.models.files import open_files
from muster.trainer.models.forward_model import ForwardModel
from muster.trainer.models.from_commit import definition_of
from muster.trainer.models.scoring import WEIGHT as SCORE_WEIGHT
from muster.trainer.models.scoring import ScoreHead
from muster.trainer.models.sharding import ShardLayout
from muster.trainer.train.origin import RunOrigin
from muster.words.checkpoint import Commit, seal_of
from muster.words.model_sources import FromCommit

CHANGED = (
    "{field} {words}: has other weights than when the job began ({what}), so what was learnt until now came from "
    "another model; put the old ones back, or submit a new job with model.from"
)


@dataclass(frozen=True)
class SecondOrigin:
    """A second model before it is built."""

    field: str  # of the configuration, for messages
    words: str  # its address, likewise
    model: ModelDefinition
    commit: Commit | None = None  # the one that holds its weights; None: they are in a folder
    uri: str | None = None  # the folder of that commit


@dataclass(frozen=True)
class LoadedSecond:
    """A second model with its weights, and what the job's commits say of it."""

    field: str
    words: str
    model: ForwardModel
    described: dict[str, Any]

    @staticmethod
    def load(origin: SecondOrigin, training: TrainingConfig, layout: ShardLayout, device: torch.device) -> LoadedSecond:
        """Build it and read its weights. Collective."""
        model = ForwardModel(origin.model, training, layout, device, values=origin.commit is None)
        if origin.commit is None:
            return LoadedSecond(origin.field, origin.words, model, dict(origin.model.describe()["source"]))
        assert origin.uri is not None, "a checkpoint lies in a folder"
        begin_with(origin.uri, origin.commit.step, model.module)
        document = origin.commit.model_dump(mode="json", by_alias=True)
        seal = seal_of({key: value for key, value in document.items() if key != "seal"})
        state = {"address": origin.uri, "step": origin.commit.step, "seal": seal}
        return LoadedSecond(origin.field, origin.words, model, state)

    @property
    def state(self) -> dict[str, Any]:
        """Return the description of the model that a commit's state holds."""
        return {_key(self.field): self.described}

    def must_be(self, state: dict[str, Any]) -> None:
        """Raises UserError where these are not the weights that a commit's state tells of. Of a file the checksum may
        be missing, where ranks read other parts of it."""
        before, now = state.get(_key(self.field)) or {}, self.described
        for key in ("address", "revision", "files", "step", "seal"):
            if before.get(key) != now.get(key):
                raise self._changed(f"{key} {before.get(key)} → {now.get(key)}")
        old, new = before.get("crc32") or {}, now.get("crc32") or {}
        if changed := sorted(name for name in old.keys() & new.keys() if old[name] != new[name]):
            raise self._changed(f"the bytes of {', '.join(changed[:5])}")

    def _changed(self, what: str) -> UserError:
        return UserError(CHANGED.format(field=self.field, words=self.words, what=what))


def find_second_models(training: TrainingConfig, origin: RunOrigin) -> dict[str, SecondOrigin]:
    """The second models of a job, by the paths of their fields.

    `origin` is what the job begins with: a resumed one has the step of the commit that it had before. Raises UserError
    for a model that can't serve it, before a weight is read.
    """
    return {field: _origin_of(field, given, training, origin) for field, given in second_models(training).items()}


def _origin_of(field: str, given: SecondModel, training: TrainingConfig, origin: RunOrigin) -> SecondOrigin:
    scores = field == REWARD_MODEL
    if given.source is not None:
        read = final_errors_are_the_users(f"{field}.source")(_of_folder)
        second, own = read(field, given.source, training, scores)
    else:
        assert given.from_ is not None, "a second model is a folder or a checkpoint"
        second, own = _of_commit(field, given.words, given.from_, _step(field, origin))
    (_must_score if scores else _must_predict)(second, training, origin)
    _must_fit(second, own, training, origin)
    return second


def _step(field: str, origin: RunOrigin) -> int | None:
    """The step of the commit that a second model is to be of; None: of the one that its field names."""
    if origin.resume is not None:
        step: int | None = (origin.resume.state.get(_key(field)) or {}).get("step")
        return step
    return origin.weights[1] if field == REFERENCE and origin.weights is not None else None


def _key(field: str) -> str:
    """Return the key under which a commit's state describes the model."""
    return "referenceModel" if field == REFERENCE else field.rpartition(".")[2]


def _of_folder(field: str, source: str, training: TrainingConfig, scores: bool) -> tuple[SecondOrigin, Tokenizer]:
    from muster.trainer.models import transformers_model

    folder = open_folder(open_files(source))
    if folder.tokenizer is not None:
        own: Tokenizer = tokenizer_of_folder(folder.tokenizer, folder.companions, source)
    else:
        own = load_tokenizer(training.data.tokenizer)
    head = None
    if scores and SCORE_WEIGHT in folder.tensors:
        pad = folder.config.get("pad_token_id")
        head = ScoreHead(folder.tensors[SCORE_WEIGHT].shape[0], pad if isinstance(pad, int) else own.eos)
    return SecondOrigin(field, source, transformers_model.from_folder(folder, None, scores=head)), own


def _of_commit(field: str, words: str, source: FromCommit, step: int | None) -> tuple[SecondOrigin, Tokenizer]:
    if source.uri is None:
        raise UserError(
            f"{field}.from.job {source.job!r} was not resolved to a checkpoint folder: submit through the API, or give "
            "uri"
        )
    try:
        commit = read_commit(source.uri, source.step if step is None else step)
    except (DamagedCommit, GoneCommit, StoreRefusal) as error:
        raise UserError(f"{field}.from: {error}") from error
    adapter_of(commit)  # one that is not known here is told now
    model = definition_of(commit, source.uri, None)
    return SecondOrigin(field, words, model, commit, source.uri), tokenizer_from_commit(commit.tokenizer)


def _must_predict(teacher: SecondOrigin, training: TrainingConfig, origin: RunOrigin) -> None:
    where = f"{teacher.field} {teacher.words}"
    if teacher.model.scores is not None:
        raise UserError(f"{where}: scores texts and predicts no tokens; name the model that it was trained from")
    if training.data.packing and origin.model.packs and not teacher.model.packs:
        raise UserError(f"{where}: can't take packed rows: {teacher.model.why_not_packed}; set data.packing false")


def _must_score(scorer: SecondOrigin, training: TrainingConfig, origin: RunOrigin) -> None:
    where = f"{scorer.field} {scorer.words}"
    if scorer.model.scores is None:
        raise UserError(
            f"{where}: predicts tokens and scores no texts; name the checkpoint of a job of task reward, or the folder "
            "that such a checkpoint was exported to"
        )
    if scorer.model.scores.count != 1:
        raise UserError(
            f"{where}: gives a text {scorer.model.scores.count} scores, and a reward is one; take a model of task "
            "reward"
        )


def _must_fit(second: SecondOrigin, own: Tokenizer, training: TrainingConfig, origin: RunOrigin) -> None:
    tokenizer = origin.tokenizer
    where = f"{second.field} {second.words}"
    if _vocabulary(own) != _vocabulary(tokenizer):
        instead = (
            "what they predict can't be compared token by token; take a teacher of the same family, or let the teacher "
            "write texts and learn from those with task sft"
            if second.model.scores is None
            else "it can't read the answers token by token; train a reward model from the model that learns, or from "
            "another of its family"
        )
        raise UserError(
            f"{where}: its tokenizer is not that of the model that learns (vocabularies of {own.vocab_size:,} and "
            f"{tokenizer.vocab_size:,} tokens), so that {instead}"
        )
    limit = second.model.position_limit
    if limit is not None and training.data.sequence_length > limit:
        raise UserError(
            f"{where}: has {limit} positions, and data.sequenceLength is {training.data.sequence_length}; shorten the "
            "sequences, or take another model"
        )


def _vocabulary(tokenizer: Tokenizer) -> dict[str, Any]:
    return {key: value for key, value in tokenizer.describe().items() if key != "chat_template"}
