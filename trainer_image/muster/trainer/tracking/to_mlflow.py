"""MLflow, by its own client."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from muster.trainer.config import WorkerRun
from muster.trainer.tracking.tracker import scalars
from muster.words.redaction import redact_spec
from muster.words.signals import StepRecord

METRICS_MAX, PARAMETERS_MAX, TEXT_MAX = 1_000, 100, 500  # of one request, by MLflow's own limits
JOB_TAG = "muster.job_uid"
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}


class MLflow:
    """One run per job, found by a tag: a later attempt goes on with it."""

    def __init__(self, run: WorkerRun, url: str, experiment: str) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=url)
        self._last = self._steps = 0  # the last step that was told, and the number of steps of the job
        known_experiment = self._client.get_experiment_by_name(experiment)
        number = known_experiment.experiment_id if known_experiment else self._client.create_experiment(experiment)
        runs = self._client.search_runs([number], f"tags.`{JOB_TAG}` = '{run.job_uid}'", max_results=1)
        if runs:
            self._id: str = runs[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
        else:
            self._id = self._client.create_run(number, run_name=run.job, tags={JOB_TAG: run.job_uid}).info.run_id
            self._describe(run)

    def write(self, records: Sequence[StepRecord]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(record.at * 1000), record.step)
            for record in records
            for name, value in scalars(record).items()
        ]
        for some in _batches(metrics, METRICS_MAX):
            self._client.log_batch(self._id, metrics=some)
        if records:
            self._last = records[-1].step
            self._steps = records[-1].steps or 0

    def close(self) -> None:
        ended = 0 < self._steps <= self._last
        self._client.set_terminated(self._id, "FINISHED" if ended else "KILLED")

    def _describe(self, run: WorkerRun) -> None:
        from mlflow.entities import Param

        parameters = [Param(path, text[:TEXT_MAX]) for path, text in _leaves(redact_spec(run.document))]
        for some in _batches(parameters, PARAMETERS_MAX):
            self._client.log_batch(self._id, params=some)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every setting by its path; what is not set is left out."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else str(name))
    elif value is not None:
        yield path, str(value)


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[at : at + size] for at in range(0, len(items), size))
