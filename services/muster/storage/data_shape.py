"""A quick look at training data: how much there is, in which format, how long its documents are. Of a sample of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from muster.plan.warnings import DataShape
from muster.recipe.architecture import BYTE_VOCABULARY
from muster.recipe.data_config import DataConfig, Source
from muster.recipe.data_formats import fits_task, wrong_format
from muster.recipe.training import TrainingConfig
from muster.storage.data_format import UnknownColumns, of_known_format, renamed_columns
from muster.storage.errors import StorageError
from muster.storage.records import is_table, read_records, rows_of_table
from muster.storage.settings import S3Settings
from muster.storage.sources import SourceFile, find
from muster.storage.text_size import bytes_per_token, text_bytes, text_tokens
from muster.words.address import parse_address
from muster.words.base import UserError

SAMPLE_BYTES: Final = 4 << 20  # that are read of all sources of the training together
EVALUATION_SAMPLE_BYTES: Final = 1 << 16  # that are read of each source of the evaluation: its first records are enough
ROWS_MAX: Final = 2_000  # that are read of a table
FILES_MAX: Final = 20_000


@dataclass(frozen=True)
class DataLook:
    """Result of a look at the data. `shape` is None where a source of the training can't be read from here; `gap` says
    why. `evaluation_gap` says which sources of the evaluation can't. `faults` are pairs of a path in the training and a
    message, for each source that no worker could read or that the task can't learn from."""

    shape: DataShape | None = None
    faults: tuple[tuple[str, str], ...] = ()
    gap: str = ""
    evaluation_gap: str = ""
    # Format and columns to write for the first source that has columns of no format, where their names tell them.
    suggested: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _SourceLook:
    """Facts from a look at one source."""

    format: str
    tokens: float  # of all its documents
    documents: float
    lengths: list[float]  # of some, in tokens


@dataclass
class _Findings:
    """Looks at sources so far, with what was wrong with some and why others could not be read."""

    task: str
    same_disk: bool
    per_token: float  # bytes of text
    looks: list[_SourceLook] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    suggested: Mapping[str, Any] = field(default_factory=dict)

    def add(self, path: str, source: Source, budget: int) -> None:
        """Look at a source, whose place in the training is `path`, and read about `budget` bytes of it."""
        kind = parse_address(source.source).scheme
        if kind not in ("file", "s3"):
            self.gaps.append(f"{source.source} is not read before the job starts")
            return
        if kind == "file" and not self.same_disk:
            self.gaps.append(f"{source.source} lies on the workers' disks, which the server does not see")
            return
        try:
            files = find(source.source, source.format, files_max=FILES_MAX, settings=S3Settings.for_a_look(os.environ))
        except (OSError, StorageError, ValueError, UserError) as error:
            # A job may name another store, or another account, by variables of its own.
            if kind == "file" and isinstance(error, UserError):
                self.faults.append((f"{path}.source", str(error)))
            self.gaps.append(str(error))
            return
        try:
            look = _look(source, files, self.task, budget, self.per_token)
        except UserError as error:
            self.faults.append((path, str(error)))
            self.gaps.append(str(error))
            if isinstance(error, UnknownColumns):
                self.suggested = self.suggested or error.suggested
            return
        except (OSError, StorageError, ValueError) as error:
            self.gaps.append(str(error))
            return
        self.looks.append(look)
        if not fits_task(look.format, self.task):
            words = f"the files look like this: {wrong_format(look.format, self.task)}"
            self.faults.append((f"{path}.format", words))


def look_at(training: TrainingConfig) -> DataShape | None:
    """Return the shape of the training data, or None if a source can't be read from here: it is on another machine's
    disk, on the web, built in or missing."""
    return examine(training).shape


