"""Counts, sizes and near misses as people read them, the same in every program's messages."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from typing import Final

NOTHING = "–"  # what is not known
# Orders to a terminal, such as colours and a window's title, whole.
_ORDERS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# All other control characters but tab and newline, what turns the direction of letters, so that a line seems to say
# something else, and halves of surrogate pairs, which no terminal and no file takes.
STEERING: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def readable(value: object) -> str:
    """Return foreign text, such as a log line or a model's output, without commands to a terminal, and with a dot for
    each other control character."""
    return STEERING.sub("·", _ORDERS.sub("", str(value)))


def with_codes(text: str) -> str:
    """Return foreign text, such as a name in a record, with codes in place of what steers a terminal."""
    return STEERING.sub(lambda match: _code(ord(match[0])), text)


def _code(letter: int) -> str:
    return f"\\x{letter:02x}" if letter < 256 else f"\\u{letter:04x}"


def plural(count: float, noun: str, many: str = "") -> str:
    """Format a count: `1 worker`, `2,000 steps`; `many` is the noun's plural where that is more than an s."""
    return f"{count:,} {noun if count == 1 else many or f'{noun}s'}"


def counted(count: int, words: str) -> str:
    """Format a sentence with a count: `2,000 pairs are left out`, `1 pair is left out`. `words` begin with a noun in
    the plural and a verb."""
    if count != 1:
        return f"{count:,} {words}"
    singular = re.sub(r"^((?:\w+ )??\w+)s\b", r"\1", words).replace(" and are ", " and is ")
    return "1 " + re.sub(r"\b(?:are|have|hold|teach)\b", lambda verb: _OF_ONE[verb[0]], singular, count=1)


_OF_ONE = {"are": "is", "have": "has", "hold": "holds", "teach": "teaches"}


def size(count: float) -> str:
    """Format bytes with a binary unit: `312 B`, `5.0 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be; None when none is near. Case does not count."""
    folded = {each.casefold(): str(each) for each in words}
    near = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.6)
    return folded[near[0]] if near else None


def duration(seconds: float | None) -> str:
    """Format a duration: `8s`, `3m12s`, `2h05m`, `4d3h`."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600}h"


def amount(value: float | None) -> str:
    """Three digits and a letter: `842`, `51.2k`, `8.03G`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return _three_digits(value / limit) + letter
    return f"{int(value)}" if value == int(value) else _three_digits(value)


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def loss(value: float | None) -> str:
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.4f}"


def share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"
