"""Loss curves in characters."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.cli.plot import PlotPoint, curve, smoothed, sparkline


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 8, ""),
        ([math.nan, math.inf], 8, ""),
        ([1.0], 8, "▁"),
        ([1.0, 1.0, 1.0], 8, "▁▁▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([7, 7, 0, 0], 2, "█▁"),
        ([3.0, math.nan, 0.0], 8, "█▁"),
    ],
)
def test_sparkline(values: list[float], width: int, line: str) -> None:
    assert sparkline(values, width) == line


def test_sparkline_without_unicode_is_ascii() -> None:
    assert sparkline(range(8), 8, unicode=False) == "_.-=+*#@"


def test_a_falling_line_falls() -> None:
    lines = curve([PlotPoint(step, 10.0 - step) for step in range(11)], width=11, height=11, unicode=False)
    labels = [line[:2].strip() for line in lines[:11]]
    assert labels == ["10", *[""] * 4, "5", *[""] * 4, "0"]
    for row, line in enumerate(lines[:11]):
        drawn = {column for column, mark in enumerate(line[4:]) if mark == "*"}
        assert row in drawn
        assert drawn <= {row - 1, row, row + 1}
    assert lines[11:] == ["   +-----------", "    0   step 10"]


def test_smoothing_looks_back_only() -> None:
    points = [PlotPoint(1, 4.0), PlotPoint(2, 2.0), PlotPoint(3, math.nan), PlotPoint(4, 6.0), PlotPoint(5, 1.0)]
    assert smoothed(points, 1) == [point for point in points if point.x != 3]
    assert smoothed(points, 2) == [PlotPoint(1, 4.0), PlotPoint(2, 3.0), PlotPoint(4, 4.0), PlotPoint(5, 3.5)]
    assert smoothed([], 5) == []


def test_a_curve_has_no_gaps() -> None:
    points = [PlotPoint(0, 0.0), PlotPoint(50, 9.0), PlotPoint(51, 1.0), PlotPoint(100, 5.0)]
    lines = curve(points, width=40, height=8, unicode=False)[:8]
    area = [line[lines[0].index("|") + 1 :].ljust(40) for line in lines]
    columns = [{row for row, line in enumerate(area) if line[column] == "*"} for column in range(40)]
    assert all(columns)
    for left, right in pairwise(columns):
        assert min(abs(a - b) for a in left for b in right) <= 1


@pytest.mark.parametrize(
    "points", [[], [PlotPoint(1, 2)], [PlotPoint(1, 2), PlotPoint(1, 3)], [PlotPoint(1, math.nan), PlotPoint(2, 1)]]
)
def test_what_is_no_line_is_not_drawn(points: list[PlotPoint]) -> None:
    assert curve(points) == []


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e30, 1e30)), min_size=2),
    st.integers(8, 80),
    st.integers(2, 20),
    st.booleans(),
)
def test_any_points_fit_into_the_frame(points: list[tuple[int, float]], width: int, height: int, unicode: bool) -> None:
    lines = curve([PlotPoint(x, y) for x, y in points], width, height, unicode)
    if not lines:
        assert len({x for x, _ in points}) == 1
        return
    assert len(lines) == height + 2
    margin = lines[-2].index("└" if unicode else "+")
    drawn = [line[margin + 1 :] for line in lines[:height]]
    assert all(len(line) <= width for line in drawn)
    flat = len({y for _, y in points}) == 1
    assert flat or drawn[0].strip(), "the highest value touches the top row"
    assert flat or drawn[-1].strip(), "the lowest value touches the bottom row"
    assert any(line.strip() for line in drawn)
