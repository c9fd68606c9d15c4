"""Packing of documents into samples of a fixed length. `documents` separates them, so that no document attends to
another.

ConcatPacking (pretrain, `packing: true`): each epoch lays its documents end to end in its own order and cuts every
sequence_length tokens. A cut document goes on in the next sample as a document of its own. Every token is in exactly
one sample of an epoch; the last sample is padded.

DocumentPacking (sft, and `packing: false`): a document is never cut in two. With packing, best fit puts as many as
possible into each sample, once for all epochs; the epoch decides the order of the samples. Without, each document has
its own. A document that is longer than a sample is truncated (truncation.py). Padding has label -100 and document -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from muster.trainer.data.shuffle import EpochShuffle, Int64s
from muster.trainer.data.store import DocumentRange

IGNORED = -100
PADDING = -1

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


class PackedSample(NamedTuple):
    """One row of a batch; the first four arrays are int32 [T]."""

    tokens: Int32s
    labels: Int32s  # [t] is the token after tokens[t] in its document, IGNORED where the loss does not count it
    positions: Int32s  # restart at 0 with each document
    documents: Int32s  # 0, 1, … within the sample; PADDING behind the last
    # float32, by the number of the document: what it is to be compared by (a pair's margin, an answer's label) and the
    # log-probability that the reference model gives its answer. None where the task asks for no such thing.
    targets: Float32s | None = None
    reference: Float32s | None = None


class SamplePacking(Protocol):
    """Samples by epoch and index. Every epoch has equally many."""

    @property
    def samples(self) -> int: ...
    @property
    def tokens(self) -> int: ...  # of all samples of an epoch, without padding
    def sample(self, epoch: int, index: int) -> PackedSample: ...


class LostDocuments(NamedTuple):
    """Documents that give no sample, by their numbers, and why."""

    reason: str
    documents: Int64s


class PackedSource(NamedTuple):
    """Result of packing a source's documents. `packing` is None where none of them are left; `truncated` counts those
    that are left and are longer than a sample."""

    documents: DocumentRange
    packing: SamplePacking | None
    truncated: int = 0
    lost: tuple[LostDocuments, ...] = ()

    @property
    def used(self) -> int:
        """Number of documents that give a sample."""
        return len(self.documents) - len(self._left_out())

    @property
    def used_tokens(self) -> int:
        """Number of tokens of those documents, before truncation."""
        return self.documents.tokens - int(np.diff(self.documents.bounds)[self._left_out()].sum())

    def _left_out(self) -> Int64s:
        return np.unique(np.concatenate([np.zeros(0, np.int64), *(each.documents for each in self.lost)]))


class ConcatPacking:
    """Documents of at least one token in all, end to end, `length` tokens a sample; `pad` fills the last one."""

    def __init__(self, documents: DocumentRange, length: int, pad: int, seed: int, stream: int) -> None:
        self._documents, self._length, self._pad = documents, length, pad
        self._shuffle = EpochShuffle(documents.bounds, seed, stream)
        self.samples, self.tokens = -(-self._shuffle.size // length), self._shuffle.size

    def sample(self, epoch: int, index: int) -> PackedSample:
        begin = index * self._length
        end = min(begin + self._length, self._shuffle.size)
        items, first, last = self._shuffle.window(epoch, begin, end)
        return _gathered(self._documents, items, first, last, self._length, self._pad)


class DocumentPacking:
    """Whole documents; those of sample i are members[edges[i] : edges[i + 1]], before the epoch shuffles them. Document
    n is taken from its token begins[n] on, or from its first."""

    def __init__(
        self,
        documents: DocumentRange,
        members: Int64s,
        edges: Int64s,
        length: int,
        pad: int,
        seed: int,
        stream: int,
        begins: Int64s | None = None,
    ) -> None:
        self._documents, self._members, self._edges = documents, members, edges
        self._begins = np.zeros(len(documents), np.int64) if begins is None else begins
        self._length, self._pad = length, pad
        self.samples = len(edges) - 1
        self._shuffle = EpochShuffle(np.arange(len(edges), dtype=np.int64), seed, stream)

    @property
    def tokens(self) -> int:
        bounds = self._documents.bounds
        return int(np.minimum(bounds[self._members + 1] - bounds[self._members], self._length).sum())

    def sample(self, epoch: int, index: int) -> PackedSample:
        (bin_,), _, _ = self._shuffle.window(epoch, index, index + 1)
        items = self._members[self._edges[bin_] : self._edges[bin_ + 1]]
        bounds = self._documents.bounds
        begins = self._begins[items]
        ends = begins + np.minimum(bounds[items + 1] - bounds[items], self._length)
        return _gathered(self._documents, items, begins, ends, self._length, self._pad)


def _gathered(
    documents: DocumentRange, items: Int64s, first: Int64s, last: Int64s, length: int, pad: int
) -> PackedSample:
    """The stretches [first, last) of these documents behind each other, then padding up to `length`."""
    store, bounds = documents.store, documents.bounds
    sizes = last - first
    total = int(sizes.sum())
    ends = np.cumsum(sizes)
    number = np.repeat(np.arange(len(items), dtype=np.int32), sizes)
    positions = np.arange(total) - np.repeat(ends - sizes, sizes)
    places = np.repeat(store.starts[documents.first + items] + first, sizes) + positions

    sample = empty_sample(length)
    tokens = store.tokens[places]
    store.must_be_sound(tokens)
    sample.tokens[:total], sample.tokens[total:] = tokens, pad
    sample.positions[:total], sample.positions[total:] = positions, np.arange(length - total)
    sample.documents[:total], sample.documents[total:] = number, PADDING
    # Inside a stretch the label is the next token here; at its end it is the next one in the store, if there is one.
    sample.labels[: total - 1], sample.labels[total - 1 :] = sample.tokens[1:total], IGNORED
    goes_on = last < bounds[items + 1] - bounds[items]
    following = store.tokens[places[ends - 1] + goes_on]
    store.must_be_sound(following)
    sample.labels[ends - 1] = np.where(goes_on, following, np.int32(IGNORED))
    if store.loss_mask is not None:
        counted = np.zeros(length, np.bool_)
        counted[: total - 1] = store.loss_mask[places[1:]]
        counted[ends - 1] = goes_on & (store.loss_mask[places[ends - 1] + goes_on] != 0)
        sample.labels[~counted] = IGNORED
    return sample


def empty_sample(length: int) -> PackedSample:
    """A row of `length` tokens, to be filled."""
    tokens, labels, positions, documents = np.empty((4, length), np.int32)
    return PackedSample(tokens, labels, positions, documents)


def unscored_row(tokens: Sequence[int], length: int, pad: int) -> PackedSample:
    """A document's tokens, of which none is scored, and padding up to `length`."""
    made, total = empty_sample(length), len(tokens)
    made.tokens[:total], made.tokens[total:] = tokens, pad
    made.labels[:] = IGNORED
    made.positions[:total], made.positions[total:] = np.arange(total), np.arange(length - total)
    made.documents[:total], made.documents[total:] = 0, PADDING
    return made


