"""A loss curve in a terminal: a sparkline of one line, or a plot of a few, in braille dots with axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*#@"
# Bit of each dot in a braille cell, [row][column]; U+2800 is the empty cell.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@dataclass(frozen=True)
class PlotPoint:
    x: float
    y: float


def finite(points: Sequence[PlotPoint]) -> list[PlotPoint]:
    return [point for point in points if math.isfinite(point.x) and math.isfinite(point.y)]


def smoothed(points: Sequence[PlotPoint], window: int) -> list[PlotPoint]:
    """Return the means of so many finite points up to and including each; fewer at the beginning."""
    points = finite(points)
    spans = [points[max(0, index + 1 - window) : index + 1] for index in range(len(points))]
    return [PlotPoint(span[-1].x, _mean([point.y for point in span])) for span in spans]


def sparkline(values: Sequence[float], width: int = 24, unicode: bool = True) -> str:
    """Draw the means of `width` equal parts of the values as bars, the lowest at the bottom. Empty without a finite
    value."""
    bars = _BARS if unicode else _ASCII_BARS
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    width = min(width, len(finite))
    means = [_mean(finite[i * len(finite) // width : (i + 1) * len(finite) // width]) for i in range(width)]
    low, high = min(means), max(means)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)


def curve(points: Sequence[PlotPoint], width: int = 64, height: int = 10, unicode: bool = True) -> list[str]:
    """Return the lines of a plot, with the y axis labelled on the left and x below. Empty for fewer than two finite
    points.

    The plotting area is `width` by `height` characters.
    """
    points = finite(points)
    if len(points) < 2:
        return []
    low_x, high_x = min(p.x for p in points), max(p.x for p in points)
    low_y, high_y = min(p.y for p in points), max(p.y for p in points)
    if high_x <= low_x:
        return []
    if high_y <= low_y:
        margin = max(0.5, abs(high_y) * 0.1)
        low_y, high_y = low_y - margin, high_y + margin
    across, down = (2, 4) if unicode else (1, 1)
    canvas = [[0] * width for _ in range(height)]
    columns = _joined(_columns(points, low_x, high_x, width * across))
    for column, (least, most) in columns.items():
        # From the column's least to its most value, so that a noisy loss shows as a band and not as dust.
        top = _row(most, low_y, high_y, height * down)
        bottom = _row(least, low_y, high_y, height * down)
        for row in range(top, bottom + 1):
            canvas[row // down][column // across] |= _DOTS[row % down][column % across] if unicode else 1
    return _framed(canvas, (low_x, high_x), (low_y, high_y), unicode)


def _columns(points: Sequence[PlotPoint], low: float, high: float, columns: int) -> dict[int, tuple[float, float]]:
    ranges: dict[int, tuple[float, float]] = {}
    for point in points:
        column = round((point.x - low) / (high - low) * (columns - 1))
        least, most = ranges.get(column, (point.y, point.y))
        ranges[column] = (min(least, point.y), max(most, point.y))
    return ranges


def _joined(columns: dict[int, tuple[float, float]]) -> dict[int, tuple[float, float]]:
    """The same with a line from each column to the next that has points, so that the curve has no gaps."""
    filled = dict(columns)
    for left, right in pairwise(sorted(columns)):
        begin, end = _middle(columns[left]), _middle(columns[right])
        for column in range(left, right + 1):
            # Half a column before and after: what this column covers of the line.
            ends = [begin + (end - begin) * _clamp((column + half - left) / (right - left)) for half in (-0.5, 0.5)]
            least, most = filled.get(column, (math.inf, -math.inf))
            filled[column] = (min(least, *ends), max(most, *ends))
    return filled


def _middle(span: tuple[float, float]) -> float:
    return span[0] / 2 + span[1] / 2


def _clamp(share: float) -> float:
    return min(1.0, max(0.0, share))


def _row(y: float, low: float, high: float, rows: int) -> int:
    return round((high - y) / (high - low) * (rows - 1))


def _framed(canvas: list[list[int]], x: tuple[float, float], y: tuple[float, float], unicode: bool) -> list[str]:
    height, width = len(canvas), len(canvas[0])
    labels = {0: _number(y[1]), height // 2: _number(y[1] - (y[1] - y[0]) * (height // 2) / (height - 1 or 1))}
    labels[height - 1] = _number(y[0])
    margin = max(len(label) for label in labels.values())
    bar, corner, dash = ("│", "└", "─") if unicode else ("|", "+", "-")
    lines = []
    for index, cells in enumerate(canvas):
        drawn = "".join(chr(0x2800 + cell) if unicode else "*" if cell else " " for cell in cells)
        lines.append(f"{labels.get(index, ''):>{margin}} {bar}{drawn.replace(chr(0x2800), ' ').rstrip()}")
    lines.append(f"{'':>{margin}} {corner}{dash * width}")
    left, right = _number(x[0]), f"step {_number(x[1])}"
    lines.append(f"{'':>{margin}}  {left}{right:>{width - len(left)}}")
    return lines


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
