"""The curves of a job: every series over the same axes, thinned to buckets that keep their least and greatest values.

Buckets are cut within attempts, so that what a restart changed shows where it happened. Those of many records are put
together from the blocks in memory, and so is a job of a million steps; those of few are read from the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from muster.api.core.metrics.steps import AttemptSpan, Axis, Record, StepHistory, evaluation_columns, training_columns
from muster.api.core.metrics.tables import BLOCK_RECORDS, SeriesExtent, StepTable

AXES: tuple[Axis, ...] = ("step", "tokens", "seconds")
_ENDLESS = float("inf")


@dataclass(frozen=True)
class CurveQuery:
    """Requested part of the curves: at most about `points` buckets, from `low` up to `high` on the axis. `only` names a
    series of the training beside which no other is needed."""

    points: int = 500
    axis: Axis = "step"
    low: float = -_ENDLESS
    high: float = _ENDLESS
    only: str = ""


@dataclass(frozen=True)
class _CurveBucket:
    """Records of one span and what their series come to."""

    span: AttemptSpan
    begin: int
    end: int
    extents: Mapping[str, SeriesExtent]

    @property
    def middle(self) -> int:
        return (self.begin + self.end - 1) // 2


def curves_document(history: StepHistory, query: CurveQuery) -> dict[str, Any]:
    """Curves as REST gives them, without the attempts' boundaries."""
    trained = _part(history.trained, query)
    total = sum(len(span) for span in trained)
    buckets = list(_buckets(trained, query.points, partial(training_columns, only=query.only)))
    evaluations = list(_buckets(_part(history.evaluated, query), query.points, evaluation_columns))
    return {
        "total": total,
        "thinned": len(buckets) < total,
        "unread": history.unread,
        **_drawn(buckets),
        "evaluations": _drawn(evaluations),
    }


def _part(spans: Sequence[AttemptSpan], query: CurveQuery) -> list[AttemptSpan]:
    parts = [span.between(query.axis, query.low, query.high) for span in spans]
    return [span for span in parts if len(span)]


def _buckets(spans: Sequence[AttemptSpan], points: int, columns: Any) -> Iterator[_CurveBucket]:
    total = sum(len(span) for span in spans)
    width = max(1, -(-total // points))
    for span in spans:
        yield from _from_file(span, width, columns) if width < BLOCK_RECORDS else _from_blocks(span, width, columns)


def _from_file(span: AttemptSpan, width: int, columns: Any) -> Iterator[_CurveBucket]:
    records = list(span.records(range(span.begin, span.end)))
    for begin in range(span.begin, span.end, width):
        end = min(begin + width, span.end)
        yield _CurveBucket(
            span, begin, end, _extents(span.table, records[begin - span.begin : end - span.begin], columns)
        )


def _from_blocks(span: AttemptSpan, width: int, columns: Any) -> Iterator[_CurveBucket]:
    """Yield whole blocks, and the records themselves at the span's ends, where it cuts a block."""
    step = -(-width // BLOCK_RECORDS) * BLOCK_RECORDS
    cuts = sorted({span.begin, *range(-(-span.begin // step) * step, span.end, step), span.end})
    for begin, end in pairwise(cuts):
        first, last = -(-begin // BLOCK_RECORDS), end // BLOCK_RECORDS
        if first > last:  # within one block
            yield _CurveBucket(span, begin, end, _extents(span.table, list(span.records(range(begin, end))), columns))
            continue
        edges = [*range(begin, first * BLOCK_RECORDS), *range(last * BLOCK_RECORDS, end)]
        edge_extents = _extents(span.table, list(span.records(edges)), columns) if edges else {}
        whole = {name: series.extent(first, last) for name, series in span.table.series.items()}
        yield _CurveBucket(span, begin, end, _joined(edge_extents, whole))


def _extents(table: StepTable, records: Sequence[Record], columns: Any) -> dict[str, SeriesExtent]:
    """Return the extents of the series that the table knows, which bounds their number."""
    extents = {}
    for name, column in columns(records).items():
        if name in table.series and (values := [value for value in column if value is not None]):
            extents[name] = SeriesExtent(min(values), max(values), sum(values), len(values))
    return extents


def _joined(some: Mapping[str, SeriesExtent], others: Mapping[str, SeriesExtent | None]) -> dict[str, SeriesExtent]:
    joined = dict(some)
    for name, extent in others.items():
        if extent is not None:
            mine = joined.get(name)
            joined[name] = extent if mine is None else mine.joined(extent)
    return joined


def _drawn(buckets: Sequence[_CurveBucket]) -> dict[str, Any]:
    """Columns: what the axes say at the middle of each bucket, and of each series the mean, the least and the most.

    `min` and `max` are left out where no bucket of the series has two values.
    """
    names = dict.fromkeys(name for bucket in buckets for name in bucket.extents)
    axes = {axis: [_short(bucket.span.value(axis, bucket.middle), 12) for bucket in buckets] for axis in AXES}
    series: dict[str, dict[str, list[float | None]]] = {}
    for name in names:
        extents = [bucket.extents.get(name) for bucket in buckets]
        series[name] = {"mean": [_short(each.total / each.count) if each else None for each in extents]}
        if any(each is not None and each.count > 1 for each in extents):
            series[name]["min"] = [_short(each.low) if each else None for each in extents]
            series[name]["max"] = [_short(each.high) if each else None for each in extents]
    return {"axes": axes, "series": series}


def _short(value: float, digits: int = 7) -> float:
    """Round to as many digits as a chart can show, which halves the bytes of the reply."""
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.{digits}g}")
