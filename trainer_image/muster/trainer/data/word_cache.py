"""Byte-level BPE with a memory: each word that a tokenizer splits a text into is encoded once, then looked up.

Ids are those of the `tokenizers` library, or none: its own model encodes the words, its own regular expressions say
which characters are letters, digits or spaces, a sample is encoded both ways before the first text, and whatever is not
sure to be split alike is left to the library. Most time of the library goes into what is not asked for here (offsets
between a text, its normalised form and its bytes, and a string for each token).
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Split

from muster.trainer.data.tokenizer import Ids, Int64s

WORDS_MAX: Final = 1 << 17  # some 35 MB; a corpus has more only where it is not of words
WORD_CHARACTERS_MAX: Final = 64  # a longer one hardly comes twice
ADDED_MAX: Final = 64  # each is looked for in each text

# What is split here: the basic plane and, beyond it, emoji, which are in no class that patterns ask for.
_BASIC: Final = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x10000))))
_EMOJI: Final = "".join(map(chr, range(0x1F300, 0x1FB00)))
_BEYOND: Final = re.compile("[^\x00-\uffff\U0001f300-\U0001faff]")

# What ByteLevel splits by where it is told no other pattern (GPT-2's).
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PARTS: Final = re.compile(r"\\p\{\w+\}|\\.|.", re.DOTALL)
_SAMPLE: Final = (
    "It's  I'LL we'Ve don''t\n\n 1234567 x=1;\r\n\t\u2014\u201cquoted\u201d nai\u0308ve \u03a9\u03bc\u03ad\u03b3 "
    "\u041f\u0440\u0438\u0432\u00a0\u4f60\u597d\uff0c\u4e16\u754c123\u304b\u306a \ud55c\uad6d\uc5b4 \u0939\u093f\u0928 "
    "\u0e44\u0e17\u0e22 \u00bd\u2167\u0663 '\u017f \u212a\x1c\x85\u2028 \U0001f642\u2026 \n "
)


class WordCache:
    """The words of texts so far with their ids; `word_cache` makes it."""

    def __init__(self, split: re.Pattern[str], encode: Callable[[str], Sequence[int]], added: Sequence[str], nfc: bool):
        """`added` are texts that the tokenizer takes out before it splits, and with `nfc` it composes characters."""
        self._split, self._added, self._nfc = split, added, nfc
        self.ids_by_word = _CachedWords(encode)

    def encode(self, text: str) -> Ids | None:
        """Return the ids of a text; None for a text that the library must encode."""
        words = self.words(text)
        if words is None:
            return None
        return np.fromiter(chain.from_iterable(map(self.ids_by_word.__getitem__, words)), np.uint32)

    def words(self, text: str) -> list[str] | None:
        """Return the pieces that the tokenizer splits the text into; None where it may split the text differently."""
        if not text.isascii() and (_BEYOND.search(text) or (self._nfc and not unicodedata.is_normalized("NFC", text))):
            return None
        if any(each in text for each in self._added):
            return None
        words: list[str] = self._split.findall(text)
        return words if sum(map(len, words)) == len(text) else None  # what lies between two matches is a word too


class _CachedWords(dict[str, Sequence[int]]):
    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, word: str) -> Sequence[int]:
        ids = self._encode(word)
        if len(word) <= WORD_CHARACTERS_MAX:
            if len(self) >= WORDS_MAX:
                self.clear()
            self[word] = ids
        return ids


def places_of(text: str, sizes: Int64s) -> list[tuple[int, int]] | None:
    """Return the characters [start, end) of each token of a text, given how many bytes of it each token stands for:
    int64 [tokens]. A token with a part of a character has the whole. None where these are not the bytes of the text."""
    encoded = text.encode()
    ends = np.cumsum(sizes)
    if (int(ends[-1]) if len(ends) else 0) != len(encoded) or not sizes.all():
        return None
    starts = ends - sizes
    if len(encoded) > len(text):
        characters = np.cumsum(np.frombuffer(encoded, np.uint8) & 0xC0 != 0x80)  # how many have begun, by byte
        starts, ends = characters[starts] - 1, characters[ends - 1]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def word_cache(tokenizer: tokenizers.Tokenizer) -> WordCache | None:
    """Make the cache of a tokenizer; None where it is no byte-level BPE, or splits by more than one pattern or one that
    `re` can't read."""
    pattern = _pattern(_described(tokenizer.pre_tokenizer))
    normalizer = _described(tokenizer.normalizer)
    added = [each.content for each in tokenizer.get_added_tokens_decoder().values() if not each.special]
    split = _compiled(pattern) if pattern else None
    if split is None or normalizer not in (None, {"type": "NFC"}) or len(added) > ADDED_MAX:
        return None
    of_words = tokenizers.Tokenizer(tokenizer.model)
    of_words.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    nfc = normalizer is not None
    composed = [unicodedata.normalize("NFC", each) for each in added] if nfc else []

    def encode(word: str) -> tuple[int, ...]:
        return tuple(of_words.encode(word, add_special_tokens=False).ids)

    cache = WordCache(split, encode, (*added, *composed), nfc)
    sample = unicodedata.normalize("NFC", _SAMPLE) if nfc else _SAMPLE
    ids = cache.encode(sample)
    right = tokenizer.encode(sample, add_special_tokens=False).ids
    return cache if ids is not None and ids.tolist() == right else None


def _described(part: Any) -> Any:
    """Return the description of a tokenizer's part, as a tokenizer.json holds it."""
    return None if part is None else json.loads(part.__getstate__())


def _pattern(pre_tokenizer: Any) -> str | None:
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    return None


def _compiled(pattern: str) -> re.Pattern[str] | None:
    """A pattern of the library's as `re` has it, each class of characters spelt out. None where one can't be sure."""
    made: list[str] = []
    inside = False  # square brackets
    for part in _PARTS.findall(pattern):
        if part.startswith(r"\p{") or part in (r"\s", r"\S"):
            members = _members(r"\s" if part == r"\S" else part)
            if members is None or (inside and part == r"\S"):
                return None
            negation = "^" if part == r"\S" else ""
            made.append(members if inside else f"[{negation}{members}]")
            continue
        # Word characters, anchors and sets of sets mean something else in each library.
        if (part[0] == "\\" and part[1].isalnum() and part[1] not in "rnt") or (part in "^$" and not inside):
            return None
        if (part == "[" and inside) or (part == "&" and inside):
            return None
        inside = (inside or part == "[") and part != "]"
        made.append(part)
    try:
        compiled = re.compile("".join(made))
    except re.error:
        return None
    return None if compiled.groups else compiled


def _members(name: str) -> str | None:
    """The class's characters as ranges, as they stand in square brackets; None where emoji are among them, or all are
    outside the basic plane."""
    only = Split(tokenizers.Regex(f"{name}+"), "removed", invert=True)
    if only.pre_tokenize_str(_EMOJI):
        return None
    runs = [run for run, _ in only.pre_tokenize_str(_BASIC)]
    return "".join(f"\\u{ord(run[0]):04x}-\\u{ord(run[-1]):04x}" for run in runs) or None
