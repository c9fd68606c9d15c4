"""Origin of a run. Its weights, its tokenizer and its position in the data come from nothing, a model's folder, another
job's commit, or our own last commit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from muster.recipe.objectives import PREFERENCE_TASKS
from muster.recipe.training import TrainingConfig
from muster.storage.errors import StoreRefusal
from muster.storage.model_folder import CONFIG, ModelFolder, open_folder
from muster.trainer.checkpoint import DamagedCommit, UnusableCommit, newest_readable, read_commit
from muster.trainer.checkpoint.failures import GoneCommit
from muster.trainer.config import WorkerRun
from muster.trainer.data import (
    Tokenizer,
    add_tokens,
    load_tokenizer,
    templated,
    tokenizer_from_commit,
    tokenizer_of_folder,
)
from muster.trainer.data.slow_tokenizers import why_not_fast
from muster.trainer.errors import StorageError, UserError, final_errors_are_the_users
from muster.trainer.models.adapter import adapter_of
from muster.trainer.models.decoder_model import DecoderModel
from muster.trainer.models.definition import ModelDefinition
from muster.trainer.models.files import open_files
from muster.trainer.models.from_commit import definition_of
from muster.trainer.models.scoring import ScoreHead, chosen_head, score_head_of
from muster.trainer.train.optimizer import parameter_groups
from muster.words.base import dump
from muster.words.checkpoint import Commit
from muster.words.model_sources import FromCommit

if TYPE_CHECKING:
    from muster.trainer.models.new_tokens import NewTokens

# What may differ between two attempts of one job: how it is computed, how it is watched, when it ends. Extending the
# length stretches the learning rate's decay from that step on. A change of holdout would change the training data.
CHANGEABLE = ("parallel", "batch.microBatch", "optimizer.offload", "evaluation", "length")
NO_EVALUATION = {"evaluation.holdout": 0.0}
FIXED = tuple(NO_EVALUATION)


@dataclass(frozen=True)
class RunOrigin:
    """Starting point of a run. Where both `resume` and `weights` are None, it has the model's own initial weights."""

    model: ModelDefinition
    tokenizer: Tokenizer
    resume: Commit | None = None  # our own commit, to continue exactly
    weights: tuple[str, int] | None = None  # folder and step of another job's commit


def find_origin(run: WorkerRun, report: Callable[[str], None]) -> RunOrigin:
    """Read what the orders name; the weights themselves are loaded later. Raises UserError, StorageError.

    `report` is called with a line of text when a damaged commit is set aside for the one before it.
    """
    if run.resume_step:
        return _as_trained(_resumed(run, report), run.training)
    return fresh_origin(run.training)


def fresh_origin(training: TrainingConfig) -> RunOrigin:
    """Return the starting point of a job with this configuration that has no commits yet. Raises UserError,
    StorageError."""
    origin = _as_trained(_begun(training), training)
    return replace(origin, tokenizer=templated(origin.tokenizer, training.data))


def as_packable(config: TrainingConfig, origin: RunOrigin, report: Callable[[str], None]) -> TrainingConfig:
    """The configuration with a document to a row, where the model's class would let packed ones see each other. Raises
    UserError for pairs, whose sides share a row."""
    if not origin.model.packs and config.task in PREFERENCE_TASKS:
        raise UserError(
            f"task {config.task} holds both answers of a pair in one row, and {origin.model.why_not_packed}; take a "
            "model of another family"
        )
    if origin.model.packs or not config.data.packing:
        return config
    report("documents are not packed, one to a row and the rest of it padding: " + origin.model.why_not_packed)
    return config.model_copy(update={"data": config.data.model_copy(update={"packing": False})})


def _begun(training: TrainingConfig) -> RunOrigin:
    if training.model.from_ is not None:
        return _from_commit(training, training.model.from_)
    if training.model.source is not None:
        return _from_folder(training, training.model.source)
    architecture = training.model.shape
    assert architecture is not None, "a model is a preset, a shape, from a checkpoint, or from a folder"
    tokenizer = load_tokenizer(training.data.tokenizer)
    model = DecoderModel(architecture, training.whole_adapter, _score_head(training, tokenizer))
    _vocabularies_fit(tokenizer, model, f"data.tokenizer {training.data.tokenizer}", "the model")
    return RunOrigin(model, tokenizer)


