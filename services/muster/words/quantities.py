"""Kubernetes' quantities as numbers."""

from __future__ import annotations

_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_DECIMAL = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def quantity(text: str | None) -> float:
    """A quantity (90, 500m, 900Gi) as a number; 0 when none is given. Raises ValueError for other spellings."""
    if text is None:
        return 0.0
    for suffix, factor in (*_BINARY.items(), *_DECIMAL.items()):
        if text.endswith(suffix):
            return float(text.removesuffix(suffix)) * factor
    return float(text)
