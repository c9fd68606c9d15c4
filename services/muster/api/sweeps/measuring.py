"""Evaluations of a trial, read from its job's step records, or from its status where there are no records here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from muster.api.core.metrics.steps import StepLogs
from muster.api.core.metrics.tables import finite
from muster.api.sweeps.decisions import MetricValue

# By the metric's name in evaluation.metric; every other one is among the values by name.
_LOSS = "loss"


def measured_after(
    step_logs: StepLogs, job_id: str, status: Mapping[str, Any], metric: str, step: int
) -> tuple[MetricValue, ...]:
    """The evaluations after the step, ascending. That of step 0, before any training, is none of the trial's own."""
    history = step_logs.history(job_id)
    values: dict[int, float] = {}
    for span in history.evaluated:
        new = span.between("step", step + 1, math.inf)
        for index, record in zip(range(new.begin, new.end), new.records(range(new.begin, new.end)), strict=True):
            _note(values, int(new.value("step", index)), record, metric)
    if not history.evaluated:  # another replica has them, or nobody has any more
        progress = status.get("progress") or {}
        if (at := progress.get("evaluationStep") or 0) > step:
            _note(values, at, progress, metric)
    return tuple(MetricValue(step=at, value=values[at]) for at in sorted(values))


def _note(values: dict[int, float], step: int, record: Mapping[str, Any], metric: str) -> None:
    """`record` has the words that step records and a status' progress share."""
    value = record.get("evaluationLoss") if metric == _LOSS else (record.get("evaluationValues") or {}).get(metric)
    if (number := finite(value)) is not None:
        values[step] = number