def examine(training: TrainingConfig, same_disk: bool = True, vocabulary: int | None = None) -> DataLook:
    """Look at the first records of every source, of the evaluation's too. `same_disk` says whether the workers' files
    are this machine's. `vocabulary` is the number of the model's tokens, by which the text's tokens are estimated; None
    where it is not known."""
    if training.data.tokenizer == "bytes" and training.model.shape is not None:
        vocabulary = BYTE_VOCABULARY
    per_token = bytes_per_token(vocabulary)
    taught, scored = (_Findings(training.task, same_disk, per_token) for _ in range(2))
    for number, source in enumerate(training.data.train):
        taught.add(f"data.train[{number}]", source, SAMPLE_BYTES // len(training.data.train))
    for path, source in training.evaluation.sources() if training.evaluation is not None else ():
        scored.add(f"evaluation.{path}", source, EVALUATION_SAMPLE_BYTES)
    faults, evaluation_gap = (*taught.faults, *scored.faults), "; ".join(scored.gaps)
    if taught.gaps or not any(look.lengths for look in taught.looks):
        gap = "; ".join(taught.gaps) or "no record of it has a text"
        return DataLook(None, faults, gap, evaluation_gap, taught.suggested)
    return DataLook(_shape(training, taught.looks), faults, evaluation_gap=evaluation_gap)


def _shape(training: TrainingConfig, looks: Sequence[_SourceLook]) -> DataShape:
    looks = [_capped(look, source) for look, source in zip(looks, training.data.train, strict=True)]
    ordered = sorted(length for look in looks for length in look.lengths)
    at = [round(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) for share in (0.5, 0.9, 0.99)]
    trained = 1.0 - (training.evaluation.holdout if training.evaluation is not None else 0.0)
    return DataShape(
        documents=round(sum(look.documents for look in looks)),
        tokens=max(1, round(trained * _of_an_epoch(training.data, [look.tokens for look in looks]))),
        exact=False,
        lengths=(at[0], at[1], at[2]),
        formats=tuple(look.format for look in looks),
    )


def _capped(look: _SourceLook, source: Source) -> _SourceLook:
    """Return the part of a source that maxDocuments and maxTokens leave."""
    most_documents = float("inf") if source.max_documents is None else float(source.max_documents)
    most_tokens = float("inf") if source.max_tokens is None else float(source.max_tokens)
    left = min(1.0, most_documents / max(look.documents, 1.0), most_tokens / max(look.tokens, 1.0))
    return replace(look, documents=look.documents * left, tokens=look.tokens * left)


def _of_an_epoch(data: DataConfig, sizes: Sequence[float]) -> float:
    """Return what an epoch reads of sources of these sizes: all of them, or as often as `epochs` says, and with those
    as much of the others as their weights say."""
    if not data.in_epochs:
        return sum(sizes)
    counted = sum((source.epochs or 0.0) * size for source, size in zip(data.train, sizes, strict=True))
    return counted * (1.0 + sum(source.weight for source in data.train if source.epochs is None))


def _look(source: Source, files: tuple[SourceFile, ...], task: str, budget: int, per_token: float) -> _SourceLook:
    source, files = of_known_format(source, files, task)
    size = float(sum(file.size for file in files))
    if source.format == "text":
        lengths = [file.size / per_token for file in files]
        return _SourceLook("text", size / per_token, float(len(files)), lengths)
    some = files[:: max(1, len(files) // 4)][:4]
    lengths, read = list[float](), 0.0
    for file in some:
        row_lengths, part = _lengths(file, source, budget // len(some), per_token)
        lengths, read = lengths + row_lengths, read + part
    if not lengths or not read:
        return _SourceLook(source.format, 0.0, 0.0, [])
    return _SourceLook(source.format, size * sum(lengths) / read, size / read * len(lengths), lengths)


def _lengths(file: SourceFile, source: Source, budget: int, per_token: float) -> tuple[list[float], float]:
    """Return the tokens of the first documents of a file, and how many bytes of the file those documents take."""
    lengths, seen, counted, records = list[float](), [0], 0, 0
    rows = rows_of_table(file) if is_table(file) else 0

    def saw(block: memoryview) -> None:
        seen[0] += len(block)

    reading = read_records(file, renamed_columns(source), saw)
    try:
        for record in reading:
            # Bytes are read in blocks: when a block past the budget is asked for, those before it are used up.
            if seen[0] > budget and lengths and seen[0] > counted:
                return lengths, float(counted)
            counted, records = seen[0], records + 1
            if text_bytes(record.value, source.format, source.field) is not None:
                lengths.append(text_tokens(record.value, source.format, source.field, per_token))
            if rows and records == ROWS_MAX:
                break
    finally:
        reading.close()
    return lengths, file.size * records / rows if rows else float(counted)
