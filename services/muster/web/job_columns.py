"""Columns of the table of jobs: which there are, and what each says of a job, in words and as a bare value. Pure.

A key that is none of COLUMNS is a setting's path (`training.optimizer.lr`) or a metric (`values.rewards/margins`,
`evaluation.perplexity`, `results.accuracy`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.web.api import ordering
from muster.words import text
from muster.words.times import epoch_seconds

JobLine = Mapping[str, Any]  # of api.list_jobs
CHOSEN_MAX = 24
NAME = "name"  # the column that is always there


@dataclass(frozen=True)
class JobColumn:
    """A column. `value` is what a file of the table holds; `words` is what the page shows of it, where its template
    has nothing better. `width` is the window's width, in pixels, from which the column is shown where nobody chose
    columns; `falls` says that its order begins with the largest."""

    key: str
    title: str
    value: Callable[[JobLine], Any]
    words: Callable[[Any], str] = str
    number: bool = False
    width: int | None = None
    falls: bool = False

    @property
    def sortable(self) -> bool:
        return ordering.is_sortable(self.key)

    def text_of(self, job: JobLine) -> str:
        value = self.value(job)
        return text.NOTHING if value is None or value == "" else self.words(value)


def model_words(spec: Mapping[str, Any]) -> str:
    """Return the name of the model that a job starts from."""
    model = (spec.get("training") or {}).get("model") or {}
    if model.get("preset"):
        return str(model["preset"])
    if model.get("source"):
        return address_words(model["source"])
    if start := model.get("from"):
        return f"from {start.get('job') or address_words(start.get('uri') or '')}"
    return "own shape" if model.get("architecture") else ""


def data_words(spec: Mapping[str, Any]) -> str:
    """Return the name of the first source of the training data, and the number of the others."""
    sources = [each.get("source") or "" for each in ((spec.get("training") or {}).get("data") or {}).get("train") or ()]
    if not sources:
        return ""
    return address_words(sources[0]) + (f" +{len(sources) - 1}" if len(sources) > 1 else "")


def address_words(address: str) -> str:
    """Return the end of an address, by which people know what lies there."""
    scheme, _, path = address.rpartition("://")
    plain = path.partition("?")[0].rstrip("/")
    return plain.partition("@")[0] if scheme == "hf" else plain.rpartition("/")[2] or plain


def _seconds(job: JobLine) -> float | None:
    """Seconds from the first attempt's start until the end, or until now."""
    if not job["startedAt"]:
        return None
    end = epoch_seconds(job["finishedAt"]) if job["finishedAt"] else time.time()
    return max(0.0, round(end - epoch_seconds(job["startedAt"]), 1))


def _left(job: JobLine) -> float | None:
    left: float | None = job["etaSeconds" if job["phase"] == "Running" else "startsInSeconds"]
    return left


def _sweep(job: JobLine) -> str | None:
    trial = job["trial"]
    return f"{trial.name} #{trial.number}" if trial else None


def _because(job: JobLine) -> str:
    """The reason, where it says more than the phase does."""
    return "" if job["phase"] in ("Running", "Succeeded") else str(job["because"])


def _mfu(job: JobLine) -> float | None:
    return _number(_at(job["status"], ("progress", "mfu")))


def _of(key: str) -> Callable[[JobLine], Any]:
    return lambda job: job[key]


