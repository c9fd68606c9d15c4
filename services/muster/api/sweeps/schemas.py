"""Sweeps as REST shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from muster.api.core.database.tables import JobRow, SweepRow, TrialRow
from muster.api.core.submission.schemas import DocumentMetadata
from muster.api.sweeps.decisions import TrialResults
from muster.recipe.document import JobSpec
from muster.recipe.sweep import Sweep
from muster.words.names import API_VERSION, KIND
from muster.words.redaction import redact_spec, without_env_values
from muster.words.times import rfc3339, rfc3339_or_none


class SweepDocument(BaseModel):
    """Body of POST /sweeps: a TrainingJob's document and, above its spec, what to try. Parsed by
    contract.sweep.parse_sweep."""

    model_config = ConfigDict(extra="forbid")

    api_version: str = Field(default=API_VERSION, pattern=f"^{API_VERSION}$", alias="apiVersion")
    kind: str = Field(default=KIND, pattern=f"^{KIND}$")
    metadata: DocumentMetadata
    sweep: Sweep
    spec: JobSpec


class Summary(BaseModel):
    """Summary of a sweep for lists, alongside its row, as its controller last saw it. `waits_for` says what keeps the
    next trial from starting, if anything does."""

    because: str
    waits_for: str = ""
    started: int = 0
    live: int = 0
    best_trial: int | None = None
    best_value: float | None = None


def sweep_summary(row: SweepRow) -> dict[str, Any]:
    """A line of the list."""
    seen, sweep = Summary.model_validate(row.summary), Sweep.model_validate(row.document["sweep"], by_alias=True)
    return {
        "id": row.id,
        "name": row.name,
        "project": row.project,
        "owner": row.owner,
        "phase": row.phase,
        "because": f"{seen.because}; {seen.waits_for}" if seen.waits_for else seen.because,
        "metric": row.metric,
        "trials": sweep.size,
        "started": seen.started,
        "live": seen.live,
        "bestTrial": seen.best_trial,
        "bestValue": seen.best_value,
        "createdAt": rfc3339(row.created_at),
        "finishedAt": rfc3339_or_none(row.finished_at),
    }


def sweep_document(row: SweepRow, trials: Sequence[tuple[TrialRow, JobRow | None]], reader: str) -> dict[str, Any]:
    """The sweep with its trials. `reader` is the person who sees it."""
    template, summary = row.document["job"], sweep_summary(row)
    spec = template["spec"] if reader == row.owner else without_env_values(template["spec"])
    best = next((each for each in trials if each[0].number == summary["bestTrial"]), None)
    return {
        **summary,
        "metadata": template["metadata"],
        "sweep": redact_spec(row.document["sweep"]),
        "spec": redact_spec(spec),
        "best": _best(*best) if best is not None else None,
        "table": [_trial(trial, job) for trial, job in trials],
    }


def _trial(trial: TrialRow, job: JobRow | None) -> dict[str, Any]:
    results = TrialResults.model_validate(trial.results)
    progress = (job.status.get("progress") or {}) if job is not None else {}
    best, last = results.best, results.last
    return {
        "number": trial.number,
        "parameters": redact_spec(trial.parameters),
        "jobId": trial.job_id,
        "job": job.name if job is not None else None,
        "phase": job.phase if job is not None else trial.phase,
        "step": progress.get("step"),
        "steps": progress.get("steps"),
        "value": best.value if best is not None else None,
        "valueStep": best.step if best is not None else None,
        "lastValue": last.value if last is not None else None,
        "lastStep": last.step if last is not None else None,
        "rungs": [rung.model_dump(mode="json", by_alias=True) for rung in results.rungs],
        "reason": trial.stopped,
    }


def _best(trial: TrialRow, job: JobRow | None) -> dict[str, Any] | None:
    best = TrialResults.model_validate(trial.results).best
    if best is None:
        return None
    seen = (job.status.get("checkpoint") or {}) if job is not None else {}
    commit = None
    if job is not None and seen:
        commit = {"job": job.id, "step": seen.get("bestStep") or "best"}
    return {
        "trial": trial.number,
        "parameters": redact_spec(trial.parameters),
        "value": best.value,
        "valueStep": best.step,
        "job": job.name if job is not None else None,
        "commit": commit,
    }
