"""Orders and groups of the list of jobs, as SQL.

A job is also sorted by any number or text of its spec and status, which lie in the database as JSON texts: both
databases read such a value where it lies, so that a page of a long list moves no more than its own rows.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Float, Text, bindparam, case, cast, desc, func, literal, select, type_coerce
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.sql.functions import FunctionElement

from muster.api.core.database.tables import HOLDS_NODES, JobRow, TrialRow

PATH_CHARACTERS_MAX = 160
# `training.data.train[0].source`: names with dots between them, and numbers of a list in brackets.
SETTING = re.compile(r"[A-Za-z][\w-]*(?:\[\d{1,3}\])*(?:\.[A-Za-z][\w-]*(?:\[\d{1,3}\])*)*")
# A metric's own name may have dots and slashes: `values.rewards/margins`, `results.mmlu.acc`.
METRIC = re.compile(r"(values|evaluation|results)\.([\w./:@%+ -]{1,100})")
_METRICS = {
    "values": ("progress", "values"),
    "evaluation": ("progress", "evaluationValues"),
    "results": ("results",),
}


class JsonNumber(FunctionElement[float]):
    """The number at a path of a JSON text; NULL where there is none."""

    type = Float()
    inherit_cache = True
    name = "json_number"


class JsonPart(FunctionElement[str]):
    """The value at a path of a JSON text, in words that are the same for equal values; NULL where there is none."""

    type = Text()
    inherit_cache = True
    name = "json_part"


# The numbers of a run that diverged are no JSON, and an error in either database: such a job has no value to sort by.
@compiles(JsonNumber, "sqlite")
def _number_of_sqlite(element: JsonNumber, compiler: Any, **options: Any) -> str:
    text, path = _processed(element, 1, compiler, options)
    value = f"json_extract({text}, {path})"
    return f"CASE WHEN json_valid({text}) AND typeof({value}) IN ('integer', 'real') THEN {value} END"


@compiles(JsonPart, "sqlite")
def _part_of_sqlite(element: JsonPart, compiler: Any, **options: Any) -> str:
    text, path = _processed(element, 1, compiler, options)
    return f"CASE WHEN json_valid({text}) THEN CAST(json_extract({text}, {path}) AS TEXT) END"


@compiles(JsonNumber, "postgresql")
def _number_of_postgresql(element: JsonNumber, compiler: Any, **options: Any) -> str:
    value, valid = _postgresql(element, compiler, options)
    return f"CASE WHEN {valid} THEN CASE WHEN json_typeof({value}) = 'number' THEN ({value})::text::float8 END END"


@compiles(JsonPart, "postgresql")
def _part_of_postgresql(element: JsonPart, compiler: Any, **options: Any) -> str:
    value, valid = _postgresql(element, compiler, options)
    return f"CASE WHEN {valid} THEN CASE WHEN json_typeof({value}) <> 'null' THEN ({value})::text END END"


def _processed(element: FunctionElement[Any], path: int, compiler: Any, options: dict[str, Any]) -> tuple[str, str]:
    """Return the text, and the path in one of its two spellings: the other must be no parameter of the statement."""
    clauses = list(element.clauses)
    return compiler.process(clauses[0], **options), compiler.process(clauses[path], **options)


def _postgresql(element: FunctionElement[Any], compiler: Any, options: dict[str, Any]) -> tuple[str, str]:
    text, path = _processed(element, 2, compiler, options)
    valid = f"position(':NaN' in {text}) = 0 AND position('Infinity' in {text}) = 0"
    return f"({text})::json #> ({path})::text[]", valid


def _at(column: InstrumentedAttribute[dict[str, Any]], *path: str | int) -> tuple[ColumnElement[Any], ...]:
    """The JSON text, and the path in the words of SQLite and of PostgreSQL."""
    sqlite = "$" + "".join(f"[{part}]" if isinstance(part, int) else f'."{part}"' for part in path)
    postgresql = "{" + ",".join(f'"{part}"' for part in path) + "}"
    return (
        type_coerce(column, Text),
        bindparam(None, sqlite, Text, unique=True),
        bindparam(None, postgresql, Text, unique=True),
    )


def _spec(*path: str | int) -> JsonNumber:
    return JsonNumber(*_at(JobRow.spec, *path))


def _status(*path: str | int) -> JsonNumber:
    return JsonNumber(*_at(JobRow.status, *path))


def _progress() -> ColumnElement[Any]:
    return _status("progress", "step") / func.nullif(_status("progress", "steps"), 0.0)


def _started() -> ColumnElement[Any]:
    return JsonPart(*_at(JobRow.status, "startedAt"))


def _duration() -> ColumnElement[Any]:
    """Seconds from the first attempt's start until the end, or until now."""
    return cast(func.coalesce(JobRow.finished_at, literal(time.time())), Float) - SecondsOf(_started())


class SecondsOf(FunctionElement[float]):
    """A time of a status, as `JsonPart` gives it, in seconds since the epoch; NULL for one that is none."""

    type = Float()
    inherit_cache = True
    name = "seconds_of"


@compiles(SecondsOf, "sqlite")
def _seconds_of_sqlite(element: SecondsOf, compiler: Any, **options: Any) -> str:
    return f"(julianday({compiler.process(element.clauses, **options)}) - 2440587.5) * 86400.0"


