"""The prompts of a data set: what stands before the first token that its documents would have in the loss.

In an evaluation set they are answered beside the loss of their documents; for task grpo they are the samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from muster.recipe.data_config import Source
from muster.recipe.training import TrainingConfig
from muster.trainer.data.packing import LostDocuments, PackedSample, PackedSource, unscored_row
from muster.trainer.data.shuffle import EpochShuffle, Int64s
from muster.trainer.data.store import DocumentRange, TokenStore
from muster.trainer.errors import UserError

Report = Callable[[str], None]


class ModelPrompt(NamedTuple):
    """Prompt for a model, and the columns of its record that verifiers read."""

    ids: list[int]
    columns: Mapping[str, Any]


class PromptSet:
    """The prompts of all documents, sources mixed, in an order that only contents decide. Of a longer prompt the last
    `tokens_max` tokens are given. Their stores were prepared with references."""

    def __init__(self, documents: Sequence[DocumentRange], tokens_max: int) -> None:
        self._documents, self._tokens_max = documents, tokens_max
        hashes = [part.store.hashes[part.first : part.last] for part in documents]
        sources = np.repeat(np.arange(len(documents)), [len(part) for part in documents])
        numbers = np.concatenate([np.arange(len(part)) for part in documents])
        order = np.argsort(np.concatenate(hashes), kind="stable")
        self._sources, self._numbers = sources[order], numbers[order]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> ModelPrompt:
        """Raises UserError for a document that begins with the answer."""
        return prompt_of(self._documents[self._sources[index]], int(self._numbers[index]), self._tokens_max)


class PromptPacking:
    """A prompt to a row; `pad` fills the rest. Of a source those are `usable`, by their numbers."""

    def __init__(self, documents: DocumentRange, usable: Int64s, length: int, pad: int, seed: int, stream: int) -> None:
        self._documents, self._usable, self._length, self._pad = documents, usable, length, pad
        self.samples, self.tokens = len(usable), int(documents.firsts[usable].sum())
        self._shuffle = EpochShuffle(np.arange(len(usable) + 1, dtype=np.int64), seed, stream)

    def prompt(self, epoch: int, index: int) -> ModelPrompt:
        (item,), _, _ = self._shuffle.window(epoch, index, index + 1)
        return prompt_of(self._documents, int(self._usable[item]), self._length)

    def sample(self, epoch: int, index: int) -> PackedSample:
        """The prompt as a row of which nothing is scored."""
        return unscored_row(self.prompt(epoch, index).ids, self._length, self._pad)


def packed_prompts(
    config: TrainingConfig, source: Source, documents: DocumentRange, pad: int, stream: int, report: Report
) -> PackedSource:
    """The prompts of a source, and what is left out. Raises UserError for prompts that are too long where
    data.truncation is error."""
    assert config.grpo is not None, "only task grpo learns from prompts alone"
    length, room = config.data.sequence_length, config.data.sequence_length - config.grpo.max_tokens
    firsts = documents.firsts
    long, empty = np.flatnonzero(firsts > room), np.flatnonzero(firsts < 1)
    words = f"their prompt is longer than data.sequenceLength {length} less grpo.maxTokens, {room} tokens"
    if config.data.truncation == "error" and len(long):
        raise UserError(f"data source {source.source}: {len(long):,} prompts: {words}; data.truncation is error")
    lost = tuple(
        each
        for each in (LostDocuments(words, long), LostDocuments("they begin with the answer", empty))
        if len(each.documents)
    )
    for each in lost:
        report(f"data: {source.source}: {len(each.documents):,} prompts are left out: {each.reason}")
    usable = np.flatnonzero((firsts <= room) & (firsts >= 1))
    packing = PromptPacking(documents, usable, length, pad, config.seed, stream) if len(usable) else None
    return PackedSource(documents, packing, 0, lost)


def prompt_of(documents: DocumentRange, number: int, tokens_max: int) -> ModelPrompt:
    """The prompt of a document, of a longer one the last `tokens_max` tokens. Raises UserError where there is none."""
    store, size = documents.store, int(documents.firsts[number])
    if size < 1:
        raise UserError(
            f"data source {store.meta.source}: a document has no prompt before the first token in the loss, so "
            "that there is nothing to answer; is data.trainOn `all`?"
        )
    begin = int(store.starts[documents.first + number])
    ids = store.tokens[begin + max(0, size - tokens_max) : begin + size]
    store.must_be_sound(ids)
    assert store.columns is not None and store.spans is not None, "references were taken of the records"  # noqa: PT018
    first, last = store.spans[documents.first + number]
    return ModelPrompt([int(token) for token in ids], json.loads(store.columns[first:last].tobytes()))


def columns_digest(store: TokenStore) -> str:
    """Equal for equal columns, whatever files they were read from."""
    assert store.columns is not None and store.spans is not None, "references were taken of the records"  # noqa: PT018
    state = hashlib.sha256()
    for first, last in store.spans:
        state.update(store.columns[first:last].data)
    return state.hexdigest()
