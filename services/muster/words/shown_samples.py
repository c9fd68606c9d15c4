"""Samples of training data as people read them: the text of their tokens, with what is learnt in colour or brackets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

from muster.words.text import with_codes

# Brackets of the golden files of templates; in colour the learnt text is green, and what is only read is dim.
OPEN, CLOSE = "⟦", "⟧"
GREEN, DIM, BOLD, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"


class ShownStretch(Protocol):
    """Neighbouring tokens of one document that are all learnt, or none of them."""

    @property
    def document(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def learnt(self) -> bool: ...


class ShownRows(Protocol):
    """`compares` says what the documents of a pair are called, in turn."""

    @property
    def stretches(self) -> Sequence[ShownStretch]: ...
    @property
    def padding(self) -> int: ...
    @property
    def compares(self) -> Sequence[str]: ...


def sample_text(number: int, sample: ShownRows, colour: bool, cut: int = 0) -> str:
    """The sample of this number under a heading; `cut` more tokens of it are not at hand."""
    tokens = sum(stretch.tokens for stretch in sample.stretches)
    learnt = sum(stretch.tokens for stretch in sample.stretches if stretch.learnt)
    of = f"the first {tokens:,} of {tokens + cut:,} tokens" if cut else f"{tokens:,} tokens"
    return f"sample {number}: {of}, {learnt:,} of them in the loss\n{lines(sample, colour)}"


def lines(sample: ShownRows, colour: bool) -> str:
    """Document by document. Without colour, what is learnt stands in ⟦ ⟧."""
    written = list[str]()
    for number, group in groupby(sample.stretches, key=lambda stretch: stretch.document):
        called = f" ({sample.compares[number % 2]})" if sample.compares else ""
        head = f"── document {number}{called}"
        written.append(f"{BOLD}{head}{PLAIN}" if colour else head)
        written.append("".join(_painted(stretch, colour) for stretch in group))
    if sample.padding:
        written.append(f"── {sample.padding:,} tokens of padding")
    return "\n".join(written)


def _painted(stretch: ShownStretch, colour: bool) -> str:
    if not colour:
        return f"{OPEN}{with_codes(stretch.text)}{CLOSE}" if stretch.learnt else with_codes(stretch.text)
    return f"{GREEN if stretch.learnt else DIM}{with_codes(stretch.text)}{PLAIN}"
