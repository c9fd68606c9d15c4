"""muster_operator_job_*: each living job as its status tells it, for whoever can't scrape its workers, and after them.

Gauges, for a status may be corrected: productive seconds become lost ones when an attempt ends without a commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from muster.contract.prices import Prices, bill
from muster.operator.core.fleet import JobSummary

FINISHED_SECONDS = 900.0  # an ended job is still told, so that its last values are scraped
_JOB = ["job_uid", "job_name", "job_namespace"]
_ATTEMPT = [*_JOB, "attempt"]
_PREFIX = "muster_operator_job_"

Sample = tuple[str, list[str], float]  # family, label values, value


class JobMetrics(Collector):
    """jobs: called at every scrape, from the scraper's thread."""

    def __init__(
        self, jobs: Callable[[], Iterable[JobSummary]], prices: Prices, now: Callable[[], float] = time.time
    ) -> None:
        self._jobs, self._prices, self._now = jobs, prices, now

    def describe(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Their names, without asking for jobs."""
        return _families().values()

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        families, now = _families(), self._now()
        for job in self._jobs():
            ended = job.status.finished_at
            if not job.status.phase.terminal or (ended is not None and now - ended < FINISHED_SECONDS):
                for name, labels, value in self._samples(job, now):
                    families[name].add_metric([job.uid, job.name, job.namespace, *labels], value)
        return families.values()

    def _samples(self, job: JobSummary, now: float) -> Iterator[Sample]:
        status = job.status
        attempt = [str(status.attempt)]
        yield "phase", [str(status.phase)], 1.0
        yield "attempt", [], status.attempt
        yield "workers_wanted", [], status.gang.wanted
        yield "workers_ready", [], status.gang.ready
        if (progress := status.progress) is not None:
            yield "step", attempt, progress.step
            yield "last_step_timestamp_seconds", attempt, progress.at
            for name in ("loss", "tokens_per_second", "mfu"):
                if (value := getattr(progress, name)) is not None:
                    yield name if name != "mfu" else "mfu_ratio", attempt, value
        if status.checkpoint is not None:
            yield "last_commit_step", [], status.checkpoint.step
            yield "last_commit_timestamp_seconds", [], status.checkpoint.committed_at
        for state, seconds in status.ledger.seconds.items():
            yield "goodput_seconds", [state], seconds
        for cause, count in status.restarts.by_cause.items():
            yield "restarts", [cause], count
        account = bill(status.attempts, self._prices, now)
        for capacity, hours in account.gpu_hours.items():
            yield "gpu_seconds", [capacity], hours * 3600.0
        yield "cost_dollars", [], account.cost
        yield "saved_dollars", [], account.saved
        yield "unpriced_seconds", [], account.unpriced_hours * 3600.0


def _families() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    gauges = {
        "phase": ("1 for the job's phase", [*_JOB, "phase"]),
        "attempt": ("The current or last attempt", _JOB),
        "workers_wanted": ("Workers of the gang", _JOB),
        "workers_ready": ("Of them, those that run", _JOB),
        "step": ("The last step that the operator has heard of", _ATTEMPT),
        "last_step_timestamp_seconds": ("When the operator last heard of a new step", _ATTEMPT),
        "loss": ("Training loss of that step", _ATTEMPT),
        "tokens_per_second": ("Of all ranks, over that step", _ATTEMPT),
        "mfu_ratio": ("Model FLOPs utilisation of that step", _ATTEMPT),
        "last_commit_step": ("The step of the newest commit", _JOB),
        "last_commit_timestamp_seconds": ("When the newest commit was made", _JOB),
        "gpu_seconds": ("Time in which the job held accelerators, times their number", [*_JOB, "capacity"]),
        "cost_dollars": ("What the nodes of its last fifty attempts cost, where their prices are known", _JOB),
        "saved_dollars": ("What they would have cost more on demand", _JOB),
        "unpriced_seconds": ("Time of nodes whose price is not known, and which is not in the cost", _JOB),
        "goodput_seconds": ("The job's life, by what it was spent on; sums to the wall clock", [*_JOB, "state"]),
    }
    found: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
        name: GaugeMetricFamily(_PREFIX + name, help, labels=labels) for name, (help, labels) in gauges.items()
    }
    found["restarts"] = CounterMetricFamily(
        f"{_PREFIX}restarts", "Attempts that ended in a failure", labels=[*_JOB, "cause"]
    )
    return found