COLUMNS: Mapping[str, JobColumn] = {
    column.key: column
    for column in (
        JobColumn("phase", "Phase", _of("phase"), width=0),
        JobColumn("progress", "Progress", _of("step"), lambda step: f"{step:,}", width=0, falls=True),
        JobColumn("evaluation", "Eval loss", _of("evaluationLoss"), text.loss, number=True, width=0),
        JobColumn("loss", "Loss", _of("loss"), text.loss, number=True, width=0),
        JobColumn("speed", "Tokens/s", _of("tokensPerSecond"), text.amount, number=True, width=1100, falls=True),
        JobColumn("eta", "Left", _left, text.duration, number=True, width=1100),
        JobColumn("because", "Reason", _because, width=1250),
        JobColumn("model", "Model", lambda job: model_words(job["spec"]), width=1500),
        JobColumn("data", "Data", lambda job: data_words(job["spec"])),
        JobColumn("task", "Task", _of("task")),
        JobColumn("duration", "Duration", _seconds, text.duration, number=True, width=760, falls=True),
        JobColumn("gpus", "GPUs", _of("gpus"), number=True, width=1600, falls=True),
        JobColumn("cost", "Cost", lambda job: job["cost"]["cost"] or None, number=True, width=1750),
        JobColumn("mfu", "MFU", _mfu, text.share, number=True, falls=True),
        JobColumn("goodput", "Goodput", _of("goodput"), text.share, number=True),
        JobColumn("restarts", "Restarts", _of("restarts"), number=True, falls=True),
        JobColumn("checkpoint", "Checkpoint", _of("checkpointStep"), lambda step: f"{step:,}", number=True),
        JobColumn("priority", "Priority", _of("priority"), number=True, falls=True),
        JobColumn("sweep", "Sweep", _sweep),
        JobColumn("project", "Project", _of("project"), width=1850),
        JobColumn("owner", "Owner", _of("owner"), width=1350),
        JobColumn("note", "Note", _of("note")),
        JobColumn("submitted", "Submitted", _of("createdAt"), width=900, falls=True),
    )
}  # fmt: skip
DEFAULT = tuple(key for key, column in COLUMNS.items() if column.width is not None)


def column(key: str) -> JobColumn:
    """Return the column of that key, which `column_keys` let pass."""
    if key in COLUMNS:
        return COLUMNS[key]
    if (path := ordering.metric_path(key)) is not None:
        return JobColumn(key, key, lambda job: _number(_at(job["status"], path)), text.loss, number=True)
    parts = ordering.setting_path(key)
    return JobColumn(key, key, lambda job: _at(job["spec"], parts), _plain)


def column_keys(keys: Iterable[str]) -> tuple[str, ...]:
    """Return those of the keys that name a column, without repetitions; the columns of COLUMNS first, in their order.
    `spec.training.optimizer.lr` is `training.optimizer.lr`."""
    asked = dict.fromkeys(key.strip().removeprefix("spec.") for key in keys)
    own = [key for key in COLUMNS if key in asked]
    others = [key for key in asked if key not in COLUMNS and key != NAME and _names_column(key)]
    return tuple((own + others)[:CHOSEN_MAX])


def _names_column(key: str) -> bool:
    # A word without a dot is a mistyped column more often than a setting at the top of the spec.
    return ordering.metric_path(key) is not None or ("." in key and ordering.is_setting(key))


def _at(value: Any, path: Sequence[str | int]) -> Any:
    for part in path:
        if isinstance(part, int):
            value = value[part] if isinstance(value, list) and part < len(value) else None
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class JobGroup:
    """Jobs of a page that are grouped together. `filters` show only this group, `sweep` is the id of its sweep; None
    where there is none."""

    words: str
    count: int
    filters: dict[str, str] | None
    sweep: str | None
    jobs: tuple[JobLine, ...]


def groups(jobs: Sequence[JobLine], by: str, counts: Mapping[str, int]) -> list[JobGroup]:
    """Return the jobs in their groups, which lie one after another; one group without words where `by` is empty."""
    if not by:
        return [JobGroup("", len(jobs), None, None, tuple(jobs))]
    groups: dict[str, list[JobLine]] = {}
    for job in jobs:
        groups.setdefault(job["group"], []).append(job)
    return [_group(members, by, counts.get(value, len(members))) for value, members in groups.items()]


def _group(members: Sequence[JobLine], by: str, count: int) -> JobGroup:
    first = members[0]
    filters = {by: first["group"]} if by in ("owner", "project") else None
    sweep = first["trial"].sweep if by == "sweep" and first["trial"] else None
    return JobGroup(_group_words(first, by), count, filters, sweep, tuple(members))


def _group_words(job: JobLine, by: str) -> str:
    if by == "sweep":
        return job["trial"].name if job["trial"] else "No sweep"
    return model_words(job["spec"]) or "No model" if by == "model" else job["group"]


def csv_value(value: Any) -> Any:
    """Return the value as a cell of a file that spreadsheets open: a text never begins as a formula does."""
    if isinstance(value, bool) or value is None or isinstance(value, int | float):
        return "" if value is None else value
    words = text.readable(_plain(value))
    return f"'{words}" if words.startswith(("=", "+", "-", "@", "\t", "\r")) else words
