"""Facts about a stored model for an estimate: its size, from headers, without reading a weight."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Any, Final

from muster.plan.model_size import ModelSize, decoder_size, dimensions_of, position_limit, size_of
from muster.recipe.adapter_config import Adapter
from muster.recipe.architecture import Architecture
from muster.recipe.commits_read import second_models
from muster.recipe.second_model import SecondModel
from muster.recipe.training import TrainingConfig
from muster.storage.commits import COMMIT_BYTES_MAX, InvalidCommit, parse_commit, refuse_program
from muster.storage.listing import steps_in
from muster.storage.model_folder import open_folder
from muster.storage.opening import open_source, open_store
from muster.storage.settings import S3Settings
from muster.storage.store import Store
from muster.words.address import hub_path, parse_address
from muster.words.base import InvalidDocument, UserError, parse
from muster.words.checkpoint import ITEM_BYTES, Commit, commit_key
from muster.words.model_sources import FromCommit

HUB: Final = "https://huggingface.co"  # where HF_ENDPOINT names no mirror
_MODEL: Final = "model/"


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that an estimate needs."""

    size: ModelSize
    casts_itself: bool  # as in memory.estimate: our own decoder does, models of transformers do not
    position_limit: int | None  # positions that the model was made for; None: no limit is known


def model_facts(training: TrainingConfig) -> ModelFacts:
    """Return the facts of the model that a job starts from, and of its second ones. Raises UserError if it can't be
    trained, and StorageError if it can't be read now; both name the place."""
    facts = _own_facts(training)
    beside = tuple(_second_size(second) for second in second_models(training).values())
    return replace(facts, size=replace(facts.size, second=beside))


def _second_size(second: SecondModel) -> ModelSize:
    if second.source is not None:
        return _of_folder(second.source, _PLAIN).size
    assert second.from_ is not None, "a second model is a folder or a checkpoint"
    return _of_commit(second.from_, _PLAIN).size


def _own_facts(training: TrainingConfig) -> ModelFacts:
    model, learning = training.model, _LearningChanges(training.whole_adapter, training.scores, training.freeze)
    if model.shape is not None:
        return ModelFacts(_decoder_size(model.shape, learning), True, model.shape.max_positions)
    if model.source is not None:
        return _of_folder(model.source, learning)
    assert model.from_ is not None, "a model is a preset, a shape, a folder or a checkpoint"
    return _of_commit(model.from_, learning)


@dataclass(frozen=True)
class _LearningChanges:
    """Changes that a job makes to a model before it trains it."""

    adapter: Adapter | None = None
    scores: int | None = None  # that its head gives a text; None where it predicts tokens
    freeze: tuple[str, ...] = ()  # patterns of weights that stay as they are


_PLAIN = _LearningChanges()


def _decoder_size(architecture: Architecture, learning: _LearningChanges) -> ModelSize:
    return decoder_size(architecture, learning.adapter, learning.scores, learning.freeze)


def _of_folder(source: str, learning: _LearningChanges) -> ModelFacts:
    address = parse_address(source)
    if address.scheme == "hf":
        where = hub_path(address)
        path = f"/{where.path.strip('/')}" if where.path else ""
        hub = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")
        address = parse_address(f"{hub}/{where.repository}/resolve/{where.revision or 'main'}{path}")
    folder = open_folder(open_source(address, S3Settings.for_a_look(os.environ)))
    if folder.config.get("tie_word_embeddings") and folder.has_another_head(ends_only=True):
        folder = folder.untied()
    shapes = {name: tensor.shape for name, tensor in folder.tensors.items()}
    return _of_config(folder.config, shapes, folder.dtype, learning, f"model.source {source}")


def _of_config(
    config: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    dtype: str,
    learning: _LearningChanges,
    where: str,
) -> ModelFacts:
    try:
        dimensions = dimensions_of(config)
    except ValueError as error:
        raise UserError(f"{where}: {error}, so its memory can't be told; is it a language model?") from None
    adapter = learning.adapter
    size = size_of(shapes, dimensions, adapter, ITEM_BYTES[dtype], learning.scores, learning.freeze)
    if adapter is not None and size.learning == 0:
        raise UserError(
            f"adapter.targets: {', '.join(adapter.targets + adapter.target_parameters)} match no layer of {where}"
        )
    return ModelFacts(size, False, position_limit(config))


def _of_commit(origin: FromCommit, learning: _LearningChanges) -> ModelFacts:
    if origin.uri is None:
        raise UserError(f"model.from: only a server knows where job {origin.job!r} commits; name its folder (uri)")
    commit = _read(open_store(origin.uri, S3Settings.for_a_look(os.environ)), origin)
    refuse_program(commit, origin.uri)
    shapes = {
        name.removeprefix(_MODEL): tuple(entry.shape)
        for name, entry in commit.tensors.items()
        if name.startswith(_MODEL) and ".lora_" not in name  # what was trained beside is merged at the start
    }
    where = f"the checkpoint of step {commit.step} in {origin.uri}"
    document = {key: value for key, value in commit.architecture.items() if key != "scores"}
    if document.get("kind") == "transformers":
        config = json.loads(document["companions"]["config.json"])
        return _of_config(config, shapes, str(document.get("storedDtype", "F32")), learning, where)
    try:
        architecture = parse(Architecture, document)
    except InvalidDocument as error:
        raise UserError(f"{where} describes a model that this Muster does not know: {error}") from None
    return ModelFacts(_decoder_size(architecture, learning), True, architecture.max_positions)


def _read(store: Store, origin: FromCommit) -> Commit:
    steps = steps_in(store)
    if not steps:
        raise UserError(f"model.from {origin.uri}: holds no checkpoint")
    step = origin.step if isinstance(origin.step, int) else steps[-1]  # all of a job's are of one model
    if step not in steps:
        newest = ", ".join(map(str, steps[-5:]))
        raise UserError(f"model.from {origin.uri}: holds no checkpoint of step {step}; the newest are of {newest}")
    try:
        return parse_commit(store.read(commit_key(step), COMMIT_BYTES_MAX), step=step, folder=None)
    except InvalidCommit as error:
        raise UserError(f"model.from {origin.uri}: the checkpoint of step {step} can't be read: {error}") from None
