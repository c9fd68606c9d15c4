"""Rules for each document's text, applied while it is read: rules that drop it, and hashes by which documents are
compared.

A document is looked at piece by piece, so that memory stays bounded however long it is. Nothing here depends on the
tokenizer, or on other documents but those of the evaluation.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import rensa

from muster.recipe.curation import Curation, Quality, matcher
from muster.trainer.data.store import TokenStore
from muster.trainer.data.words import Uint64s, ngrams, word_hashes
from muster.words.base import dump

CURATION_VERSION = 1  # raised with any change that drops other documents by the same settings
SHINGLE_WORDS_MAX: Final = 1 << 20  # of a document are compared with others: the first million
EVALUATION_DOCUMENTS_MAX: Final = 10  # an n-gram that more of them have is boilerplate (Brown et al. 2020, appendix C)
DUPLICATE_LINES_SEEN: Final = 1 << 20  # lines of one document that are remembered
_BULLETS: Final = ("•", "‣", "▪", "■", "●", "◦", "*", "-", "–")
_ELLIPSES: Final = ("…", "...")


@dataclass(frozen=True)
class TextRules:
    """Rules for the text of a source's documents. `curation` drops some of them, including those that share n-grams
    with the `evaluated` stores. `collect` is the number of words of the n-grams that are kept of an evaluation source;
    0 keeps none."""

    curation: Curation | None = None
    evaluated: tuple[TokenStore, ...] = ()
    collect: int = 0

    def __bool__(self) -> bool:
        return self.curation is not None or self.collect > 0

    @property
    def shingle_words(self) -> int:
        """Words of the n-grams by which documents are compared with one another; 0 means that they are not compared."""
        near = self.curation.near_duplicates if self.curation else None
        return near.ngram if near else 0

    def recipe(self) -> dict[str, Any]:
        """All that decides what a store made by these rules holds."""
        if not self:
            return {}
        given = dump(self.curation) if self.curation else {}
        given.pop("exactDuplicates", None)  # these compare documents, once they are in stores
        if self.shingle_words:
            given["nearDuplicates"] = [self.shingle_words, minhash_version()]
        keys = sorted(store.meta.key for store in self.evaluated)
        return {"curation": [CURATION_VERSION, given, keys, self.collect]} if given or self.collect else {}

    def leaked(self) -> Uint64s:
        """The n-grams of the evaluation, ascending."""
        parts = [store.grams for store in self.evaluated if store.grams is not None]
        if len(parts) == 1:
            return parts[0]  # a file, which processes share
        return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.uint64)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the files of the evaluation's stores for itself."""
        return _reopened, (self.curation, tuple(store.folder for store in self.evaluated), self.collect)


def _reopened(curation: Curation | None, folders: tuple[Path, ...], collect: int) -> TextRules:
    stores = tuple(TokenStore.open(folder) for folder in folders)
    assert all(stores), "the stores of the evaluation are there for as long as one is prepared"
    return TextRules(curation, tuple(store for store in stores if store is not None), collect)


def minhash_version() -> int:
    """Raised by rensa with any change that gives other sketches."""
    return int(rensa.RMinHash.ALGORITHM_VERSION)


NO_RULES = TextRules()


class RuleReader:
    """The rules with what they need at hand, for the documents of one source."""

    def __init__(self, rules: TextRules) -> None:
        self.rules = rules
        self.patterns = [(each, matcher(each)) for each in (rules.curation.drop_matching if rules.curation else ())]
        self.leaked = rules.leaked()
        given = rules.curation.decontamination if rules.curation else None
        self.gram_words = given.ngram if given else rules.collect
        self.quality = rules.curation.quality if rules.curation else None

    def look(self) -> DocumentLook:
        return DocumentLook(self)

    def why_dropped(self, look: DocumentLook, tokens: int) -> str | None:
        """Return why a document of so many tokens is dropped; None where it is kept."""
        if reason := look.verdict():
            return reason
        given = self.rules.curation.length if self.rules.curation else None
        least, most = (given.min_tokens, given.max_tokens) if given else (None, None)
        if least is not None and tokens < least:
            return f"has fewer tokens than length.minTokens {least}"
        if most is not None and tokens > most:
            return f"has more tokens than length.maxTokens {most}"
        return None