def _as_trained(origin: RunOrigin, training: TrainingConfig) -> RunOrigin:
    """Return the origin with the weights frozen that the configuration names. Raises UserError for patterns of weights
    that the model does not have."""
    if not (training.freeze or training.optimizer.groups):
        return origin
    model = origin.model.freezing(training.freeze)
    parameter_groups(model.build(torch.float32, "none"), training.optimizer)
    return replace(origin, model=model)


def _resumed(run: WorkerRun, report: Callable[[str], None]) -> RunOrigin:
    commit = newest_readable(run.folder, run.resume_step, report, lambda commit: _must_be_described(commit, run))
    changes = changed(commit.config, run.document)
    if changes:
        raise UserError(
            f"the configuration differs from that of the checkpoint at step {commit.step} in {run.folder}:\n"
            + "\n".join(f"  {change}" for change in changes)
            + "\nundo these changes, or submit a new job with model.from to start from this checkpoint's weights"
        )
    model = definition_of(commit, run.folder, run.training.whole_adapter)
    return RunOrigin(model, tokenizer_from_commit(commit.tokenizer), resume=commit)


def _must_be_described(commit: Commit, run: WorkerRun) -> None:
    """Raises UnusableCommit, or UserError for what a newer Muster may know, where model or tokenizer can't be built."""
    definition_of(commit, run.folder, run.training.whole_adapter)
    try:
        tokenizer_from_commit(commit.tokenizer)
    except StorageError as error:
        raise UnusableCommit(f"the checkpoint at step {commit.step} in {run.folder}: {error}") from None


def _from_commit(training: TrainingConfig, source: FromCommit) -> RunOrigin:
    if source.uri is None:
        raise UserError(
            f"model.from.job {source.job!r} was not resolved to a checkpoint folder: submit through the API, "
            "or give model.from.uri"
        )
    try:
        commit = read_commit(source.uri, source.step)
    except (DamagedCommit, GoneCommit, StoreRefusal) as error:  # it will be no other in the next attempt
        raise UserError(f"model.from: {error}") from error
    adapter_of(commit)  # one that is not known here is told now
    where = f"the checkpoint at step {commit.step} in {source.uri}"
    companions = commit.architecture.get("companions", {})
    tokenizer = tokenizer_from_commit(commit.tokenizer, companions)
    asked = _score_head(training, tokenizer, companions.get(CONFIG))
    scores = chosen_head(asked, score_head_of(commit.architecture), where)
    model = definition_of(commit, source.uri, training.whole_adapter, scores)
    _must_be_its_own(training.data.tokenizer, tokenizer, model, where, "the checkpoint's")
    _vocabularies_fit(tokenizer, model, "its tokenizer", where)
    _must_be_within_positions(training, model, where)
    return RunOrigin(model, tokenizer, weights=(source.uri, commit.step))


@final_errors_are_the_users("model.source")
def _from_folder(training: TrainingConfig, source: str) -> RunOrigin:
    from muster.trainer.models import transformers_model

    folder = open_folder(open_files(source))
    where = f"the model in {source}"
    if folder.tokenizer is not None:
        tokenizer: Tokenizer = _tokenizer_in(folder, source)
    elif training.data.tokenizer != "bytes":
        tokenizer = load_tokenizer(training.data.tokenizer)
    else:
        reason = why_not_fast(folder.companions.get("tokenizer_config.json"), folder.has)
        raise UserError(f"model.source {source}: {reason}")
    _must_know_the_end(tokenizer, folder, where)
    own, new = tokenizer, None
    if training.data.add_tokens:
        folder, new = _with_new_tokens(folder, tokenizer, training.data.add_tokens, where)
        tokenizer = _tokenizer_in(folder, source)
    scores = _score_head(training, tokenizer, folder.companions[CONFIG])
    model = transformers_model.from_folder(folder, training.whole_adapter, new, scores)
    _must_be_its_own(training.data.tokenizer, own, model, where, "the folder's")
    _vocabularies_fit(tokenizer, model, "its tokenizer", where)
    _must_be_within_positions(training, model, where)
    return RunOrigin(model, tokenizer)


def _score_head(training: TrainingConfig, tokenizer: Tokenizer, config: str | None = None) -> ScoreHead | None:
    """The head that a task needs which scores texts; None for one that predicts tokens.

    `config` is the model's config.json, which may name a padding token; without one it is the end of a document.
    """
    if training.scores is None:
        return None
    pad = json.loads(config).get("pad_token_id") if config else None
    return ScoreHead(training.scores, pad if isinstance(pad, int) else tokenizer.eos)


