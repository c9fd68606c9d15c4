"""Writes one token store from its input files: documents are tokenised in batches, then indexed in hash order."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from muster.contract.data_config import Source
from muster.storage.sources import File, LocalFile
from muster.trainer.data.documents import Chunk, LeftOut, Reading
from muster.trainer.data.rules import NO_RULES, Look, Reader, Rules
from muster.trainer.data.sketches import Grams, Sketches
from muster.trainer.data.store import FORMAT_VERSION, Array, Meta, sync
from muster.trainer.data.tokenizer import Tokenizer
from muster.trainer.errors import UserError
from muster.trainer.verify.references import References

Say = Callable[[str], None]

# Enough text for a tokenizer's threads to share, little enough to sit in memory several times.
BATCH_CHARACTERS = 1 << 20
PROGRESS_SECONDS = 2.0


class Encoded(NamedTuple):
    """A chunk as ids, with 1 in `scored` (uint8) where the loss counts the id."""

    ids: Array
    loss_mask: Array
    hash: int | None
    split: int | None = None  # the offset of a pair's second side
    value: float | None = None  # a pair's margin, or an answer's label
    place: str = ""
    look: Look | None = None
    columns: bytes = b""  # what verifiers read of the record, as JSON


@dataclass
class _Index:
    """What is noted of each document, in the order in which they are read."""

    hashes: array[int] = field(default_factory=lambda: array("Q"))
    ends: array[int] = field(default_factory=lambda: array("q"))  # in tokens.bin
    firsts: array[int] = field(default_factory=lambda: array("q"))  # the offset of the first scored token
    splits: array[int] = field(default_factory=lambda: array("q"))  # the offset of a pair's second side
    values: array[float] = field(default_factory=lambda: array("f"))  # a pair's margin, or an answer's label
    columns: bytearray = field(default_factory=bytearray)  # what verifiers read of the records, one after the other
    column_ends: array[int] = field(default_factory=lambda: array("q"))
    written: int = 0  # tokens
    learnt: int = 0  # tokens in the loss
    first: int = -1  # the first scored token of the document that is being written; -1: it is still to come
    learning: int = 0  # tokens in the loss of that document


class Builder:
    """Memory: a few batches of text, and some 60 bytes per document for the index."""

    def __init__(
        self,
        folder: Path,
        source: Source,
        tokenizer: Tokenizer,
        key: str,
        say: Say,
        train_on: str = "assistant",
        rules: Rules = NO_RULES,
        references: References | None = None,
    ) -> None:
        self._rules, self._references = rules, references
        self._train_on = train_on
        self._folder, self._source, self._tokenizer, self._key = folder, source, tokenizer, key
        self._dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self._index = _Index()
        self._kinds, self._left_out = Counter[str](), LeftOut()
        self._read = 0
        self._sketches: Sketches | None = None
        self._grams = Grams() if rules.collect else None
        self._progress = Progress(source.source, say)

    @property
    def _scored(self) -> bool:
        """Whether only some tokens are in the loss."""
        return self._source.format not in ("text", "jsonl")

    def build(self, files: Sequence[File], digests: Sequence[str]) -> None:
        """Write the whole store; meta.json comes last. Raises UserError for bad input, OSError for a bad disk."""
        self._folder.mkdir()
        self._sketches = Sketches(self._folder) if self._rules.shingle_words else None
        self._progress.total = sum(file.size for file in files)
        with open(self._folder / "tokens.bin", "wb") as tokens, open(self._folder / "scored.bin", "wb") as scored:
            for batch in batches(self._chunks(files, digests)):
                for encoded in encode(batch, self._tokenizer):
                    self._write(encoded, tokens, scored)
        if not self._index.hashes:
            why = "every document in it is empty" if self._read else "all its files are empty"
            if self._left_out:
                why = "; ".join(
                    f"{count:,} lines are left out: {words}" for words, count in self._left_out.counts.items()
                )
            raise UserError(f"data source {self._source.source}: has nothing to train on: {why}")
        meta = self._write_index()
        if not self._scored:
            (self._folder / "scored.bin").unlink()
        for path in self._folder.iterdir():
            sync(path)
        meta.write(self._folder)
        sync(self._folder)
        self._progress.done(meta.documents, meta.tokens)

    def _chunks(self, files: Sequence[File], digests: Sequence[str]) -> Iterator[Chunk]:
        rules = Reader(self._rules) if self._rules else None
        for file, digest in zip(files, digests, strict=True):
            reading = Reading(file, self._advance, self._left_out, rules=rules, references=self._references)
            yield from reading.chunks(self._source, self._tokenizer, self._train_on)
            self._kinds += reading.kinds
            if isinstance(file, LocalFile) and reading.digest() != digest:
                raise UserError(
                    f"{file.address}: changed while it was being read; start again when nobody writes to it"
                )

    def _advance(self, count: int) -> None:
        self._read += count
        self._progress.at(self._read, self._index.written)

    def _write(self, encoded: Encoded, tokens: BinaryIO, loss_mask: BinaryIO) -> None:
        tokens.write(encoded.ids.astype(self._dtype).data)
        if self._scored:
            loss_mask.write(encoded.loss_mask.data)
            self._index.learning += int(np.count_nonzero(encoded.loss_mask))
            if self._index.first < 0 and encoded.loss_mask.any():
                self._index.first = self._index.written + int(encoded.loss_mask.argmax())
        self._index.written += len(encoded.ids)
        if encoded.hash is not None:
            start = self._index.ends[-1] if self._index.ends else 0
            if reason := self._why_dropped(encoded, self._index.written - start):
                seen = f": {encoded.look.beginning}" if encoded.look else ""
                self._left_out.add(reason, encoded.place + seen)
                self._forget(start, tokens, loss_mask)
                return
            if encoded.look is not None:
                if self._sketches is not None:
                    shingles = encoded.look.shingles()  # a text without words is like its equals alone
                    self._sketches.add(shingles if len(shingles) else np.array([encoded.hash], np.uint64))
                if self._grams is not None:
                    self._grams.add(encoded.look.grams())
            if self._scored:
                self._index.firsts.append(self._index.first - start)
                self._index.first = -1  # every conversation has a scored token
            self._index.learnt, self._index.learning = self._index.learnt + self._index.learning, 0
            if encoded.value is not None:
                self._index.values.append(encoded.value)
            if encoded.split is not None:
                self._index.splits.append(encoded.split)
            if self._references is not None:
                self._index.columns += encoded.columns
                self._index.column_ends.append(len(self._index.columns))
            self._index.hashes.append(encoded.hash)
            self._index.ends.append(self._index.written)

    def _why_dropped(self, encoded: Encoded, size: int) -> str | None:
        """Of a document of `size` tokens that has been written."""
        if encoded.look is not None and (reason := encoded.look.verdict()):
            return reason
        given = self._rules.curation.length if self._rules.curation else None
        least, most = (given.min_tokens, given.max_tokens) if given else (None, None)
        if least is not None and size < least:
            return f"has fewer tokens than length.minTokens {least}"
        if most is not None and size > most:
            return f"has more tokens than length.maxTokens {most}"
        return None

    def _forget(self, start: int, tokens: BinaryIO, loss_mask: BinaryIO) -> None:
        """Take back the document that was written from token `start` on."""
        tokens.seek(start * self._dtype.itemsize)
        tokens.truncate()
        if self._scored:
            loss_mask.seek(start)
            loss_mask.truncate()
        self._index.written, self._index.first, self._index.learning = start, -1, 0

    def _write_index(self) -> Meta:
        hashes, ends = np.frombuffer(self._index.hashes, np.uint64), np.frombuffer(self._index.ends, np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        order = np.argsort(hashes, kind="stable")
        bounds = np.zeros(len(order) + 1, np.int64)
        np.cumsum((ends - starts)[order], out=bounds[1:])
        index = {"hashes": hashes[order], "starts": starts[order], "bounds": bounds}
        if self._scored:
            index["firsts"] = np.frombuffer(self._index.firsts, np.int64)[order]
        if self._index.values:
            index["values"] = np.frombuffer(self._index.values, np.float32)[order]
        if self._index.splits:
            index["splits"] = np.frombuffer(self._index.splits, np.int64)[order]
        if self._references is not None:
            last = np.frombuffer(self._index.column_ends, np.int64)
            index["spans"] = np.stack((np.concatenate([np.zeros(1, np.int64), last[:-1]]), last), 1)[order]
            (self._folder / "columns.bin").write_bytes(self._index.columns)
        if self._sketches is not None:
            self._sketches.finish(order)
        if self._grams is not None:
            index["grams"] = self._grams.kept()
        for name, values in index.items():
            values.tofile(self._folder / f"{name}.bin")
        return Meta(
            version=FORMAT_VERSION,
            key=self._key,
            contents=hashlib.sha256(index["hashes"].data).hexdigest(),
            source=self._source.source,
            documents=len(hashes),
            tokens=self._index.written,
            dtype=self._dtype.name,
            scored=self._scored,
            bytes_read=self._read,
            vocab_size=self._tokenizer.vocab_size,
            compares="pairs" if self._index.splits else "labels" if self._index.values else "",
            kinds=dict(self._kinds),
            left_out=dict(self._left_out.counts),
            examples=self._left_out.examples,
            sketched=self._sketches is not None,
            grams=len(index["grams"]) if self._grams is not None else None,
            learnt=self._index.learnt if self._scored else self._index.written,
            columns=len(self._index.columns) if self._references is not None else None,
        )


def batches(chunks: Iterator[Chunk]) -> Iterator[list[Chunk]]:
    """Chunks in lists of about BATCH_CHARACTERS of text."""
    batch: list[Chunk] = []
    characters = 0
    for chunk in chunks:
        batch.append(chunk)
        characters += 64 + sum(len(part.text) for part in chunk.parts)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode(batch: Sequence[Chunk], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """All texts of the batch at once, then put together again with the ids between them."""
    texts = iter(tokenizer.encode_many([part.text for chunk in batch for part in chunk.parts if not part.ids]))
    for chunk in batch:
        ids = [np.array(part.ids, np.uint32) if part.ids else next(texts) for part in chunk.parts]
        flags = np.array([part.loss_mask for part in chunk.parts], np.uint8)
        lengths = [len(each) for each in ids]
        split = None if chunk.split is None else sum(lengths[: chunk.split])
        mask = np.repeat(flags, lengths)
        known = (chunk.value, chunk.place, chunk.look, chunk.columns)
        yield Encoded(np.concatenate(ids), mask, chunk.hash, split, *known)


class Progress:
    """Lines that a person who waits wants, which tell how much is done, how fast, and how long the rest will take."""

    def __init__(self, source: str, say: Say) -> None:
        self._source, self._say = source, say
        self._began = self._told = time.monotonic()
        self.total = 0  # bytes to read

    def at(self, read: int, tokens: int) -> None:
        """Say where we are, at most every PROGRESS_SECONDS."""
        now = time.monotonic()
        if now - self._told < PROGRESS_SECONDS or not read:
            return
        self._told = now
        rate = read / (now - self._began)
        left = max(self.total - read, 0) / rate
        self._say(
            f"data: preparing {self._source}: {read / 1e6:,.0f} of {self.total / 1e6:,.0f} MB "
            f"({read / max(self.total, 1):.0%}), {tokens / 1e6:,.1f} M tokens, {rate / 1e6:,.1f} MB/s, "
            f"{left:,.0f} s left"
        )

    def done(self, documents: int, tokens: int) -> None:
        seconds = time.monotonic() - self._began
        self._say(
            f"data: prepared {self._source}: {documents:,} documents, {tokens:,} tokens in {seconds:,.1f} s "
            f"({tokens / max(seconds, 1e-9) / 1e6:,.1f} M tokens/s)"
        )
