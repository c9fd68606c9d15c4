"""Counts, sizes and near misses as people read them, the same in every program's messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def plural(count: float, noun: str) -> str:
    """`1 worker`, `2,000 steps`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """Bytes with a binary unit: `312 B`, `5.0 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be; None when none is near. Case does not count."""
    folded = {each.casefold(): str(each) for each in known}
    near = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.6)
    return folded[near[0]] if near else None
