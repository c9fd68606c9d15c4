"""The token store: documents as ids in one memory-mapped file, with an index in an order that only contents decide.

    <cache>/tokens/<key>/tokens.bin       uint16 or uint32, document after document as they were read
                         scored.bin       uint8 per token, not of plain text: 1 where the loss counts the token
                         hashes.bin       uint64 per document, ascending: its content's hash
                         starts.bin       int64 per document, in the same order: where it begins in tokens.bin
                         bounds.bin       int64, documents + 1: running total of the lengths in that order
                         firsts.bin       int64 per document, where scored.bin is: offset of its first scored token
                         splits.bin       int64 per document, pairs only: offset of its second side
                         values.bin       float32 per document, preferences only: a pair's margin, an answer's label
                         sketches.bin     uint32 [documents, 128], where near duplicates are looked for: MinHash
                         grams.bin        uint64, ascending, of evaluation data: hashes of n-grams of words
                         columns.bin      where verifiers score answers: what they read of each record, as JSON
                         spans.bin        int64 [documents, 2], beside that: where its JSON begins and ends
                         meta.json        written last

Index order is hash order: it depends neither on the names, the number nor the order of the files, it is random with
respect to content, equal documents are neighbours, and a share of all documents is a range of it (the hold-out).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from muster.trainer.errors import StorageError

FORMAT_VERSION = 2
# Raised with any change of the tokens, or of what the loss counts of them, that the same conversations, texts with
# answers or pairs give: they are prepared anew. Plain text, which takes longest, has no part in it.
WRITING_VERSION = 1
META = "meta.json"
SKETCH_VALUES = 128  # of a MinHash: similarities are estimated to within 0.044 (one standard deviation at 0.5)
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class StoreMetadata:
    """Metadata of a store: its contents and its origin."""

    version: int
    key: str
    contents: str  # a hash over all documents' hashes: the same documents in other files have the same
    source: str  # the address that it was first prepared from, for messages
    documents: int
    tokens: int
    dtype: str
    scored: bool  # whether it has a loss mask
    bytes_read: int  # the size of the input
    vocab_size: int = 0  # every id is below it; 0: unknown, for an older Muster made the store
    compares: Literal["", "pairs", "labels"] = ""  # what is compared in a store of preferences
    kinds: dict[str, int] = field(default_factory=dict)  # what the lines looked like, in words, and how many did
    left_out: dict[str, int] = field(default_factory=dict)  # why lines were left out, and how many were
    examples: dict[str, list[str]] = field(default_factory=dict)  # the places of some of them, by the same reason
    learnt: int | None = None  # tokens in the loss; None: unknown, for an older Muster made the store
    sketched: bool = False  # whether it has sketches
    grams: int | None = None  # how many n-grams of words it has; None: they were not asked for
    columns: int | None = None  # bytes of what verifiers read of the records; None: they were not asked for

    def write(self, folder: Path) -> None:
        (folder / META).write_text(json.dumps(asdict(self), indent=1) + "\n")

    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        sizes = {
            "tokens.bin": self.tokens * np.dtype(self.dtype).itemsize,
            "hashes.bin": self.documents * 8,
            "starts.bin": self.documents * 8,
            "bounds.bin": (self.documents + 1) * 8,
        }
        if self.scored:
            sizes |= {"scored.bin": self.tokens, "firsts.bin": self.documents * 8}
        if self.compares:
            sizes |= {"values.bin": self.documents * 4}
        if self.sketched:
            sizes |= {"sketches.bin": self.documents * SKETCH_VALUES * 4}
        if self.grams is not None:
            sizes |= {"grams.bin": self.grams * 8}
        if self.columns is not None:
            sizes |= {"columns.bin": self.columns, "spans.bin": self.documents * 16}
        return sizes | ({"splits.bin": self.documents * 8} if self.compares == "pairs" else {})


@dataclass(frozen=True)
class TokenStore:
    """Read-only arrays over the files; see the module's text for their meaning."""

    meta: StoreMetadata
    tokens: Array
    loss_mask: Array | None  # None where every token counts
    hashes: Array
    starts: Array
    bounds: Array
    firsts: Array | None  # None where every token counts
    folder: Path | None = None  # None for arrays in memory
    splits: Array | None = None  # None but for pairs
    values: Array | None = None  # None but for preferences
    sketches: Array | None = None  # None but where near duplicates are looked for
    grams: Array | None = None  # None but for evaluation data that training data are held against
    columns: Array | None = None  # None but where verifiers score answers
    spans: Array | None = None

    def must_be_sound(self, ids: Array) -> None:
        """Raises StorageError for ids of this store that its tokenizer doesn't have: the file was damaged since it was
        made. It is set aside first, so that whoever opens it next makes it anew, from the same documents the same.
        """
        if self.meta.vocab_size and len(ids) and (highest := int(ids.max())) >= self.meta.vocab_size:
            if self.folder is not None:
                with contextlib.suppress(FileNotFoundError):  # a neighbour was faster
                    (self.folder / META).rename(self.folder / f"{META}.damaged")
            raise StorageError(
                f"the token store {self.folder} of {self.meta.source} is damaged: it holds the id {highest}, and its "
                f"tokenizer has {self.meta.vocab_size}; it is made anew when it is next opened"
            )

    @staticmethod
    def open(folder: Path) -> TokenStore | None:
        """The store in the folder; None when there is none, or not a whole one of this format version."""
        try:
            meta = StoreMetadata(**json.loads((folder / META).read_text()))
            whole = all((folder / name).stat().st_size == size for name, size in meta.sizes().items())
        except (OSError, ValueError, TypeError):
            return None
        if meta.version != FORMAT_VERSION or not whole:
            return None

        def array(name: str, dtype: str) -> Array:
            # As a plain array: np.memmap pays Python overhead for every slice.
            return np.asarray(np.memmap(folder / f"{name}.bin", dtype, mode="r"))

        return TokenStore(
            meta=meta,
            tokens=array("tokens", meta.dtype),
            loss_mask=array("scored", "uint8") if meta.scored else None,
            hashes=array("hashes", "uint64"),
            starts=array("starts", "int64"),
            bounds=array("bounds", "int64"),
            firsts=array("firsts", "int64") if meta.scored else None,
            folder=folder,
            splits=array("splits", "int64") if meta.compares == "pairs" else None,
            values=array("values", "float32") if meta.compares else None,
            sketches=array("sketches", "uint32").reshape(-1, SKETCH_VALUES) if meta.sketched else None,
            grams=array("grams", "uint64") if meta.grams else None if meta.grams is None else np.zeros(0, np.uint64),
            columns=None if not meta.columns else array("columns", "uint8"),
            spans=None if not meta.columns else array("spans", "int64").reshape(-1, 2),
        )


