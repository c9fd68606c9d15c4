"""Pairs of answers as samples: both sides lie in one row, as two documents that never see each other.

The documents 2n and 2n + 1 of a row are the two sides of its pair n. For KTO the second side is the same prompt with
the answer of another document, by which the distance from the reference is measured; its half is not learnt from.
A pair is never divided between rows, so each is learnt from exactly once in an epoch, by whatever number of ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from muster.recipe.data_config import Truncation
from muster.trainer.data.packing import (
    IGNORED,
    PADDING,
    Float32s,
    Int32s,
    PackedSample,
    best_fit,
    empty_sample,
    one_each,
)
from muster.trainer.data.shuffle import EpochShuffle, Int64s
from muster.trainer.data.store import DocumentRange

Bools = npt.NDArray[np.bool_]

# The columns of `PairStretches`: of each side its prompt and its answer.
PROMPT, ANSWER, OTHER_PROMPT, OTHER_ANSWER = range(4)


@dataclass(frozen=True)
class PairStretches:
    """Stretches of the store's tokens, four for each pair: prompt and answer of one side, prompt and answer of the
    other.

    `starts` and `sizes` are int64 [pairs, 4]; `values` is float32 [pairs]: the pair's margin, or a single answer's
    label.
    """

    starts: Int64s
    sizes: Int64s
    values: Float32s

    def __len__(self) -> int:
        return len(self.starts)

    def those(self, chosen: Bools) -> PairStretches:
        return PairStretches(self.starts[chosen], self.sizes[chosen], self.values[chosen])


def stretches_of(documents: DocumentRange) -> PairStretches:
    """The stretches of all documents of a store of pairs, or of single answers, of which there must be two at least."""
    store = documents.store
    here = slice(documents.first, documents.last)
    assert store.values is not None, "a store of preferences has values"
    begins, prompts = store.starts[here], documents.firsts
    whole = np.diff(documents.bounds)
    if store.splits is not None:
        splits = store.splits[here]
        starts = (begins, begins + prompts, begins + splits, begins + splits + prompts)
        sizes = (prompts, splits - prompts, prompts, whole - splits - prompts)
    else:
        # Equal documents are neighbours in this order, so the other answer is taken from far away.
        other = (np.arange(len(begins)) + max(1, len(begins) // 2)) % len(begins)
        starts = (begins, begins + prompts, begins, (begins + prompts)[other])
        sizes = (prompts, whole - prompts, prompts, (whole - prompts)[other])
    return PairStretches(np.stack(starts, 1), np.stack(sizes, 1), np.asarray(store.values[here], np.float32))


def unlike_prompts(documents: DocumentRange) -> Bools:
    """Return a mask of the pairs whose prompts have different numbers of tokens on the two sides, as where a chat
    template ends a prompt differently depending on the answer."""
    store = documents.store
    here = slice(documents.first, documents.last)
    assert store.splits is not None, "a store of pairs says where the second side begins"
    assert store.loss_mask is not None, "a store of pairs says what is an answer"
    answers = store.starts[here] + store.splits[here] + documents.firsts
    differs: Bools = (store.loss_mask[answers - 1] != 0) | (store.loss_mask[answers] == 0)
    return differs


def truncated(stretches: PairStretches, length: int, how: Truncation) -> tuple[PairStretches, Bools, Bools]:
    """Cut pairs so that both sides fit into `length` tokens together. Returns the pairs as they are cut, which of them
    can be learnt from, and which of them were too long.

    `right` cuts both sides at one and the same length, `left` takes equally many tokens from both prompts. At least one
    token of the prompt and one of each answer must be left.
    """
    prompt = stretches.sizes[:, PROMPT]
    one = prompt + stretches.sizes[:, ANSWER]
    other = prompt + stretches.sizes[:, OTHER_ANSWER]
    long = one + other > length
    if not long.any():
        return stretches, np.ones(len(stretches), np.bool_), long
    starts, sizes = stretches.starts.copy(), stretches.sizes.copy()
    if how == "left":
        cut = np.where(long, -(-(one + other - length) // 2), 0)
        for column in (PROMPT, OTHER_PROMPT):
            starts[:, column] += cut
            sizes[:, column] -= cut
        usable = sizes[:, PROMPT] >= 1
    elif how == "right":
        shorter = np.minimum(one, other)
        most = np.where(long, np.where(shorter <= length // 2, length - shorter, length // 2), np.maximum(one, other))
        for column in (ANSWER, OTHER_ANSWER):
            sizes[:, column] = np.minimum(sizes[:, column], most - prompt)
        usable = most > prompt
    else:
        usable = ~long
    return PairStretches(starts, sizes, stretches.values), usable, long


def alike(stretches: PairStretches, documents: DocumentRange, asked: Bools) -> Bools:
    """Return a mask of the pairs, among those `asked` about, whose two answers are equal now that they are cut."""
    equal = np.zeros(len(stretches), np.bool_)
    tokens = documents.store.tokens
    for number in np.flatnonzero(asked & (stretches.sizes[:, ANSWER] == stretches.sizes[:, OTHER_ANSWER])):
        size = stretches.sizes[number, ANSWER]
        one, other = stretches.starts[number, ANSWER], stretches.starts[number, OTHER_ANSWER]
        equal[number] = np.array_equal(tokens[one : one + size], tokens[other : other + size])
    return equal


class PairPacking:
    """Rows of whole pairs; with `packing` best fit puts as many as possible into each. `pad` fills the rest.

    `reference` is float32 [pairs, 2] in the order of `members`: the log-probabilities that the reference model gives
    the two answers of each pair; None where nobody stored them.
    """

    def __init__(
        self,
        documents: DocumentRange,
        stretches: PairStretches,
        packing: bool,
        length: int,
        pad: int,
        seed: int,
        stream: int,
    ) -> None:
        self._documents, self._stretches = documents, stretches
        self._length, self._pad = length, pad
        totals = stretches.sizes.sum(1)
        self.members, self.edges = best_fit(totals, length) if packing else one_each(len(totals))
        self.samples, self.tokens = len(self.edges) - 1, int(totals.sum())
        self._shuffle = EpochShuffle(np.arange(len(self.edges), dtype=np.int64), seed, stream)
        self.reference: Float32s | None = None

    @property
    def has_labels(self) -> bool:
        """Return whether each pair is a single answer with a label, and the answer of another document."""
        return self._documents.store.splits is None

    @property
    def labels(self) -> Float32s:
        """The value of every pair."""
        return self._stretches.values

    def sample(self, epoch: int, index: int) -> PackedSample:
        (row,), _, _ = self._shuffle.window(epoch, index, index + 1)
        return self.row(int(row))

    def row(self, number: int) -> PackedSample:
        """A row by its number, before an epoch shuffles them."""
        some = slice(int(self.edges[number]), int(self.edges[number + 1]))
        members = self.members[some]
        starts, sizes = self._stretches.starts[members].ravel(), self._stretches.sizes[members].ravel()
        total = int(sizes.sum())
        ends = np.cumsum(sizes)
        places = np.arange(total) + np.repeat(starts - (ends - sizes), sizes)
        documents = np.repeat(np.arange(len(sizes), dtype=np.int32) // 2, sizes)

        sample = empty_sample(self._length)._replace(
            targets=np.repeat(self._stretches.values[members], 2),
            reference=None if self.reference is None else self.reference[some].ravel(),
        )
        store = self._documents.store
        assert store.loss_mask is not None, "a store of preferences says what is an answer"
        tokens = store.tokens[places]
        store.must_be_sound(tokens)
        sample.tokens[:total], sample.tokens[total:] = tokens, self._pad
        sample.documents[:total], sample.documents[total:] = documents, PADDING
        sample.positions[:total] = _positions(documents)
        sample.positions[total:] = np.arange(self._length - total)
        sample.labels[:] = IGNORED
        counted = (documents[1:] == documents[:-1]) & (store.loss_mask[places[1:]] != 0)
        sample.labels[: total - 1][counted] = sample.tokens[1:total][counted]
        return sample

    def fingerprint(self) -> str:
        """Equal for equal pairs, cut and packed alike."""
        state = hashlib.sha256(self._documents.store.meta.key.encode())
        for array in (self._stretches.starts, self._stretches.sizes, self.members, self.edges):
            state.update(np.ascontiguousarray(array).data)
        return state.hexdigest()


def _positions(documents: Int32s) -> Int64s:
    """Each token's place in its document; the documents stand in a row one after the other."""
    begins = np.flatnonzero(np.diff(documents, prepend=-1))
    return np.arange(len(documents)) - np.repeat(begins, np.diff(np.append(begins, len(documents))))
