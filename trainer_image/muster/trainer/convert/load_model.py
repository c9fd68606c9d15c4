"""A model in memory, to be asked: of a commit, what its adapter learnt merged into it, or of a model's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch
from torch import nn

from muster.storage.errors import NotFound
from muster.storage.model_folder import CONFIG, open_folder
from muster.trainer.checkpoint import read_commit
from muster.trainer.convert.weights import begin_with
from muster.trainer.data import Tokenizer, tokenizer_from_commit, tokenizer_of_folder
from muster.trainer.errors import UserError
from muster.trainer.models.definition import ModelDefinition
from muster.trainer.models.files import open_files
from muster.trainer.models.from_commit import definition_of
from muster.words.address import parse_address
from muster.words.checkpoint import COMMITS
from muster.words.text import size

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LoadedModel:
    """A model in fp32 on the CPU, and the tokenizer that it was trained with."""

    definition: ModelDefinition
    module: nn.Module
    tokenizer: Tokenizer
    name: str  # where it is from, for people


def load(
    where: str, step: int | Literal["best", "last"], within_memory: bool = False, of_job: bool = False
) -> LoadedModel:
    """Load a job's commit of `step`, or the model of a folder in transformers' layout.

    `where` is an address or a path. Raises UserError for what can't be asked, and, `within_memory`, for a model that
    does not fit into what is free; StorageError. `of_job` says that it is a job's folder, whatever lies in it: a job
    may write there what looks like a model in transformers' layout, whose files are read through links.
    """
    address = parse_address(where)
    where = Path(address.path).resolve().as_uri() if address.scheme == "file" else where
    if not of_job and (address.scheme in ("hf", "https") or _has_config(where)):
        return _of_folder(where, within_memory)
    return of_commit(where, step, within_memory)


def of_commit(folder: str, step: int | Literal["best", "last"], within_memory: bool = False) -> LoadedModel:
    """The model of a commit in a job's checkpoint folder."""
    commit = read_commit(folder, step)
    definition = definition_of(commit, folder, None)
    if definition.scores is not None:
        raise UserError(
            f"the checkpoint at step {commit.step} in {folder} scores texts (task {commit.config.get('task')}) and "
            "writes none; export it and open it with AutoModelForSequenceClassification"
        )
    model = definition.build(torch.float32, "none")
    if within_memory:
        _must_fit(model)
    definition.fill(model, CPU, 0, values=False)
    begin_with(folder, commit.step, model)
    tokenizer = tokenizer_from_commit(commit.tokenizer)
    return LoadedModel(definition, model.eval(), tokenizer, f"step {commit.step} of {commit.job}")


def _of_folder(where: str, within_memory: bool) -> LoadedModel:
    from muster.trainer.models import transformers_model

    folder = open_folder(open_files(where))
    if folder.tokenizer is None:
        raise UserError(f"{where}: holds no tokenizer.json, so that nothing can be asked of its model")
    tokenizer = tokenizer_of_folder(folder.tokenizer, folder.companions, where)
    definition = transformers_model.from_folder(folder, None)
    model = definition.build(torch.float32, "none")
    if within_memory:
        _must_fit(model)
    definition.fill(model, CPU, 0, values=True)
    return LoadedModel(definition, model.eval(), tokenizer, where)


def _must_fit(model: nn.Module) -> None:
    """Raises UserError where the model's fp32 weights take more memory than is free: filling them would end others."""
    needed = sum(weight.numel() for weight in model.parameters()) * 4
    free = psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"the model takes {size(needed)} in fp32, and {size(free)} of this machine's memory are free; serve its "
            "export on a GPU instead (`muster serve` prints how)"
        )


def _has_config(where: str) -> bool:
    """Return whether a folder holds a model. Raises UserError for an exported adapter, which is no model by itself."""
    files = open_files(where)
    try:
        files.read(CONFIG)
        return True
    except NotFound:
        pass
    try:
        files.read("adapter_config.json")
    except NotFound:
        return False
    raise UserError(
        f"{where} holds an adapter without its model: ask the job's checkpoint instead ({COMMITS}/ of its checkpoint "
        "folder), or export it with --format transformers"
    )