class DocumentLook:
    """Findings about one document so far."""

    def __init__(self, reader: RuleReader) -> None:
        self._reader = reader
        self._quality = _GopherCounts() if reader.quality else None
        self._matched, self._shares = "", False
        self._words = np.zeros(0, np.uint64)  # the first of them, to be compared
        self._tail = np.zeros(0, np.uint64)  # the last of the piece before
        self._grams: list[Uint64s] = []
        self.beginning = ""

    def add(self, text: str) -> None:
        """Take the next piece of the text. Pieces end at line ends."""
        reader, rules = self._reader, self._reader.rules
        self.beginning = self.beginning or " ".join(text[:400].split())[:80]
        if self._quality is not None:
            self._quality.add(text)
        for pattern, pattern_kind in reader.patterns:
            if not self._matched and pattern_kind.isinstance_python(text):
                self._matched = pattern
        if not (rules.shingle_words or reader.gram_words):
            return
        words = word_hashes(text)
        if rules.shingle_words and len(self._words) < SHINGLE_WORDS_MAX:
            self._words = np.concatenate([self._words, words[: SHINGLE_WORDS_MAX - len(self._words)]])
        if reader.gram_words:
            joined = np.concatenate([self._tail, words])
            self._tail = joined[len(joined) - min(len(joined), reader.gram_words - 1) :]
            grams = ngrams(joined, reader.gram_words)
            if rules.collect:
                self._grams.append(grams)
            elif len(reader.leaked) and _some_of(grams, reader.leaked):
                self._shares = True

    def verdict(self) -> str | None:
        """Return why the document is dropped; None where it is kept."""
        if self._matched:
            return f"matches dropMatching {self._matched!r}"
        if self._shares:
            return f"shares {self._reader.gram_words} words in a row with the evaluation data"
        if self._quality is not None and self._reader.quality is not None:
            return self._quality.verdict(self._reader.quality)
        return None

    def shingles(self) -> Uint64s:
        """The hashes by which it is compared with others: of its n-grams, or of all its words where it has fewer."""
        count = self._reader.rules.shingle_words
        return ngrams(self._words, min(count, len(self._words))) if count and len(self._words) else self._words

    def grams(self) -> Uint64s:
        """Each n-gram of the document once, ascending."""
        return np.unique(np.concatenate(self._grams)) if self._grams else np.zeros(0, np.uint64)


def _some_of(grams: Uint64s, ascending: Uint64s) -> bool:
    """Return whether any of `grams` is among the others. It searches for each of them, which needs no pass over all the
    others."""
    places = np.minimum(np.searchsorted(ascending, grams), len(ascending) - 1)
    return bool((ascending[places] == grams).any())


class _GopherCounts:
    """Counts that Gopher's rules need."""

    def __init__(self) -> None:
        self.words = self.alphabetic = self.hashes = self.ellipses = 0
        self.lines = self.bullets = self.trailing = self.repeated = 0
        self._seen = set[int]()

    def add(self, text: str) -> None:
        words = text.split()
        self.words += len(words)
        self.alphabetic += sum(any(map(str.isalpha, word)) for word in words)
        self.hashes += text.count("#")
        self.ellipses += text.count("…") + text.count("...")
        for line in filter(None, map(str.strip, text.splitlines())):
            self.lines += 1
            self.bullets += line.startswith(_BULLETS)
            self.trailing += line.endswith(_ELLIPSES)
            key = zlib.crc32(line.encode(errors="surrogatepass"))
            self.repeated += key in self._seen
            if len(self._seen) < DUPLICATE_LINES_SEEN:
                self._seen.add(key)

    def verdict(self, rules: Quality) -> str | None:
        words, lines = max(self.words, 1), max(self.lines, 1)
        failures = (
            (self.words < rules.min_words, f"has fewer words than quality.minWords {rules.min_words}"),
            (self.words > rules.max_words, f"has more words than quality.maxWords {rules.max_words}"),
            (
                max(self.hashes, self.ellipses) / words > rules.max_symbols_per_word,
                f"has more symbols than quality.maxSymbolsPerWord {rules.max_symbols_per_word:g}",
            ),
            (
                self.bullets / lines > rules.max_bullet_lines,
                f"has more lines with bullets than quality.maxBulletLines {rules.max_bullet_lines:g}",
            ),
            (
                self.trailing / lines > rules.max_ellipsis_lines,
                f"has more lines that end with an ellipsis than quality.maxEllipsisLines {rules.max_ellipsis_lines:g}",
            ),
            (
                self.alphabetic / words < rules.min_alphabetic_words,
                f"has fewer words with letters than quality.minAlphabeticWords {rules.min_alphabetic_words:g}",
            ),
            (
                self.repeated / lines > rules.max_duplicate_lines,
                f"has more repeated lines than quality.maxDuplicateLines {rules.max_duplicate_lines:g}",
            ),
        )
        return next((reason for failed, reason in failures if failed), None)
