"""From a training configuration to data sets: stores are prepared, split, packed and mixed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from muster.contract.data_config import Source
from muster.contract.data_formats import CONVERSATIONS
from muster.contract.objectives import PREFERENCE_TASKS
from muster.contract.training import TrainingConfig
from muster.trainer.data import store as stores
from muster.trainer.data.comparisons import must_have_both_labels, packed_pairs
from muster.trainer.data.mixture import Mixture
from muster.trainer.data.packing import ConcatPacking, DocumentPacking, Packing, Sample, best_fit, one_each
from muster.trainer.data.prepare import prepared, with_formats
from muster.trainer.data.store import Documents, TokenStore
from muster.trainer.data.tokenizer import Tokenizer
from muster.trainer.errors import UserError

Report = Callable[[str], None]

# The smallest part that can be held out is one document. What is more than asked for is told; where it is so much more
# that training would miss a good part of its data unawares, the job is refused.
HOLDOUT_EXCESS_WARNED, HOLDOUT_EXCESS_MAX = 2.0, 10.0

ORDER_VERSION = 1  # raised with any change that gives other samples, or another order, for the same data


class Dataset:
    """Samples of (seed, epoch, index): no state, the same on every rank. Parts are mixed by weight."""

    def __init__(self, parts: Sequence[Packing], weights: Sequence[Fraction], seed: int) -> None:
        self.seed = seed
        self.parts = tuple(parts)
        self._mixture = Mixture([part.samples for part in parts], weights)
        self.samples_per_epoch = self._mixture.samples_per_epoch

    def sample(self, epoch: int, index: int) -> Sample:
        """Raises IndexError outside of [0, samples_per_epoch)."""
        if not 0 <= index < self.samples_per_epoch or epoch < 0:
            raise IndexError(f"no sample {index} of epoch {epoch}; an epoch has {self.samples_per_epoch}")
        source, own_epoch, own_index = self._mixture.find(epoch * self.samples_per_epoch + index)
        return self.parts[source].sample(own_epoch, own_index)


@dataclass(frozen=True)
class Data:
    """The data sets of a run."""

    train: Dataset
    evaluation: Dataset | None  # None where the configuration asks for none
    # Equal for equal contents, tokenizer and settings, that is for an equal order of equal samples, whatever the files'
    # names and number. A resumed job whose fingerprint differs would see other data than its commit did.
    fingerprint: str


def open_data(config: TrainingConfig, tokenizer: Tokenizer, cache_dir: Path, report: Report) -> Data:
    """Prepare what is not prepared yet, and open it. Every process of a gang may call this at the same time.

    `report` is called with a line of text now and then. Raises UserError for bad input, StorageError when a disk or
    store fails.
    """
    _must_fit(tokenizer, config)
    config = with_formats(config, report)
    evaluation, train_on = config.evaluation, config.data.train_on
    opened = [prepared(source, tokenizer, cache_dir, report, train_on) for source in config.data.train]
    threshold = _threshold(opened, evaluation.holdout if evaluation else 0.0, report)
    training, held_out = zip(*(stores.split(store, threshold) for store in opened), strict=True)
    maker = _Maker(config, tokenizer.eos, report)
    train = maker.training(training)
    fingerprint = _fingerprint(config, tokenizer, opened)
    if evaluation is None:
        return Data(train, None, fingerprint)
    if not evaluation.data:
        return Data(train, maker.evaluation(config.data.train, held_out), fingerprint)
    apart = [prepared(source, tokenizer, cache_dir, report, train_on) for source in evaluation.data]
    _tell_overlap(opened, apart, report)
    return Data(train, maker.evaluation(evaluation.data, [stores.split(store, 0)[0] for store in apart]), fingerprint)


@dataclass(frozen=True)
class _Maker:
    """Makes data sets of documents."""

    config: TrainingConfig
    pad: int  # the id that fills a sample
    report: Report

    def training(self, documents: Sequence[Documents]) -> Dataset:
        packed = self._packed(self.config.data.train, documents)
        # A weight is written in decimals: 0.1 means a tenth, not the nearest double.
        weights = [Fraction(repr(self.config.data.train[number].weight)) for number in packed]
        for number, source in enumerate(self.config.data.train):
            if number not in packed:
                self.report(f"data: warning: nothing of {source.source} is left to train on; its weight has no effect")
        must_have_both_labels(packed.values())
        return self._dataset("training", documents, packed, weights)

    def evaluation(self, sources: Sequence[Source], documents: Sequence[Documents]) -> Dataset:
        """Every sample once per epoch, so the weights are the sizes."""
        packed = self._packed(sources, documents)
        return self._dataset("evaluation", documents, packed, [Fraction(part.samples) for part in packed.values()])

    def _dataset(
        self, name: str, documents: Sequence[Documents], packed: dict[int, Packing], weights: Sequence[Fraction]
    ) -> Dataset:
        length = self.config.data.sequence_length
        if not packed:  # text always leaves something
            silent = "in no conversation does the assistant speak within the first"
            lost = "of no pair of answers are both sides left within"
            words = lost if any(one.store.meta.compares for one in documents) else silent
            raise UserError(f"{name} data: {words} {length} tokens; raise data.sequenceLength")
        dataset = Dataset(list(packed.values()), weights, self.config.seed)
        self.report(
            f"data: {name}: {sum(map(len, documents)):,} documents, {sum(part.tokens for part in documents):,} tokens, "
            f"{dataset.samples_per_epoch:,} samples of {length} tokens per epoch"
        )
        return dataset

    def _packed(self, sources: Sequence[Source], documents: Sequence[Documents]) -> dict[int, Packing]:
        """By the source's number, those that have any samples."""
        tried = (
            self._pack(source, part, number)
            for number, (source, part) in enumerate(zip(sources, documents, strict=True))
        )
        return {number: packing for number, packing in enumerate(tried) if packing is not None}

    def _pack(self, source: Source, documents: Documents, stream: int) -> Packing | None:
        length, seed = self.config.data.sequence_length, self.config.seed
        chat = source.format in CONVERSATIONS
        if not len(documents):
            return None
        if documents.store.meta.compares:
            return packed_pairs(self.config, source, documents, self.pad, stream, self.report)
        if self.config.data.packing and not chat:
            return ConcatPacking(documents, length, self.pad, seed, stream)
        sizes = np.diff(documents.bounds)
        usable = np.flatnonzero(documents.firsts <= length) if chat else np.arange(len(documents))
        # The last token of a document that is one longer than a sample is still a label.
        truncated = int(np.count_nonzero(sizes[usable] > length + 1))
        self._say_what_is_lost(source, len(documents) - len(usable), truncated)
        if not len(usable):
            return None
        clipped = np.minimum(sizes[usable], length)
        members, edges = best_fit(clipped, length) if self.config.data.packing else one_each(len(usable))
        return DocumentPacking(documents, usable[members], edges, length, self.pad, seed, stream)

    def _say_what_is_lost(self, source: Source, silent: int, truncated: int) -> None:
        length = self.config.data.sequence_length
        if truncated:
            self.report(
                f"data: {source.source}: {truncated:,} documents are longer than {length} tokens and are truncated"
            )
        if silent:
            self.report(
                f"data: {source.source}: {silent:,} conversations are left out: the assistant does not speak within "
                f"their first {length} tokens"
            )


