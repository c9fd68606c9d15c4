"""Curves as SVG, for readers without scripts: drawn from the same documents as the browser's charts. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 640, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 8, 14, 22  # around the plot, for its labels

Points = list[tuple[float, float]]


def curve(curves: Mapping[str, Any], name: str, label: str) -> str:
    """The series over steps with its band of extremes and the attempts' boundaries. Empty for fewer than two points.

    `curves` is a document of GET /jobs/{id}/curves; `label` says to a screen reader what this is.
    """
    series = curves["series"].get(name) or {}
    steps = curves["axes"]["step"]
    line = _points(steps, series.get("mean") or [])
    if len(line) < 2:
        return ""
    low, high = _points(steps, series.get("min") or []), _points(steps, series.get("max") or [])
    plane = _DrawingPlane.of([*line, *low, *high])
    parts = [_rules(plane)]
    if low:
        parts.append(f'<polygon class="band" points="{plane.drawn([*high, *reversed(low)])}"/>')
    parts.append(f'<polyline class="line" points="{plane.drawn(line)}"/>')
    parts += [_restart(plane, attempt) for attempt in curves["attempts"] if attempt["number"] > 1]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


@dataclass(frozen=True)
class _DrawingPlane:
    """Mapping from values to places in a drawing whose y grows downwards."""

    x: tuple[float, float]
    y: tuple[float, float]
    frame: tuple[float, float, float, float]  # left, right, top and bottom of the plot

    @classmethod
    def of(cls, points: Points) -> _DrawingPlane:
        x, y = _range([point[0] for point in points]), _range([point[1] for point in points])
        return cls(x, y, (_LEFT, WIDTH - _RIGHT, _TOP, HEIGHT - _BOTTOM))

    def place(self, point: tuple[float, float]) -> tuple[float, float]:
        left, right, top, bottom = self.frame
        across = (point[0] - self.x[0]) / (self.x[1] - self.x[0])
        up = (point[1] - self.y[0]) / (self.y[1] - self.y[0])
        return left + across * (right - left), bottom - up * (bottom - top)

    def drawn(self, points: Points) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.place, points))


def _points(x: Sequence[float], y: Sequence[float | None]) -> Points:
    return [(at, value) for at, value in zip(x, y, strict=False) if value is not None and math.isfinite(value)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high > low:
        return low, high
    margin = max(0.5, abs(high) * 0.1)
    return low - margin, high + margin


def _rules(plane: _DrawingPlane) -> str:
    left, right, top, bottom = plane.frame
    middle, half = (top + bottom) / 2, (plane.y[0] + plane.y[1]) / 2
    rules = [
        f'<line class="rule" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>'
        f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{_number(value)}</text>'
        for y, value in ((top, plane.y[1]), (middle, half), (bottom, plane.y[0]))
    ]
    ends = (
        f'<text x="{left}" y="{bottom + 16}">{_number(plane.x[0])}</text>'
        f'<text x="{right}" y="{bottom + 16}" text-anchor="end">step {_number(plane.x[1])}</text>'
    )
    return "".join(rules) + ends


def _restart(plane: _DrawingPlane, attempt: Mapping[str, Any]) -> str:
    if not plane.x[0] <= attempt["step"] <= plane.x[1]:
        return ""
    x, (_, _, top, bottom) = plane.place((attempt["step"], plane.y[0]))[0], plane.frame
    words = html.escape(f"attempt {attempt['number']} from step {attempt['step']}")
    return (
        f'<line class="restart" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"><title>{words}</title></line>'
        f'<text x="{x + 3:.1f}" y="{top + 10}">{int(attempt["number"])}</text>'
    )


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.3g}"
