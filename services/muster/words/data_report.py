"""Report of a job's data preparation by the trainer: counts, lengths and omitted records. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from muster.words.base import Record
from muster.words.text import counted, plural

DATA_REPORT_KEY = "data-report.json"  # in the job's checkpoint folder
EXAMPLES_MAX = 3  # of what was left out, for each reason
SHOWN_SAMPLES = 3  # of the first that training takes
SHOWN_TOKENS_MAX = 2_000  # of each of them: some pages to read, and less than 100 kB in the report


class LeftOut(Record):
    """Documents that give no sample, for one reason. An example is a place in a file, or how the document begins."""

    reason: str
    documents: int
    examples: tuple[str, ...] = ()


class LengthCount(Record):
    """Number of documents with `first` to `last` tokens."""

    first: int
    last: int
    documents: int


class SourceReport(Record):
    """One source. `documents` and `tokens` are those of its files that are used so; `learnt` of the tokens are in the
    loss (None: not counted). `duplicates` have the content of another document, and `truncated` ones are longer than a
    sample. `samples` are those of one epoch of the source, and `filled` is the share of their tokens that is not
    padding."""

    source: str
    use: Literal["training", "evaluation"]
    format: str
    documents: int
    tokens: int
    learnt: int | None = None
    duplicates: int = 0
    lengths: tuple[LengthCount, ...] = ()
    truncated: int = 0
    samples: int = 0
    filled: float = 0.0
    looks: dict[str, int] = {}
    left_out: tuple[LeftOut, ...] = ()


class Stretch(Record):
    """Neighbouring tokens of one document of a sample that are all in the loss (`learnt`), or none of them."""

    document: int  # counted from 0 within the sample
    text: str
    tokens: int
    learnt: bool


class ShownSample(Record):
    """A sample as the model sees it. `compares` says what the documents of a pair are called, in turn; empty where
    there are no pairs. `cut` tokens of its end are not shown."""

    stretches: tuple[Stretch, ...]
    padding: int = 0
    compares: tuple[str, ...] = ()
    cut: int = 0


class DataReport(Record):
    """The whole of a job's data. `samples_per_epoch` are those of the training sources, mixed; `samples_per_step` go
    into one step of the optimizer; `shown` are the first samples of training."""

    sequence_length: int
    samples_per_epoch: int
    samples_per_step: int
    sources: tuple[SourceReport, ...]
    warnings: tuple[str, ...] = ()
    shown: tuple[ShownSample, ...] = ()


def report_lines(report: DataReport) -> list[str]:
    """The report for people."""
    lines = [
        f"{plural(report.samples_per_epoch, 'sample')} of {report.sequence_length:,} tokens in an epoch, "
        f"{report.samples_per_step:,} in a step"
    ]
    for source in report.sources:
        lines += ["", f"{source.use}: {source.source} ({source.format})", *_of_source(source)]
    return [*lines, *([""] if report.warnings else []), *(f"warning: {warning}" for warning in report.warnings)]


def _of_source(source: SourceReport) -> Iterator[str]:
    learnt = "" if source.learnt is None else f", {source.learnt:,} of them in the loss"
    yield f"  {plural(source.documents, 'document')}, {plural(source.tokens, 'token')}{learnt}"
    yield from (f"  {counted(count, looks)}" for looks, count in source.looks.items())
    if source.duplicates:
        share = source.duplicates / source.documents
        words = f"documents ({share:.1%}) have the content of another: curation.exactDuplicates"
        yield f"  {counted(source.duplicates, words)}"
    yield f"  {plural(source.samples, 'sample')}, {source.filled:.1%} of their tokens not padding"
    share = source.truncated / max(1, source.documents)
    words = f"documents ({share:.1%}) are longer than a sample and are truncated"
    yield f"  {counted(source.truncated, words)}"
    most = max((each.documents for each in source.lengths), default=1)
    for each in source.lengths:
        bar = "█" * max(1, round(30 * each.documents / most))
        yield f"  {each.first:>11,} to {each.last:>11,} tokens {each.documents:>11,}  {bar}"
    for lost in source.left_out:
        yield f"  {lost.documents:,} left out: {lost.reason}"
        yield from (f"    {example}" for example in lost.examples)
