"""Step records in columns: the axes of every record, and of each series the extremes and the sum of every block.

A record itself stays in its file. A job of 1,000,000 steps takes 32 bytes of memory a record and as much again for ten
series, where its records take 400 MB.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Records of a block. Half of it doubles the memory of the blocks, double of it the records that a curve reads anew.
BLOCK_RECORDS = 32
SERIES_MAX = 64  # an objective reports a few values by name; a file that somebody made up may hold any number
NAME_LENGTH_MAX = 100


@dataclass(frozen=True, slots=True)
class SeriesExtent:
    """Summary of some values of a series: the lowest, the highest, the sum and the count."""

    low: float
    high: float
    total: float
    count: int

    def joined(self, other: SeriesExtent) -> SeriesExtent:
        low, high = min(self.low, other.low), max(self.high, other.high)
        return SeriesExtent(low, high, self.total + other.total, self.count + other.count)


@dataclass
class BlockSeries:
    """One series by blocks. A block without a finite value has a count of 0."""

    low: array[float] = field(default_factory=lambda: array("d"))
    high: array[float] = field(default_factory=lambda: array("d"))
    total: array[float] = field(default_factory=lambda: array("d"))
    count: array[int] = field(default_factory=lambda: array("q"))

    def extend(self, blocks: int) -> None:
        more = blocks - len(self.count)
        self.low.extend([math.inf] * more)
        self.high.extend([-math.inf] * more)
        self.total.extend([0.0] * more)
        self.count.extend([0] * more)

    def add(self, block: int, values: Sequence[float]) -> None:
        self.low[block] = min(self.low[block], min(values))
        self.high[block] = max(self.high[block], max(values))
        self.total[block] += sum(values)
        self.count[block] += len(values)

    def extent(self, begin: int, end: int) -> SeriesExtent | None:
        """Return the extent of the blocks from `begin` up to `end`, or None if they have no value."""
        count = sum(self.count[begin:end])
        if not count:
            return None
        return SeriesExtent(min(self.low[begin:end]), max(self.high[begin:end]), sum(self.total[begin:end]), count)


@dataclass
class StepTable:
    """Records in ascending order of their steps, none twice.

    `places` are the offsets of their lines, in bytes; `tokens` were trained in this attempt up to and including the
    record; `at` is in seconds since the epoch and never falls.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    at: array[float] = field(default_factory=lambda: array("d"))
    places: array[int] = field(default_factory=lambda: array("q"))
    series: dict[str, BlockSeries] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps)

    def add_values(self, first: int, columns: Mapping[str, Sequence[float | None]]) -> None:
        """Note the values of the records from `first` on, whose axes are there already: a column for each series."""
        blocks = -(-len(self) // BLOCK_RECORDS)
        for name, column in columns.items():
            series = self._series(name)
            if series is None:
                continue
            series.extend(blocks)
            for block in range(first // BLOCK_RECORDS, blocks):
                begin = max(0, block * BLOCK_RECORDS - first)
                piece = column[begin : (block + 1) * BLOCK_RECORDS - first]
                if values := [value for value in piece if value is not None]:
                    series.add(block, values)
        for series in self.series.values():
            series.extend(blocks)

    def _series(self, name: str) -> BlockSeries | None:
        series = self.series.get(name)
        if series is None and len(self.series) < SERIES_MAX and len(name) <= NAME_LENGTH_MAX:
            series = self.series[name] = BlockSeries()
        return series


def finite(value: Any) -> float | None:
    """A number that can be drawn. None for what is not finite, for none, and for what is no number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def column_of(records: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """The records' values of that name that can be drawn."""
    column: list[Any] = [record.get(name) for record in records]
    # What a trainer writes is all floats and finite, and then so is the sum: a fifth of the time of looking at each.
    if set(map(type, column)) == {float} and math.isfinite(sum(column)):
        return column
    return [finite(value) for value in column]
