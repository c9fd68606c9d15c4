"""A sweep as its page shows it: parallel coordinates of its trials, and how much each parameter matters. Pure.

Places are percent across and pixels down, so that the picture is as wide as its page and its letters stay as they are.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

TOP, BOTTOM = 44.0, 244.0  # of the axes, in pixels
LINES_MAX = 300  # trials of the picture: more of them are one colour, and a page of a megabyte
TONES = 5  # shades by rank: 1 for the best fifth
TRIALS_MIN = 4  # with a value, for a correlation to be shown at all
_TICKS_MAX = 6


@dataclass(frozen=True)
class AxisTick:
    """A value's label at its height."""

    y: float
    words: str


@dataclass(frozen=True)
class ParallelAxis:
    """An axis of the picture: a parameter, or the metric, which is the last."""

    name: str
    short: str
    x: float
    ticks: tuple[AxisTick, ...]


@dataclass(frozen=True)
class TrialLine:
    """A trial as its pieces (x1, y1, x2, y2) from axis to axis. `tone` is 1 for the best fifth, 5 for the last."""

    number: int
    words: str
    pieces: tuple[tuple[float, float, float, float], ...]
    tone: int
    best: bool


@dataclass(frozen=True)
class ParallelPicture:
    """The axes, and the lines with the best one last, so that it is drawn above the others."""

    axes: tuple[ParallelAxis, ...]
    lines: tuple[TrialLine, ...]


@dataclass(frozen=True)
class ParameterWeight:
    """Weight of a parameter: `share`, from 0 to 1, is how much it goes with the metric over so many trials. `words` say
    which values are better, where an order of them can say so."""

    name: str
    short: str
    share: float
    trials: int
    words: str


def parallel(sweep: Mapping[str, Any]) -> ParallelPicture | None:
    """Return the picture of a sweep's document, or None without a trial that has a value."""
    measured = [trial for trial in sweep["table"] if trial["value"] is not None]
    if not measured:
        return None
    ranked = sorted(measured, key=lambda trial: trial["value"], reverse=sweep["metric"]["better"] == "higher")
    kept = ranked[:LINES_MAX]
    names = list(sweep["sweep"]["parameters"])
    shorts = short_names(names)
    scales = [
        _scale(sweep["sweep"]["parameters"][name], [trial["parameters"].get(name) for trial in kept]) for name in names
    ]
    scales.append(_range([trial["value"] for trial in kept], log=False, down=sweep["metric"]["better"] == "lower"))
    places = [round(100 * (index + 0.5) / len(scales), 2) for index in range(len(scales))]
    titles = [*zip(names, shorts, strict=True), (sweep["metric"]["name"], sweep["metric"]["name"])]
    axes = tuple(
        ParallelAxis(name, short, x, scale.ticks)
        for (name, short), x, scale in zip(titles, places, scales, strict=True)
    )
    lines = []
    for rank, trial in enumerate(kept):
        values = [*(trial["parameters"].get(name) for name in names), trial["value"]]
        points = list(zip(places, [scale.y(value) for scale, value in zip(scales, values, strict=True)], strict=True))
        words = ", ".join(f"{short} {value_text(value)}" for (_, short), value in zip(titles, values, strict=True))
        lines.append(
            TrialLine(
                trial["number"],
                f"Trial {trial['number']}: {words}",
                tuple((*one, *other) for one, other in pairwise(points)),
                1 + TONES * rank // len(kept),
                trial["number"] == sweep["bestTrial"],
            )
        )
    return ParallelPicture(axes, tuple(sorted(lines, key=lambda line: (line.best, -line.tone))))