def one_each(count: int) -> tuple[Int64s, Int64s]:
    """(members, edges) of bins with one item each."""
    return np.arange(count, dtype=np.int64), np.arange(count + 1, dtype=np.int64)


def best_fit(sizes: Int64s, capacity: int) -> tuple[Int64s, Int64s]:
    """Fill bins by best fit decreasing, and return them as (members, edges).

    The largest item goes first, each into the fullest bin that has room (Johnson 1973: at most 11/9 of the best
    possible number of bins, plus 4). `sizes` lie in [1, capacity]. The `members` are the numbers of the items, bin
    after bin, and `edges` [bins + 1] is where each bin begins and ends among them.

    Items of one size are placed together, so the time grows with the distinct sizes and bins, not with their product.
    """
    bin_of = np.empty(len(sizes), np.int64)
    rooms: list[list[int]] = [[] for _ in range(capacity + 1)]  # bins by the room left in them
    open_rooms = 0  # bit r: rooms[r] is not empty
    bins = 0
    order = np.argsort(-sizes, kind="stable")
    distinct, begins = np.unique(-sizes[order], return_index=True)
    for size, items in zip((-distinct).tolist(), np.split(order, begins[1:]), strict=True):
        placed = 0
        while placed < len(items):
            fitting = open_rooms >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                taken = rooms[room][-(len(items) - placed) :]
                del rooms[room][-len(taken) :]
                open_rooms &= ~(1 << room) if not rooms[room] else -1
                bin_of[items[placed : placed + len(taken)]] = taken
                placed += len(taken)
            else:
                room = capacity
                count = -(-(len(items) - placed) // (capacity // size))
                taken = list(range(bins, bins + count))
                bins += count
                bin_of[items[placed : placed + count]] = taken
                placed += count
            rooms[room - size] += taken
            open_rooms |= 1 << (room - size)
    members = np.argsort(bin_of, kind="stable")
    edges = np.searchsorted(bin_of[members], np.arange(bins + 1))
    return members.astype(np.int64), edges.astype(np.int64)
