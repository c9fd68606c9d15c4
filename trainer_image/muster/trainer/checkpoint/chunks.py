"""Geometry of slices: which part of one chunk lies in another. Offsets and extents per dimension, in elements."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class TensorChunk:
    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.extent)

    def meets(self, other: TensorChunk) -> TensorChunk | None:
        """The part in both, in global coordinates; None where they are apart. A scalar meets every scalar."""
        start = tuple(map(max, self.offset, other.offset))
        end = tuple(
            min(a + b, c + d) for a, b, c, d in zip(self.offset, self.extent, other.offset, other.extent, strict=True)
        )
        extent = tuple(b - a for a, b in zip(start, end, strict=True))
        return TensorChunk(start, extent) if all(e > 0 for e in extent) else None

    def within(self, other: TensorChunk) -> tuple[slice, ...]:
        """The slices that cut this chunk out of `other`."""
        return tuple(slice(a - b, a - b + e) for a, e, b in zip(self.offset, self.extent, other.offset, strict=True))


def whole(shape: tuple[int, ...]) -> TensorChunk:
    return TensorChunk((0,) * len(shape), shape)
