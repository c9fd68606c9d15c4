"""Samples as the model sees them: the text of their tokens, each stretch with whether the loss counts it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

from muster.trainer.data.packing import IGNORED, PADDING, PackedSample
from muster.trainer.data.store import TokenStore
from muster.trainer.data.tokenizer import Tokenizer

EXCERPT_TOKENS: Final = 40
EXCERPT_CHARACTERS: Final = 80


@dataclass(frozen=True)
class TokenStretch:
    """Neighbouring tokens of one document that are all learnt, or none of them."""

    document: int  # counted from 0 within the sample
    text: str
    tokens: int
    learnt: bool


@dataclass(frozen=True)
class RenderedSample:
    """A sample. `compares` says what the documents of a pair are called, in turn; empty where there are no pairs."""

    stretches: tuple[TokenStretch, ...]
    padding: int
    compares: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(stretch.tokens for stretch in self.stretches)

    @property
    def learnt(self) -> int:
        return sum(stretch.tokens for stretch in self.stretches if stretch.learnt)


def render(sample: PackedSample, tokenizer: Tokenizer, compares: tuple[str, ...] = ()) -> RenderedSample:
    """The stretches of a sample. A token is learnt where it is the label of the one before it."""
    learnt = np.zeros(len(sample.tokens), np.bool_)
    learnt[1:] = (sample.labels[:-1] != IGNORED) & (sample.documents[1:] == sample.documents[:-1])
    total = int(np.count_nonzero(sample.documents != PADDING))
    rows = zip(sample.documents[:total].tolist(), learnt[:total].tolist(), sample.tokens[:total].tolist(), strict=True)
    stretches = []
    for (document, flag), group in groupby(rows, key=lambda row: row[:2]):
        ids = [token for _, _, token in group]
        stretches.append(TokenStretch(document, tokenizer.spell(ids), len(ids), flag))
    return RenderedSample(tuple(stretches), len(sample.tokens) - total, compares)


def excerpt(store: TokenStore, number: int, tokenizer: Tokenizer) -> str:
    """Return the beginning of a document of a store, by its number in the index."""
    start, size = int(store.starts[number]), int(store.bounds[number + 1] - store.bounds[number])
    text = tokenizer.spell(store.tokens[start : start + min(size, EXCERPT_TOKENS)].tolist())
    words = " ".join(text.split())
    return words if len(words) <= EXCERPT_CHARACTERS else words[: EXCERPT_CHARACTERS - 1] + "…"
