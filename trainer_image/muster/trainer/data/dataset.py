"""Data sets of a training configuration: their stores are prepared, split, packed and mixed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from muster.recipe.data_config import Source, source_names
from muster.recipe.data_formats import CONVERSATIONS
from muster.recipe.objectives import PREFERENCE_TASKS
from muster.recipe.training import TrainingConfig
from muster.trainer.data import store as stores
from muster.trainer.data.comparisons import must_have_both_labels, packed_pairs
from muster.trainer.data.documents import NOT_READ, is_warned_of
from muster.trainer.data.duplicates import without_duplicates
from muster.trainer.data.mixture import SourceMixture, SourceShares, shares_of
from muster.trainer.data.packing import (
    ConcatPacking,
    DocumentPacking,
    PackedSample,
    PackedSource,
    SamplePacking,
    best_fit,
    one_each,
)
from muster.trainer.data.prepare import prepared, with_formats
from muster.trainer.data.prompts import ModelPrompt, PromptPacking, PromptSet, columns_digest, packed_prompts
from muster.trainer.data.rules import NO_RULES, TextRules
from muster.trainer.data.store import DocumentRange, TokenStore, capped
from muster.trainer.data.tokenizer import Tokenizer
from muster.trainer.data.truncation import cut_documents
from muster.trainer.errors import UserError
from muster.trainer.verify.references import ReferenceColumns, evaluated_sources
from muster.words.text import counted, plural

Report = Callable[[str], None]

# The smallest part that can be held out is one document. What is more than asked for is told; where it is so much more
# that training would miss a good part of its data unawares, the job is refused.
HOLDOUT_EXCESS_WARNED, HOLDOUT_EXCESS_MAX = 2.0, 10.0

WARNING = "data: warning: "

ORDER_VERSION = 1  # raised with any change that gives other samples, or another order, for the same data


class SampleSet:
    """Samples of (seed, epoch, index): no state, the same on every rank. Parts are mixed by weight."""

    def __init__(
        self,
        parts: Sequence[SamplePacking],
        shares: SourceShares,
        seed: int,
        names: Sequence[str] = (),
        samples_max: int | None = None,
    ) -> None:
        """`names` says what the source of each part is called; left out, its number. `samples_max` are the first
        samples of the first epoch, which every epoch then repeats; None takes all of each."""
        self.seed = seed
        self.parts = tuple(parts)
        self.names = tuple(names) or tuple(str(number) for number in range(len(parts)))
        self._mixture = SourceMixture([part.samples for part in parts], shares.weights, shares.per_epoch)
        self._repeats = samples_max is not None
        whole = self._mixture.samples_per_epoch
        self.samples_per_epoch = whole if samples_max is None else min(samples_max, whole)

    def sample(self, epoch: int, index: int) -> PackedSample:
        """Raises IndexError outside of [0, samples_per_epoch)."""
        if not 0 <= index < self.samples_per_epoch or epoch < 0:
            raise IndexError(f"no sample {index} of epoch {epoch}; an epoch has {self.samples_per_epoch}")
        source, own_epoch, own_index = self._mixture.find(self._number(epoch, index))
        return self.parts[source].sample(own_epoch, own_index)

    def prompt(self, sample_id: int) -> ModelPrompt:
        """The prompt of task grpo that is the sample of this number, counted on over all epochs."""
        source, own_epoch, own_index = self._mixture.find(self._number(*divmod(sample_id, self.samples_per_epoch)))
        part = self.parts[source]
        assert isinstance(part, PromptPacking), "only task grpo learns from prompts"
        return part.prompt(own_epoch, own_index)

    def source_of(self, epoch: int, index: int) -> int:
        """The number of the part that a sample is of."""
        return self._mixture.find(self._number(epoch, index))[0]

    def _number(self, epoch: int, index: int) -> int:
        return index if self._repeats else epoch * self.samples_per_epoch + index


@dataclass(frozen=True)
class RunData:
    """The data sets of a run. `packed` says of each training source, and `evaluated` of each source that is evaluated,
    what became of its documents; `warnings` were told."""

    train: SampleSet
    evaluation: SampleSet | None  # of evaluation.data or evaluation.holdout; None where there is neither
    # Equal for equal contents, tokenizer and settings, that is for an equal order of equal samples, whatever the files'
    # names and number. A resumed job whose fingerprint differs would see other data than its commit did.
    fingerprint: str
    config: TrainingConfig  # with the format of every source
    packed: tuple[PackedSource, ...]
    evaluated: tuple[PackedSource, ...] = ()
    warnings: tuple[str, ...] = ()
    sets: Mapping[str, SampleSet] = field(default_factory=dict)  # of evaluation.sets
    prompts: Mapping[str, PromptSet] = field(default_factory=dict)  # of those that are answered

    @property
    def held_out(self) -> tuple[SampleSet, ...]:
        """All that is evaluated on."""
        return (*((self.evaluation,) if self.evaluation else ()), *self.sets.values())


def open_data(config: TrainingConfig, tokenizer: Tokenizer, cache_dir: Path, report: Report) -> RunData:
    """Prepare what is not prepared yet, and open it. Every process of a gang may call this at the same time.

    `report` is called with a line of text now and then. Raises UserError for bad input, StorageError when a disk or
    store fails.
    """
    warnings = list[str]()

    def heard(line: str) -> None:
        if line.startswith(WARNING):
            warnings.append(line.removeprefix(WARNING))
        report(line)

    return replace(_open_data(config, tokenizer, cache_dir, heard), warnings=tuple(warnings))


def _open_data(config: TrainingConfig, tokenizer: Tokenizer, cache_dir: Path, report: Report) -> RunData:
    _must_fit(tokenizer, config)
    config = with_formats(config, report)
    evaluation, train_on = config.evaluation, config.data.train_on
    curation = config.data.curation
    collect = TextRules(collect=curation.decontamination.ngram) if curation and curation.decontamination else NO_RULES
    evaluation_stores = [
        prepared(source, tokenizer, cache_dir, report, train_on, collect, references)
        for source, references in (evaluated_sources(evaluation) if evaluation else ())
    ]
    rules = TextRules(curation, tuple(evaluation_stores) if collect else ())
    rewarded = ReferenceColumns(config.grpo.verifiers) if config.grpo else None
    whole = [prepared(source, tokenizer, cache_dir, report, train_on, rules, rewarded) for source in config.data.train]
    for store in (*whole, *evaluation_stores):
        _report_kinds(store, report)
    opened = without_duplicates(whole, curation, tokenizer, cache_dir, report)
    _report_dropped(opened, report)
    threshold = _threshold(opened, evaluation.holdout if evaluation else 0.0, report)
    training, held_out = zip(*(stores.split(store, threshold) for store in opened), strict=True)
    maker = _DatasetMaker(config, tokenizer.eos, report)
    train, packed = maker.training(training)
    data = RunData(train, None, _fingerprint(config, tokenizer, opened), config, packed)
    _report_small_data(config, train, report)
    if evaluation is None:
        return data
    evaluated: list[PackedSource] = []

    def apart(sources: Sequence[Source], name: str) -> SampleSet:
        stores_apart = [next(held_apart) for _ in sources]
        _report_overlap(opened, stores_apart, report)
        every = [stores.split(store, 0)[0] for store in stores_apart]
        dataset, parts = maker.evaluation(sources, _limit_documents(sources, every, report), name)
        evaluated.extend(parts)
        return dataset

    held_apart = iter(evaluation_stores)
    main = apart(evaluation.data, "evaluation") if evaluation.data else None
    if evaluation.holdout:
        main, parts = maker.evaluation(config.data.train, held_out)
        evaluated.extend(parts)
    sets, prompts = dict[str, SampleSet](), dict[str, PromptSet]()
    for name, each in evaluation.sets.items():
        before = len(evaluated)
        sets[name] = apart(each.data, f"evaluation set {name}")
        if each.answers is not None:
            of_set = [part.documents for part in evaluated[before:]]
            prompts[name] = PromptSet(of_set, config.data.sequence_length)
    return replace(data, evaluation=main, evaluated=tuple(evaluated), sets=sets, prompts=prompts)


@dataclass(frozen=True)
class _DatasetMaker:
    """Makes data sets of documents."""

    config: TrainingConfig
    pad: int  # the id that fills a sample
    report: Report

    def training(self, documents: Sequence[DocumentRange]) -> tuple[SampleSet, tuple[PackedSource, ...]]:
        sources = self.config.data.train
        documents = _limit_documents(sources, documents, self.report)
        every = self._packed(sources, documents, learnt=True)
        packed = _those_with_samples(every)
        sizes = [packing.samples for packing in packed.values()]
        shares = shares_of([sources[number] for number in packed], sizes, self.config.data.temperature)
        for number, given, size in zip(packed, shares.per_epoch, sizes, strict=True):
            if sources[number].epochs is not None:
                self.report(f"data: {sources[number].source}: {given:,} samples an epoch, of {size:,}")
        for number, source in enumerate(sources):
            if number not in packed:
                self.report(f"{WARNING}nothing of {source.source} is left to train on; its weight has no effect")
        must_have_both_labels(packed.values())
        return self._dataset("training", every, packed, shares, samples_max=self.config.data.overfit), every

    def evaluation(
        self, sources: Sequence[Source], documents: Sequence[DocumentRange], name: str = "evaluation"
    ) -> tuple[SampleSet, tuple[PackedSource, ...]]:
        """Every sample once per epoch, so the weights are the sizes. `name` is what people are told of."""
        every = self._packed(sources, documents)
        packed = _those_with_samples(every)
        sizes = tuple(part.samples for part in packed.values())
        shares = SourceShares(tuple(Fraction(size) for size in sizes), sizes)
        return self._dataset(name, every, packed, shares, source_names(sources)), every

    def _dataset(
        self,
        name: str,
        every: Sequence[PackedSource],
        packed: dict[int, SamplePacking],
        shares: SourceShares,
        names: Sequence[str] = (),
        samples_max: int | None = None,
    ) -> SampleSet:
        length = self.config.data.sequence_length
        if not packed:  # text always leaves something
            silent = "in no conversation does the assistant speak within the first"
            lost = "of no pair of answers are both sides left within"
            words = lost if any(each.documents.store.meta.compares for each in every) else silent
            if self.config.grpo is not None and name == "training":
                words = f"no prompt leaves room for an answer of grpo.maxTokens {self.config.grpo.max_tokens} within"
            raise UserError(f"{name} data: {words} {length} tokens; raise data.sequenceLength")
        called = [names[number] for number in packed] if names else ()
        dataset = SampleSet(list(packed.values()), shares, self.config.seed, called, samples_max)
        self.report(
            f"data: {name}: {plural(sum(each.used for each in every), 'document')}, "
            f"{plural(sum(each.used_tokens for each in every), 'token')}, "
            f"{plural(dataset.samples_per_epoch, 'sample')} of {length} tokens per epoch"
        )
        return dataset

    def _packed(
        self, sources: Sequence[Source], documents: Sequence[DocumentRange], learnt: bool = False
    ) -> tuple[PackedSource, ...]:
        return tuple(
            self._pack(source, part, number, learnt)
            for number, (source, part) in enumerate(zip(sources, documents, strict=True))
        )

    def _pack(self, source: Source, documents: DocumentRange, stream: int, learnt: bool) -> PackedSource:
        length, seed = self.config.data.sequence_length, self.config.seed
        chat = source.format in CONVERSATIONS
        if not len(documents):
            return PackedSource(documents, None)
        if self.config.grpo is not None and learnt:
            return packed_prompts(self.config, source, documents, self.pad, stream, self.report)
        if documents.store.meta.compares:
            return packed_pairs(self.config, source, documents, self.pad, stream, self.report)
        if self.config.data.packing and not chat:
            return PackedSource(documents, ConcatPacking(documents, length, self.pad, seed, stream))
        cut = cut_documents(documents, length, self.config.data.truncation, chat, source.source)
        if cut.truncated:
            self.report(
                f"data: {source.source}: "
                + counted(cut.truncated, f"documents are longer than {length} tokens and are truncated")
            )
        for lost in cut.lost:
            what = "conversations" if chat else "documents"
            self.report(f"data: {source.source}: {counted(len(lost.documents), f'{what} are left out: {lost.reason}')}")
        if not len(cut.usable):
            return PackedSource(documents, None, lost=cut.lost)
        clipped = np.minimum(np.diff(documents.bounds)[cut.usable], length)
        members, edges = best_fit(clipped, length) if self.config.data.packing else one_each(len(clipped))
        packing = DocumentPacking(documents, cut.usable[members], edges, length, self.pad, seed, stream, cut.begins)
        return PackedSource(documents, packing, cut.truncated, cut.lost)


def _limit_documents(
    sources: Sequence[Source], documents: Sequence[DocumentRange], report: Report
) -> list[DocumentRange]:
    """Return the documents of each source that maxDocuments and maxTokens leave. Raises UserError where they leave
    nothing."""
    limited = []
    for source, whole in zip(sources, documents, strict=True):
        part = capped(whole, source.max_documents, source.max_tokens)
        if len(whole) and not len(part):
            raise UserError(
                f"data source {source.source}: maxTokens {source.max_tokens:,} leaves nothing of it, for the first "
                f"document that is chosen has {int(whole.bounds[1] - whole.bounds[0]):,} tokens; raise it"
            )
        if len(part) < len(whole):
            report(f"data: {source.source}: {len(part):,} of {len(whole):,} documents are used, as asked")
        limited.append(part)
    return limited


def _those_with_samples(packed: Sequence[PackedSource]) -> dict[int, SamplePacking]:
    """Return the packings that have samples, by the number of their source."""
    return {number: each.packing for number, each in enumerate(packed) if each.packing is not None}


def _report_dropped(opened: Sequence[TokenStore], report: Report) -> None:
    for store in opened:
        if not store.meta.compares:  # what is left out of preferences is told with the rest that becomes of them
            for reason, count in store.meta.left_out.items():
                report(f"data: {store.meta.source}: {counted(count, f'documents are left out: {reason}')}")


def _report_kinds(store: TokenStore, report: Report) -> None:
    """Tell what the records look like, and what of them nobody learns or sees."""
    kinds, name = store.meta.kinds, store.meta.source
    for words, count in kinds.items():
        if NOT_READ not in words:
            report(f"{WARNING if is_warned_of(words) else 'data: '}{name}: {counted(count, words)}")
    if columns := [words.partition(NOT_READ)[2] for words in kinds if NOT_READ in words]:
        report(f"data: {name}: columns that are not read: {', '.join(columns)}")


def _report_small_data(config: TrainingConfig, train: SampleSet, report: Report) -> None:
    step = config.samples_per_step()
    if train.samples_per_epoch < step and config.data.overfit is None:
        report(
            f"{WARNING}a step takes {step:,} samples and an epoch has {train.samples_per_epoch:,}: every step sees "
            "some of them again; lower batch.tokensPerStep, or add data"
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
    apart = sum(len(stores.split(store, threshold)[1]) for store in opened)
    if apart > HOLDOUT_EXCESS_WARNED * holdout * documents:
        words = (
            f"evaluation.holdout {holdout:g} of {documents:,} documents holds out {apart:,} of them "
            f"({apart / documents:.0%}), for a document is held out whole"
        )
        if apart > HOLDOUT_EXCESS_MAX * holdout * documents:
            raise UserError(
                f"{words}; set holdout to {apart / documents:.2g} if that is meant, add documents (format jsonl makes "
                "each line one), or give evaluation.data"
            )
        report(f"{WARNING}{words}")
    return threshold


def _fingerprint(config: TrainingConfig, tokenizer: Tokenizer, opened: Sequence[TokenStore]) -> str:
    sources = [
        [store.meta.contents, store.meta.tokens, source.format, source.weight, *_chosen(source)]
        for store, source in zip(opened, config.data.train, strict=True)
    ]
    settings: list[object] = [config.data.sequence_length, config.data.packing, config.seed, ORDER_VERSION]
    settings += [config.data.truncation] if config.task in PREFERENCE_TASKS or config.data.truncation != "right" else []
    settings += [{"overfit": config.data.overfit}] if config.data.overfit is not None else []
    settings += [{"temperature": config.data.temperature}] if config.data.temperature is not None else []
    if config.grpo is not None:
        settings += [{"prompts": config.grpo.max_tokens, "columns": [columns_digest(store) for store in opened]}]
    holdout = config.evaluation.holdout if config.evaluation else 0.0
    settings += [{"writing": stores.WRITING_VERSION}] if any(store.meta.scored for store in opened) else []
    document = json.dumps([sources, settings, holdout, tokenizer.describe()], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()


def _chosen(source: Source) -> list[object]:
    """Return the settings of a source that its fingerprint holds in addition to contents and weight; empty where there
    are none."""
    chosen = {"epochs": source.epochs, "documents": source.max_documents, "tokens": source.max_tokens}
    settings = {name: value for name, value in chosen.items() if value is not None}
    return [settings] if settings else []


def _report_overlap(training: Sequence[TokenStore], evaluation: Sequence[TokenStore], report: Report) -> None:
    for one in evaluation:
        for store in training:
            shared = stores.shared_contents(stores.split(one, 0)[0], stores.split(store, 0)[0])
            if shared:
                report(
                    f"{WARNING}{shared:,} of {one.meta.documents:,} evaluation documents of {one.meta.source} "
                    f"are also in the training data {store.meta.source}: the evaluation loss will look too good"
                )
