"""Report on the prepared data in numbers, for `muster data` and for the job's folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import numpy as np

from muster.recipe.data_config import Source
from muster.trainer.data.dataset import RunData
from muster.trainer.data.packing import PackedSource
from muster.trainer.data.rendering import RenderedSample, excerpt, render
from muster.trainer.data.store import DocumentRange
from muster.trainer.data.tokenizer import Tokenizer
from muster.words.data_report import (
    EXAMPLES_MAX,
    SHOWN_TOKENS_MAX,
    DataReport,
    LeftOut,
    LengthCount,
    ShownSample,
    SourceReport,
    Stretch,
)
from muster.words.redaction import redact

AT_ONCE: Final = 1 << 20  # documents whose lengths are counted at a time: 8 MB


def data_report(data: RunData, tokenizer: Tokenizer) -> DataReport:
    """The report of data that is open. Reads the index alone, and the beginnings of some documents."""
    config, evaluation = data.config, data.config.evaluation
    training = [
        _of_source(source, "training", packed, config.data.sequence_length, tokenizer)
        for source, packed in zip(config.data.train, data.packed, strict=True)
    ]
    divided = config.data.train if evaluation and evaluation.holdout else ()
    sources = (*divided, *(source for _, source in evaluation.sources())) if evaluation else ()
    evaluated = [
        _of_source(source, "evaluation", packed, config.data.sequence_length, tokenizer)
        for source, packed in zip(sources, data.evaluated, strict=True)
    ]
    return DataReport(
        sequence_length=config.data.sequence_length,
        samples_per_epoch=data.train.samples_per_epoch,
        samples_per_step=config.samples_per_step(),
        sources=(*training, *evaluated),
        warnings=data.warnings,
    )


def first_samples(data: RunData, tokenizer: Tokenizer, count: int) -> Iterator[RenderedSample]:
    """The first that training will take."""
    compares = {"pairs": ("chosen", "rejected"), "labels": ("answer", "another answer, not learnt"), "": ()}
    stores = {each.documents.store.meta.compares for each in data.packed}
    called = compares[next(iter(stores))] if len(stores) == 1 else ()
    for index in range(min(count, data.train.samples_per_epoch)):
        yield render(data.train.sample(0, index), tokenizer, called)


def shown_sample(rendered: RenderedSample) -> ShownSample:
    """Return a sample as the report keeps it: whole stretches up to SHOWN_TOKENS_MAX tokens, and the beginning of the
    one after."""
    kept, left = list[Stretch](), SHOWN_TOKENS_MAX
    for each in rendered.stretches:
        if left <= 0:
            break
        tokens = min(each.tokens, left)
        text = each.text[: len(each.text) * tokens // each.tokens]
        kept.append(Stretch(document=each.document, text=text, tokens=tokens, learnt=each.learnt))
        left -= tokens
    cut = rendered.tokens - sum(each.tokens for each in kept)
    return ShownSample(stretches=tuple(kept), padding=rendered.padding, compares=rendered.compares, cut=cut)


def _of_source(
    source: Source, use: Literal["training", "evaluation"], packed: PackedSource, length: int, tokenizer: Tokenizer
) -> SourceReport:
    documents, packing = packed.documents, packed.packing
    meta = documents.store.meta
    whole = len(documents) == meta.documents  # else a part of it is held out, and the store counts both
    lost = [
        LeftOut(
            reason=each.reason,
            documents=len(each.documents),
            examples=tuple(
                excerpt(documents.store, documents.first + int(number), tokenizer)
                for number in each.documents[:EXAMPLES_MAX]
            ),
        )
        for each in packed.lost
    ]
    read = [
        LeftOut(reason=reason, documents=count, examples=tuple(meta.examples.get(reason, ())))
        for reason, count in meta.left_out.items()
        if use == "training" or whole
    ]
    return SourceReport(
        source=redact(source.source),
        use=use,
        format=source.format,
        documents=len(documents),
        tokens=documents.tokens,
        learnt=meta.learnt if whole else None,
        duplicates=_duplicates(documents),
        lengths=_lengths(documents),
        truncated=packed.truncated,
        samples=packing.samples if packing else 0,
        filled=packing.tokens / (packing.samples * length) if packing else 0.0,
        looks=meta.kinds,
        left_out=(*read, *lost),
    )


def _duplicates(documents: DocumentRange) -> int:
    """Count the documents that have the content of an earlier one. The hashes of contents are in order."""
    hashes = documents.store.hashes[documents.first : documents.first + len(documents)]
    count = 0
    for at in range(1, len(hashes), AT_ONCE):
        some = hashes[at : at + AT_ONCE]
        count += int(np.count_nonzero(some == hashes[at - 1 : at - 1 + len(some)]))
    return count


def _lengths(documents: DocumentRange) -> tuple[LengthCount, ...]:
    """Count the documents of 1 token, of 2 to 3, of 4 to 7, and so on: between powers of two."""
    counts = np.zeros(64, np.int64)
    for at in range(0, len(documents), AT_ONCE):
        sizes = np.diff(documents.bounds[at : at + AT_ONCE + 1])
        counts += np.bincount(np.frexp(sizes.astype(np.float64))[1], minlength=64)
    return tuple(
        LengthCount(first=1 << (power - 1), last=(1 << power) - 1, documents=int(counts[power]))
        for power in np.flatnonzero(counts).tolist()
        if power
    )
