"""Encoding of records into ids, many at a time. The result is the same in every process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from muster.recipe.data_config import Source
from muster.storage.records import RawRecord
from muster.trainer.data.documents import COMPARISONS, DocumentChunk, LeftOut, RecordReader
from muster.trainer.data.rules import NO_RULES, DocumentLook, RuleReader, TextRules
from muster.trainer.data.sketches import sketches_of
from muster.trainer.data.store import Array
from muster.trainer.data.tokenizer import Tokenizer
from muster.trainer.data.words import Uint64s
from muster.trainer.verify.references import ReferenceColumns

# Enough text for a tokenizer's threads to share, little enough to sit in memory several times.
BATCH_CHARACTERS = 1 << 20

# What is noted of each document, in the order in which they are read.
ROW: Final = np.dtype(
    [
        ("hash", np.uint64),
        ("tokens", np.int64),
        ("first", np.int64),  # the offset of its first token in the loss, where only some are
        ("split", np.int64),  # the offset of a pair's second side
        ("value", np.float32),  # a pair's margin, or an answer's label
        ("columns", np.int64),  # bytes of what verifiers read of the record
    ]
)


@dataclass(frozen=True)
class EncodingWork:
    """Settings by which each record of a source is encoded. They can be passed to another process."""

    source: Source
    tokenizer: Tokenizer
    train_on: str = "assistant"
    rules: TextRules = NO_RULES
    references: ReferenceColumns | None = None

    @property
    def scored(self) -> bool:
        """Return whether only some tokens are in the loss."""
        return self.source.format not in ("text", "jsonl")

    @property
    def compares(self) -> bool:
        return self.source.format in COMPARISONS

    @property
    def dtype(self) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
        """Return the dtype of the ids in a store."""
        return np.dtype(np.uint16) if self.tokenizer.vocab_size <= 1 << 16 else np.dtype(np.uint32)


@dataclass(frozen=True)
class EncodedDocuments:
    """Documents one after the other, without those that were dropped. Of pieces of texts there are `ids` alone."""

    ids: Array  # Work.dtype [tokens]
    loss_mask: Array  # uint8 [tokens], or none where every token counts
    rows: Array  # ROW [documents]
    columns: bytes
    sketches: Array  # uint32 [documents, SKETCH_VALUES], or none where nobody asks for them
    grams: Uint64s  # of one document after the other, where they are asked for
    kinds: Counter[str]
    left_out: LeftOut
    pieces: tuple[int, ...] = ()  # tokens of each piece of a text


class BatchEncoder:
    """Does the work, batch by batch; no batch knows of another."""

    def __init__(self, work: EncodingWork) -> None:
        self._work = work
        self._rules = RuleReader(work.rules) if work.rules else None

    def encode(self, units: Sequence[RawRecord | DocumentChunk]) -> EncodedDocuments:
        """The documents of these records, or the ids of these pieces of texts. Raises UserError."""
        work = self._work
        made = _EncodingResult(work, self._rules)
        if work.source.format == "text":
            for batch in batches(each for each in units if isinstance(each, DocumentChunk)):
                made.pieces += [piece.ids.astype(work.dtype) for piece in tokenised(batch, work.tokenizer)]
            return made.encoded()
        reading = RecordReader(work.source, work.tokenizer, work.train_on, self._rules, work.references)
        for batch in batches(reading.chunks(each for each in units if isinstance(each, RawRecord))):
            for chunk in tokenised(batch, work.tokenizer):
                made.add(chunk)
        return made.encoded(reading)


class TokenisedChunk(NamedTuple):
    """A chunk as ids, uint32, with 1 in `loss_mask` (uint8) where the loss counts the id."""

    chunk: DocumentChunk
    ids: Array
    loss_mask: Array
    split: int  # the offset of a pair's second side; 0 where there is none


def tokenised(batch: Sequence[DocumentChunk], tokenizer: Tokenizer) -> Iterator[TokenisedChunk]:
    """All texts of the batch at once, then put together again with the ids between them."""
    texts = iter(tokenizer.encode_many([part.text for chunk in batch for part in chunk.parts if not part.ids]))
    for chunk in batch:
        ids = [np.array(part.ids, np.uint32) if part.ids else next(texts) for part in chunk.parts]
        flags = np.array([part.loss_mask for part in chunk.parts], np.uint8)
        lengths = [len(each) for each in ids]
        split = 0 if chunk.split is None else sum(lengths[: chunk.split])
        yield TokenisedChunk(chunk, np.concatenate(ids), np.repeat(flags, lengths), split)


def batches(chunks: Iterable[DocumentChunk]) -> Iterator[list[DocumentChunk]]:
    """Chunks in lists of about BATCH_CHARACTERS of text."""
    batch: list[DocumentChunk] = []
    characters = 0
    for chunk in chunks:
        batch.append(chunk)
        characters += 64 + sum(len(part.text) for part in chunk.parts)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _EncodingResult:
    """Gathers what becomes of a batch."""

    def __init__(self, work: EncodingWork, rules: RuleReader | None) -> None:
        self.pieces: list[Array] = []  # of texts
        self._work, self._rules = work, rules
        self._open: list[Array] = []  # the chunks of the document that goes on
        self._open_masks: list[Array] = []
        self._ids: list[Array] = []
        self._masks: list[Array] = []
        self._rows: list[tuple[int, int, int, int, float, int]] = []
        self._columns = bytearray()
        self._dropped = LeftOut()
        self._notes = DocumentNotes(work.rules)

    def add(self, piece: TokenisedChunk) -> None:
        """The next chunk of a document. With its last one the document is kept, or dropped by the rules."""
        chunk = piece.chunk
        self._open.append(piece.ids.astype(self._work.dtype))
        self._open_masks.append(piece.loss_mask)
        if chunk.hash is None:
            return
        ids, masks = self._open, self._open_masks
        self._open, self._open_masks = [], []
        tokens = sum(map(len, ids))
        look = chunk.look
        if self._rules is not None and look is not None and (reason := self._rules.why_dropped(look, tokens)):
            self._dropped.add(reason, (f"{chunk.place}: {look.beginning}",))
            return
        self._notes.add(look, chunk.hash)
        self._ids += ids
        first = 0
        if self._work.scored:
            self._masks += masks
            first = int((masks[0] if len(masks) == 1 else np.concatenate(masks)).argmax())  # there is always one
        self._rows.append((chunk.hash, tokens, first, piece.split, chunk.value or 0.0, len(chunk.columns)))
        self._columns += chunk.columns

    def encoded(self, reading: RecordReader | None = None) -> EncodedDocuments:
        left_out = reading.left_out if reading else LeftOut()
        left_out.merge(self._dropped)
        return EncodedDocuments(
            ids=_joined(self._ids + self.pieces, self._work.dtype),
            loss_mask=_joined(self._masks, np.dtype(np.uint8)),
            rows=np.array(self._rows, ROW),
            columns=bytes(self._columns),
            sketches=self._notes.sketches(),
            grams=self._notes.grams(),
            kinds=reading.kinds if reading else Counter(),
            left_out=left_out,
            pieces=tuple(map(len, self.pieces)),
        )


class DocumentNotes:
    """Notes on the texts of documents, for comparing them with others later."""

    def __init__(self, rules: TextRules) -> None:
        self._rules = rules
        self._shingles: list[Uint64s] = []
        self._grams: list[Uint64s] = []

    def add(self, look: DocumentLook | None, content_hash: int) -> None:
        """Note the next document that is kept. `look` is None where it has no text."""
        if self._rules.shingle_words:
            shingles = (
                look.shingles() if look else np.zeros(0, np.uint64)
            )  # a text without words is like its equals alone
            self._shingles.append(shingles if len(shingles) else np.array([content_hash], np.uint64))
        if self._rules.collect and look is not None:
            self._grams.append(look.grams())

    def sketches(self) -> Array:
        """uint32 [documents, SKETCH_VALUES], in the order in which they came."""
        return sketches_of(self._shingles)

    def grams(self) -> Uint64s:
        """Return the n-grams, document by document; each occurs once per document."""
        return np.concatenate(self._grams) if self._grams else np.zeros(0, np.uint64)


def _joined(arrays: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)