@dataclass(frozen=True)
class DocumentRange:
    """A range of a store's documents in index order: [first, last)."""

    store: TokenStore
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def bounds(self) -> Array:
        """The running total of the lengths, int64 [documents + 1]; it need not start at 0."""
        return self.store.bounds[self.first : self.last + 1]

    @property
    def firsts(self) -> Array:
        """The offset of each document's first scored token, int64 [documents], at least 1. Not of plain text."""
        assert self.store.firsts is not None
        return self.store.firsts[self.first : self.last]

    @property
    def tokens(self) -> int:
        return int(self.store.bounds[self.last] - self.store.bounds[self.first])


def hold_out(stores: Sequence[TokenStore], share: float) -> int:
    """The hash below which a document is evaluated and not trained on: about `share` of all documents.

    The same content falls on the same side everywhere, so no duplicate straddles the split. Where share > 0, at least
    one content is on either side. Raises ValueError when there is only one content.
    """
    if share == 0:
        return 0
    smallest = min(int(store.hashes[0]) for store in stores if store.meta.documents)
    largest = max(int(store.hashes[-1]) for store in stores if store.meta.documents)
    if smallest == largest:
        raise ValueError("all documents have the same content")
    return min(max(int(share * 2**64), smallest + 1), largest)


def split(store: TokenStore, threshold: int) -> tuple[DocumentRange, DocumentRange]:
    """(training, evaluation) by hold_out's threshold."""
    cut = int(np.searchsorted(store.hashes, np.uint64(threshold)))
    return DocumentRange(store, cut, store.meta.documents), DocumentRange(store, 0, cut)


def capped(documents: DocumentRange, count: int | None, tokens: int | None) -> DocumentRange:
    """The first of them, as many as there may be and as have so many tokens together. Their order is that of hashes,
    so they are as good as drawn at random, and the same in however many files they lie."""
    last = documents.last if count is None else min(documents.last, documents.first + count)
    if tokens is not None:
        bounds = documents.bounds
        last = min(last, documents.first + int(np.searchsorted(bounds, bounds[0] + tokens, side="right")) - 1)
    return DocumentRange(documents.store, documents.first, last)


def shared_contents(one: DocumentRange, other: DocumentRange) -> int:
    """Count the documents of `one` whose content `other` has too."""
    mine, theirs = one.store.hashes[one.first : one.last], other.store.hashes[other.first : other.last]
    places = np.searchsorted(theirs, mine)
    places[places == len(theirs)] = 0
    return int(np.count_nonzero(theirs[places] == mine)) if len(theirs) else 0


def sync(path: Path) -> None:
    """Make a file or folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
