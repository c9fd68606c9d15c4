"""Tokens that a job adds to the vocabulary of its model's folder: which rows they get, and what else must say so."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from muster.storage.model_folder import CONFIG, ModelFolder, StoredTensor
from muster.trainer.errors import UserError


@dataclass(frozen=True)
class NewTokens:
    """The ids of the new tokens, and the number of ids that tokens had before. A table may have more rows than that,
    which are padding; new tokens take those first."""

    ids: tuple[int, ...]
    ids_before: int

    def rows_of(self, stored: StoredTensor) -> int:
        """Rows of a table that has this many rows now."""
        return max(stored.shape[0], max(self.ids) + 1)

    def tables(self, model: Any, names: Iterable[str]) -> list[str]:
        """Return those of a folder's tensors that have a row per token: embedding and head, by their modules' names."""
        tables = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
        modules = [name for name, module in model.named_modules() if id(module) in tables]
        own = {f"{module}.{part}" for module in modules for part in ("weight", "bias")}
        return [name for name in names if any(f".{full}".endswith(f".{name}") for full in own)]


def grown(folder: ModelFolder, new: NewTokens, tokenizer: str) -> ModelFolder:
    """The folder as its files will be once the tokens are in them, with the vocabulary's size in its config.json.

    `tokenizer` is the text of the tokenizer.json that has the new tokens.
    """
    rows = max(int(folder.config["vocab_size"]), max(new.ids) + 1)
    document = {**folder.config, "vocab_size": rows}
    companions = {**folder.companions, CONFIG: json.dumps(document, indent=2) + "\n"}
    return replace(folder, config=document, companions=companions, tokenizer=tokenizer)


def must_be_trained(model: Any) -> None:
    """Raise UserError where an adapter leaves a model's embedding or head as they are: rows of new tokens would stay
    what they begin with."""
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    tables: list[nn.Module] = [model.get_input_embeddings(), model.get_output_embeddings()]
    frozen = [named[id(table.weight)] for table in tables if not table.weight.requires_grad]
    if frozen:
        modules = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in frozen})
        raise UserError(
            f"data.addTokens: the adapter leaves {' and '.join(modules)} as they are, so new tokens would never be "
            f"learnt; train them whole: adapter.modulesToSave: [{', '.join(modules)}]"
        )
