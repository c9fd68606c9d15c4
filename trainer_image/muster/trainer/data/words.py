"""A text as numbers: a hash of each word and of each run of words, for finding what two texts have in common."""

from __future__ import annotations

import re
import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

Uint64s = npt.NDArray[np.uint64]

# Thai, Lao, Burmese, Khmer, Japanese and Chinese are written without spaces: there a letter counts as a word.
_UNSPACED: Final = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD: Final = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)


def word_hashes(text: str) -> Uint64s:
    """uint64 [words]; case and what stands between words make no difference."""
    words = WORD.findall(text.casefold())
    return np.fromiter((zlib.crc32(word.encode()) for word in words), np.uint64, len(words))


def ngrams(words: Uint64s, count: int) -> Uint64s:
    """uint64 [words - count + 1]: a hash of each run of `count` words; none where there are fewer words."""
    runs = len(words) - count + 1
    if runs < 1:
        return np.zeros(0, np.uint64)
    with np.errstate(over="ignore"):
        value = np.zeros(runs, np.uint64)
        for place in range(count):
            value = value * _FACTOR + words[place : place + runs]
        # The output function of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014): near words give far hashes.
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))
