"""Comparison of jobs: their differing settings and their results. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MISSING = object()


@dataclass(frozen=True)
class SettingDifference:
    """A setting with what each job has there, None for a job that has no such setting."""

    path: str
    values: tuple[str | None, ...]


@dataclass(frozen=True)
class MeasureScore:
    """Result of each job in one measure; `best` are the indices of the best, none if all are equal."""

    words: str
    values: tuple[float | None, ...]
    kind: str
    best: frozenset[int]


def differences(specs: Sequence[Mapping[str, Any]]) -> list[SettingDifference]:
    """The settings that are not the same in all jobs, in the order of the first job that has them."""
    flat = [dict(settings(spec)) for spec in specs]
    paths = dict.fromkeys(path for each in flat for path in each)
    rows = []
    for path in paths:
        values = [each.get(path, _MISSING) for each in flat]
        if any(value != values[0] for value in values[1:]):
            rows.append(
                SettingDifference(path, tuple(None if value is _MISSING else value_text(value) for value in values))
            )
    return rows


def settings(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """`optimizer.lr` → 1e-4: every value that is no object by its path. A list of objects goes by its indices."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from settings(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from settings(item, f"{path}[{index}]")
    else:
        yield path, value


def value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def scores(
    jobs: Sequence[Mapping[str, Any]],
    curves: Sequence[Mapping[str, Any]],
    results: Sequence[Mapping[str, float]] = (),
) -> list[MeasureScore]:
    """`jobs` as the API shows them, `curves` as `/curves` does, and the `results` of their evaluations by name, all in
    the same order. Whether a higher result is better is not known, so that none is called the best."""
    statuses = [job["status"] for job in jobs]
    rows = [
        _score("Best evaluation", "loss", [_least(each["evaluations"]["series"].get("loss")) for each in curves], min),
        _score("Least training loss", "loss", [_least(each["series"].get("loss")) for each in curves], min),
        _score("Last training loss", "loss", [_last(each["series"].get("loss")) for each in curves], min),
        _score("Tokens per second", "amount", [_mean(each["series"].get("tokensPerSecond")) for each in curves], max),
        _score("Tokens trained", "amount", [_end(each["axes"]["tokens"]) for each in curves], None),
        _score("Goodput", "share", [_goodput(status) for status in statuses], max),
        _score("Restarts", "count", [(status.get("restarts") or {}).get("total") for status in statuses], min),
    ]
    names = dict.fromkeys(name for each in results for name in sorted(each))
    rows += [_score(name, "loss", [each.get(name) for each in results], None) for name in names]
    return [row for row in rows if any(value is not None for value in row.values)]


def _score(words: str, kind: str, values: list[float | None], better: Any) -> MeasureScore:
    numbers = [value for value in values if value is not None]
    best: frozenset[int] = frozenset()
    if better is not None and len(numbers) > 1 and min(numbers) < max(numbers):
        best = frozenset(index for index, value in enumerate(values) if value == better(numbers))
    return MeasureScore(words, tuple(values), kind, best)


def _numbers(series: Mapping[str, Any] | None, column: str) -> list[float]:
    return [] if series is None else [v for v in series.get(column) or series["mean"] if v is not None]


def _least(series: Mapping[str, Any] | None) -> float | None:
    return min(_numbers(series, "min"), default=None)


def _last(series: Mapping[str, Any] | None) -> float | None:
    values = _numbers(series, "mean")
    return values[-1] if values else None


def _mean(series: Mapping[str, Any] | None) -> float | None:
    values = _numbers(series, "mean")
    return sum(values) / len(values) if values else None


def _end(places: Sequence[float]) -> float | None:
    return places[-1] if places else None


def _goodput(status: Mapping[str, Any]) -> float | None:
    seconds: dict[str, float] = (status.get("ledger") or {}).get("seconds") or {}
    total = sum(seconds.values())
    return seconds.get("productive", 0.0) / total if total > 0 else None
