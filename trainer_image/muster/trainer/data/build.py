"""Writes one token store from its input files: in order, while other processes tokenise what comes next.

What was written is kept every few seconds, so that a preparation that is killed goes on from there. The same input
gives the same bytes, however many processes take part and however often they are killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from muster.storage.records import RawRecord
from muster.storage.sources import LocalFile, SourceFile
from muster.trainer.data.documents import DocumentChunk
from muster.trainer.data.draft import InputPosition, StoreDraft, clean
from muster.trainer.data.encode import BATCH_CHARACTERS, ROW, DocumentNotes, EncodedDocuments, EncodingWork
from muster.trainer.data.index import write_index
from muster.trainer.data.processes import in_order, processes_for
from muster.trainer.data.reading import FileReading
from muster.trainer.data.rules import RuleReader
from muster.trainer.data.store import FORMAT_VERSION, META, StoreMetadata, TokenStore, sync
from muster.trainer.errors import UserError
from muster.words.text import counted, plural

Report = Callable[[str], None]

PROGRESS_SECONDS = 2.0
# How often what is written is kept. At half of it the disk is waited for more often, at double more is done again.
KEEP_SECONDS = 5.0


class RecordBatch(NamedTuple):
    """Records, or pieces of texts, that are tokenised together."""

    units: list[RawRecord | DocumentChunk]
    position: InputPosition  # after the last of them

    @property
    def for_others(self) -> list[RawRecord | DocumentChunk]:
        """The units without what only this process needs."""
        return [unit._replace(look=None) if isinstance(unit, DocumentChunk) else unit for unit in self.units]


class StoreBuilder:
    """Memory: a few batches of text for each process, and while the index is made some 24 bytes per document."""

    def __init__(self, folder: Path, work: EncodingWork, key: str, say: Report) -> None:
        self._folder, self._work, self._key, self._say = folder, work, key, say
        self._rules = RuleReader(work.rules) if work.rules else None
        self._read = 0
        self._lines = ProgressLines(work.source.source, say)

    def build(self, files: Sequence[SourceFile], digests: Sequence[str]) -> None:
        """Write the whole store, or what is missing of it; meta.json comes before the rest is cleaned away. Raises
        UserError for bad input, OSError for a bad disk."""
        if TokenStore.open(self._folder) is None:
            with StoreDraft(self._folder, self._work) as draft:
                self._write(draft, files, digests)
                self._finish(draft)
        whole = TokenStore.open(self._folder)
        assert whole is not None, "all its files have the sizes that meta.json says"
        clean(self._folder, whole)
        sync(self._folder)

    def _write(self, draft: StoreDraft, files: Sequence[SourceFile], digests: Sequence[str]) -> None:
        self._lines.total = sum(file.size for file in files)
        done = draft.progress.position
        if done != InputPosition():
            self._read = sum(file.size for file in files[: done.file])
            self._lines.going_on(self._read, draft.progress.documents)
        kept = time.monotonic()
        batches = self._batches(self._units(draft, files, digests))
        for batch, encoded in in_order(batches, self._work, processes_for(self._lines.total - self._read)):
            self._append(draft, batch, encoded)
            if time.monotonic() - kept >= KEEP_SECONDS:
                draft.keep()
                kept = time.monotonic()
        if not draft.progress.documents:
            raise UserError(f"data source {self._work.source.source}: has nothing to train on: {self._why_none(draft)}")

    def _why_none(self, draft: StoreDraft) -> str:
        if draft.progress.left_out.counts:
            lost = draft.progress.left_out.counts.items()
            return "; ".join(counted(count, f"lines are left out: {words}") for words, count in lost)
        return "every document in it is empty" if self._lines.total else "all its files are empty"

    def _units(
        self, draft: StoreDraft, files: Sequence[SourceFile], digests: Sequence[str]
    ) -> Iterator[tuple[InputPosition, RawRecord | DocumentChunk]]:
        """Yield the units that are not done yet. The file that was being read is read again from its beginning: this
        takes a small part of the time that tokenising it takes, and shows whether the file is unchanged."""
        done = draft.progress.position
        for number, (file, digest) in enumerate(zip(files, digests, strict=True)):
            if number < done.file:
                continue
            reading = FileReading(file, lambda count: self._advance(count, draft))
            for count, unit in enumerate(reading.units(self._work.source, self._work.tokenizer, self._rules), 1):
                position = InputPosition(number, count)
                if position > done:
                    yield position, unit
            if isinstance(file, LocalFile) and reading.digest() != digest:
                raise UserError(
                    f"{file.address}: changed while it was being read; start again when nobody writes to it"
                )

    @staticmethod
    def _batches(units: Iterator[tuple[InputPosition, RawRecord | DocumentChunk]]) -> Iterator[RecordBatch]:
        """Units in lists of about BATCH_CHARACTERS of text."""
        batch: list[RawRecord | DocumentChunk] = []
        characters = 0
        position = InputPosition()
        for position, unit in units:
            batch.append(unit)
            characters += 64 + _size(unit)
            if characters >= BATCH_CHARACTERS:
                yield RecordBatch(batch, position)
                batch, characters = [], 0
        if batch:
            yield RecordBatch(batch, position)

    def _advance(self, count: int, draft: StoreDraft) -> None:
        self._read += count
        self._lines.at(self._read, draft.progress.tokens)

    def _append(self, draft: StoreDraft, batch: RecordBatch, encoded: EncodedDocuments) -> None:
        draft.add(self._texts(draft, batch, encoded) if encoded.pieces else encoded)
        draft.progress.position = batch.position

    def _texts(self, draft: StoreDraft, batch: RecordBatch, encoded: EncodedDocuments) -> EncodedDocuments:
        """Write the tokens of a batch, and return the notes on the texts that end in it."""
        progress, notes, rows, at = draft.progress, DocumentNotes(self._work.rules), [], 0
        for unit, count in zip(batch.units, encoded.pieces, strict=True):
            assert isinstance(unit, DocumentChunk)
            draft.add_tokens(encoded.ids[at : at + count])
            at += count
            if unit.hash is None:
                continue
            reason = self._rules.why_dropped(unit.look, progress.open) if self._rules and unit.look else None
            if reason and unit.look:
                encoded.left_out.add(reason, (f"{unit.place}: {unit.look.beginning}",))
                draft.forget_open()
                continue
            notes.add(unit.look, unit.hash)
            rows.append((unit.hash, progress.open, 0, 0, 0.0, 0))
            progress.open = 0
        noted = replace(encoded, rows=np.array(rows, ROW), sketches=notes.sketches(), grams=notes.grams())
        return replace(noted, ids=encoded.ids[:0])

    def _finish(self, draft: StoreDraft) -> None:
        """Write the index and meta.json, and make all of it survive a power cut."""
        work, progress = self._work, draft.progress
        index = write_index(draft, work)
        meta = StoreMetadata(
            version=FORMAT_VERSION,
            key=self._key,
            contents=index.contents,
            source=work.source.source,
            documents=progress.documents,
            tokens=progress.tokens,
            dtype=work.dtype.name,
            scored=work.scored,
            bytes_read=self._lines.total,
            vocab_size=work.tokenizer.vocab_size,
            compares=index.compares,
            kinds=dict(sorted(progress.kinds.items())),
            left_out=dict(sorted(progress.left_out.counts.items())),
            examples=dict(sorted(progress.left_out.examples.items())),
            learnt=progress.learnt,
            sketched=bool(work.rules.shingle_words),
            grams=index.grams,
            columns=index.columns,
        )
        for path in self._folder.glob("*.bin"):
            sync(path)
        meta.write(self._folder)
        sync(self._folder / META)
        self._lines.done(meta.documents, meta.tokens)


def _size(unit: RawRecord | DocumentChunk) -> int:
    """Characters of a unit, about."""
    if isinstance(unit, DocumentChunk):
        return sum(len(part.text) for part in unit.parts)
    if unit.line:
        return len(unit.value)
    return len(repr(unit.value))


class ProgressLines:
    """Lines that a person who waits wants, which tell how much is done, how fast, and how long the rest will take."""

    def __init__(self, source: str, say: Report) -> None:
        self._source, self._say = source, say
        self._began = self._reported_at = time.monotonic()
        self._there = 0  # bytes that were prepared before
        self.total = 0  # bytes to read

    def going_on(self, read: int, documents: int) -> None:
        """Say that so much is there already."""
        self._there = read
        share = read / max(self.total, 1)
        there = counted(documents, "documents are prepared already")
        self._say(f"data: going on with {self._source} from {share:.0%}: {there}")

    def at(self, read: int, tokens: int) -> None:
        """Say where we are, at most every PROGRESS_SECONDS."""
        now = time.monotonic()
        if now - self._reported_at < PROGRESS_SECONDS or read <= self._there:
            return
        self._reported_at = now
        rate = max(read - self._there, 1) / (now - self._began)
        left = max(self.total - read, 0) / rate
        self._say(
            f"data: preparing {self._source}: {read / 1e6:,.0f} of {self.total / 1e6:,.0f} MB "
            f"({read / max(self.total, 1):.0%}), {tokens / 1e6:,.1f} M tokens, {rate / 1e6:,.1f} MB/s, "
            f"{left:,.0f} s left"
        )

    def done(self, documents: int, tokens: int) -> None:
        seconds = time.monotonic() - self._began
        self._say(
            f"data: prepared {self._source}: {plural(documents, 'document')}, {plural(tokens, 'token')} "
            f"in {seconds:,.1f} s "
            f"({tokens / max(seconds, 1e-9) / 1e6:,.1f} M tokens/s)"
        )