def _must_fit(tokenizer: Tokenizer, config: TrainingConfig) -> None:
    shape = config.model.shape
    if shape and tokenizer.vocab_size > shape.vocab_size:
        raise UserError(
            f"the tokenizer {config.data.tokenizer} has {tokenizer.vocab_size} tokens, the model only "
            f"{shape.vocab_size}; choose a model with a larger vocabulary, or another tokenizer"
        )


def _threshold(opened: Sequence[TokenStore], holdout: float, report: Report) -> int:
    """The hash below which a document is evaluated. Raises UserError where that is far more than was asked for."""
    try:
        threshold = stores.hold_out(opened, holdout)
    except ValueError as error:
        raise UserError(
            f"evaluation.holdout keeps whole documents out of training, but {error} (a text file is one document); "
            "add files, use format jsonl, or give evaluation.data"
        ) from None
    documents = sum(store.meta.documents for store in opened)
    held = sum(len(stores.split(store, threshold)[1]) for store in opened)
    if held > HOLDOUT_EXCESS_WARNED * holdout * documents:
        words = (
            f"evaluation.holdout {holdout:g} of {documents:,} documents holds out {held:,} of them "
            f"({held / documents:.0%}), for a document is held out whole"
        )
        if held > HOLDOUT_EXCESS_MAX * holdout * documents:
            raise UserError(
                f"{words}; set holdout to {held / documents:.2g} if that is meant, add documents (format jsonl makes "
                "each line one), or give evaluation.data"
            )
        report(f"data: warning: {words}")
    return threshold


def _fingerprint(config: TrainingConfig, tokenizer: Tokenizer, opened: Sequence[TokenStore]) -> str:
    sources = [
        [store.meta.contents, store.meta.tokens, source.format, source.weight]
        for store, source in zip(opened, config.data.train, strict=True)
    ]
    settings: list[object] = [config.data.sequence_length, config.data.packing, config.seed, ORDER_VERSION]
    settings += [config.data.truncation] if config.task in PREFERENCE_TASKS else []
    holdout = config.evaluation.holdout if config.evaluation else 0.0
    document = json.dumps([sources, settings, holdout, tokenizer.describe()], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()


def _tell_overlap(training: Sequence[TokenStore], evaluation: Sequence[TokenStore], report: Report) -> None:
    for held in evaluation:
        for store in training:
            shared = stores.shared_contents(stores.split(held, 0)[0], stores.split(store, 0)[0])
            if shared:
                report(
                    f"data: warning: {shared:,} of {held.meta.documents:,} evaluation documents of {held.meta.source} "
                    f"are also in the training data {store.meta.source}: the evaluation loss will look too good"
                )