def weights(sweep: Mapping[str, Any]) -> list[ParameterWeight]:
    """Return each parameter's weight, the greatest first: the absolute rank correlation (Spearman) of its values with
    the metric, or for values without an order the correlation ratio of the metric's ranks. Empty for too few trials."""
    measured = [trial for trial in sweep["table"] if trial["value"] is not None]
    if len(measured) < TRIALS_MIN:
        return []
    names = list(sweep["sweep"]["parameters"])
    parameter_weights = []
    for name, short in zip(names, short_names(names), strict=True):
        values = [trial["parameters"].get(name) for trial in measured]
        results = [trial["value"] for trial in measured]
        if all(_is_number(value) for value in values):
            correlation = rank_correlation(values, results)
            rises = (correlation > 0) == (sweep["metric"]["better"] == "higher")
            words = "" if correlation == 0 else f"{'higher' if rises else 'lower'} values did better"
        else:
            correlation, words = _correlation_ratio([value_text(value) for value in values], results), ""
        parameter_weights.append(ParameterWeight(name, short, round(abs(correlation), 3), len(measured), words))
    return sorted(parameter_weights, key=lambda each: -each.share)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's coefficient, from -1 to 1; 0 where all values of a side are equal."""
    a, b = _ranks(one), _ranks(other)
    middle = (len(a) + 1) / 2
    spread = math.sqrt(sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b))
    return sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True)) / spread if spread else 0.0


def short_names(paths: Sequence[str]) -> list[str]:
    """The last part of each path, or two of them where one is not enough to tell them apart."""
    last = [path.rpartition(".")[2] for path in paths]
    counts = Counter(last)
    return [".".join(path.split(".")[-2:]) if counts[end] > 1 else end for path, end in zip(paths, last, strict=True)]


def value_text(value: Any) -> str:
    """A parameter's value in few characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class _Scale:
    """Heights of values: by place in a list, or between two numbers."""

    ticks: tuple[AxisTick, ...]
    listed: Mapping[str, float] | None = None
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    down: bool = False

    def y(self, value: Any) -> float:
        if self.listed is not None:
            return self.listed.get(value_text(value), BOTTOM)
        if not _is_number(value):
            return BOTTOM
        at, low, high = (math.log(each) if self.log else each for each in (value, self.low, self.high))
        up = (at - low) / (high - low)
        return round(_height(1 - up if self.down else up), 1)


def _scale(parameter: Mapping[str, Any], values: Sequence[Any]) -> _Scale:
    if parameter.get("values") is None:
        return _range([value for value in values if _is_number(value)], bool(parameter.get("log")))
    names = list(dict.fromkeys(value_text(value) for value in parameter["values"]))
    listed = {name: _height((index + 0.5) / len(names)) for index, name in enumerate(names)}
    every = -(-len(names) // _TICKS_MAX)
    return _Scale(tuple(AxisTick(listed[name], name) for name in names[::every]), listed)


def _range(values: Sequence[float], log: bool, down: bool = False) -> _Scale:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    top, bottom = (low, high) if down else (high, low)
    ticks = (AxisTick(TOP, value_text(float(top))), AxisTick(BOTTOM, value_text(float(bottom))))
    return _Scale(ticks, None, low, high, log, down)


def _height(up: float) -> float:
    return BOTTOM - up * (BOTTOM - TOP)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 1 on; equal values share the mean of theirs."""
    places: dict[float, list[int]] = {}
    for rank, value in enumerate(sorted(values), 1):
        places.setdefault(value, []).append(rank)
    return [sum(places[value]) / len(places[value]) for value in values]


def _correlation_ratio(groups: Sequence[str], values: Sequence[float]) -> float:
    """The square root of the share of the ranks' variance that lies between the groups."""
    ranks = _ranks(values)
    middle = (len(ranks) + 1) / 2
    whole = sum((rank - middle) ** 2 for rank in ranks)
    by_group: dict[str, list[float]] = {}
    for group, rank in zip(groups, ranks, strict=True):
        by_group.setdefault(group, []).append(rank)
    between = sum(len(own) * (sum(own) / len(own) - middle) ** 2 for own in by_group.values())
    return math.sqrt(between / whole) if whole else 0.0