@compiles(SecondsOf, "postgresql")
def _seconds_of_postgresql(element: SecondsOf, compiler: Any, **options: Any) -> str:
    text = compiler.process(element.clauses, **options)
    plain = f"trim(both '\"' from {text})"
    return f"CASE WHEN {plain} ~ '^\\d{{4}}-\\d\\d-\\d\\dT' THEN extract(epoch from ({plain})::timestamptz)::float8 END"


def _workers() -> ColumnElement[Any]:
    """The nodes that the gang has, or else the fewest that it begins with."""
    workers = func.nullif(_status("gang", "wanted"), 0.0)
    return func.coalesce(workers, _spec("gang", "nodes"), _spec("gang", "nodes", "min"), 1.0)


def _model() -> ColumnElement[Any]:
    paths = (("preset",), ("source",), ("from", "job"), ("from", "uri"))
    return func.coalesce(*(JsonPart(*_at(JobRow.spec, "training", "model", *path)) for path in paths))


# What a column of the list is sorted by. Columns that are worked out in Python, such as the cost, have no order.
COLUMNS: Mapping[str, Callable[[], ColumnElement[Any]]] = {
    "submitted": lambda: JobRow.seq.expression,
    "name": lambda: JobRow.name.expression,
    "phase": lambda: JobRow.phase.expression,
    "owner": lambda: JobRow.owner.expression,
    "project": lambda: JobRow.project.expression,
    "priority": lambda: JobRow.priority.expression,
    "finished": lambda: JobRow.finished_at.expression,
    "progress": _progress,
    "evaluation": lambda: _status("progress", "evaluationLoss"),
    "loss": lambda: _status("progress", "loss"),
    "speed": lambda: _status("progress", "tokensPerSecond"),
    "mfu": lambda: _status("progress", "mfu"),
    "eta": lambda: case((JobRow.phase == "Running", _status("progress", "etaSeconds"))),
    "restarts": lambda: _status("restarts", "total"),
    "duration": _duration,
    "gpus": lambda: _workers() * func.coalesce(_spec("gang", "gpusPerNode"), 0.0),
    "model": _model,
    "data": lambda: JsonPart(*_at(JobRow.spec, "training", "data", "train", 0, "source")),
}

GROUPS: Mapping[str, Callable[[], ColumnElement[Any]]] = {
    "sweep": lambda: select(TrialRow.sweep_id).where(TrialRow.job_id == JobRow.id).limit(1).scalar_subquery(),
    "model": _model,
    "owner": COLUMNS["owner"],
    "project": COLUMNS["project"],
}


@dataclass(frozen=True)
class JobOrder:
    """Order of the list: by a key of COLUMNS, a setting's path in the spec, or a metric (see METRIC); where `key` is
    empty live jobs first, of these the ones that hold nodes, and then the newest. Jobs without the value come last. A
    key of GROUPS keeps
    the jobs with equal values together."""

    key: str = ""
    descending: bool = False
    group: str = ""

    def group_value(self) -> ColumnElement[Any]:
        return GROUPS[self.group]() if self.group in GROUPS else literal("")

    def terms(self) -> list[ColumnElement[Any]]:
        """Return the terms of ORDER BY."""
        grouped = [GROUPS[self.group]().nulls_last()] if self.group in GROUPS else []
        if not self.key:
            return [*grouped, JobRow.live.desc(), desc(HOLDS_NODES), JobRow.seq.desc()]
        values = [COLUMNS[self.key]()] if self.key in COLUMNS else list(_values(self.key))
        turned = [value.desc() if self.descending else value.asc() for value in values]
        return [*grouped, *(each.nulls_last() for each in turned), JobRow.seq.desc()]


def is_sortable(key: str) -> bool:
    """Return whether the list can be sorted by the column. Values of variables are their owner's secret, of which an
    order would tell something."""
    return key in COLUMNS or METRIC.fullmatch(key) is not None or is_setting(key)


def is_setting(key: str) -> bool:
    """Return whether the key is the path of a setting that everybody who sees the job may see."""
    fits = len(key) <= PATH_CHARACTERS_MAX and SETTING.fullmatch(key) is not None
    return fits and "env" not in re.split(r"[.\[]", key)


def _values(key: str) -> tuple[ColumnElement[Any], ...]:
    """Numbers before words: 8 comes before 16."""
    metric = METRIC.fullmatch(key)
    if metric:
        return (_status(*_METRICS[metric[1]], metric[2]),)
    path = setting_path(key)
    return _spec(*path), JsonPart(*_at(JobRow.spec, *path))


def setting_path(key: str) -> tuple[str | int, ...]:
    """Return the parts of a setting's path: ("training", "data", "train", 0, "source")."""
    return tuple(int(part[1:-1]) if part.startswith("[") else part for part in re.findall(r"\[\d+\]|[\w-]+", key))


def metric_path(key: str) -> tuple[str, ...] | None:
    """Return the path of a metric in the status; None for what is no metric."""
    metric = METRIC.fullmatch(key)
    return (*_METRICS[metric[1]], metric[2]) if metric else None