def _with_new_tokens(
    folder: ModelFolder, tokenizer: Tokenizer, tokens: Sequence[str], where: str
) -> tuple[ModelFolder, NewTokens]:
    """The folder as it is with further tokens. Raises UserError for tokens that it has."""
    from muster.trainer.models.new_tokens import NewTokens, grown

    if folder.tokenizer is None:
        raise UserError(f"data.addTokens: {where} has no tokenizer.json that they could be added to")
    rows = folder.config.get("vocab_size")
    if not isinstance(rows, int) or tokenizer.vocab_size > rows:
        raise UserError(
            f"data.addTokens: {where} says vocab_size {rows} in its config.json, and its tokenizer has "
            f"{tokenizer.vocab_size} tokens; new ones can't be placed behind those"
        )
    text, ids = add_tokens(folder.tokenizer, tokens, where)
    new = NewTokens(ids, tokenizer.vocab_size)
    return grown(folder, new, text), new


def _tokenizer_in(folder: ModelFolder, source: str) -> Tokenizer:
    assert folder.tokenizer is not None
    return tokenizer_of_folder(folder.tokenizer, folder.companions, source)


def _must_be_its_own(asked: str, own: Tokenizer, model: ModelDefinition, where: str, whose: str) -> None:
    """Raise UserError where the tokenizer that was asked for is not the model's.

    `asked` is data.tokenizer; its default `bytes` stands for whatever the model has. `where` and `whose` name the model
    in the message.
    """
    if asked == "bytes":
        return
    other = load_tokenizer(asked)
    _vocabularies_fit(other, model, f"data.tokenizer {asked}", where)
    if _without_template(other) != _without_template(own):
        raise UserError(
            f"data.tokenizer {asked} is not the tokenizer that {where} was trained with "
            f"(vocabularies {other.vocab_size} and {own.vocab_size}); leave it out to use {whose}"
        )


def _must_know_the_end(tokenizer: Tokenizer, folder: ModelFolder, where: str) -> None:
    """Raise UserError where the model ends a text by a token that the tokenizer does not have."""
    named = folder.config.get("eos_token_id")
    ends = [number for number in (named if isinstance(named, list) else [named]) if isinstance(number, int)]
    if ends and min(ends) >= tokenizer.vocab_size:
        raise UserError(
            f"its tokenizer has {tokenizer.vocab_size} tokens, but {where} ends a text by token {min(ends)} "
            "(eos_token_id in config.json): put the tokenizer.json that belongs to the model beside its weights"
        )


def _without_template(tokenizer: Tokenizer) -> dict[str, Any]:
    return {key: value for key, value in tokenizer.describe().items() if key != "chat_template"}


def _must_be_within_positions(training: TrainingConfig, model: ModelDefinition, where: str) -> None:
    limit = model.position_limit
    if limit is not None and training.data.sequence_length > limit:
        raise UserError(
            f"data.sequenceLength {training.data.sequence_length} is longer than the position limit "
            f"{limit} of {where}, rope scaling included; shorten the sequences, choose another model, or give its "
            "config.json a rope scaling (yarn) that it was trained for"
        )


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Every path that differs and may not, with both values."""
    old, new = NO_EVALUATION | _leaves(_with_defaults(before)), NO_EVALUATION | _leaves(now)
    return [
        f"training.{path}: {_show(old.get(path))} → {_show(new.get(path))}"
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path) and not _may_change(path)
    ]


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """A commit of an older Muster lacks the keys that came later; they had their defaults."""
    try:
        return dump(TrainingConfig.model_validate(config))
    except ValidationError:
        return config


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {
        key: leaf
        for name, inner in value.items()
        for key, leaf in _leaves(inner, f"{path}.{name}" if path else name).items()
    }


def _may_change(path: str) -> bool:
    return path not in FIXED and any(path == part or path.startswith(f"{part}.") for part in CHANGEABLE)


def _show(value: Any) -> str:
    return "not set" if value is None else repr(value)


def _vocabularies_fit(tokenizer: Tokenizer, model: ModelDefinition, what: str, where: str) -> None:
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"{what} has a vocabulary of {tokenizer.vocab_size} tokens, but {where} has {model.vocab_size}: "
            "choose the tokenizer that belongs to the model, or a model with at least that many"
        )
