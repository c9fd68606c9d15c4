"""muster_operator_*: what the operator did, each counted after the write or action that it counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from importlib.metadata import version

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from muster.operator.core.decision import Action, JobDecision
from muster.operator.core.fleet import JobSummary
from muster.operator.core.observed import NodeReservation, ObservedJob
from muster.operator.job_metrics import job_page
from muster.operator.runner import RunnerListener
from muster.operator.server import GetPage
from muster.operator.sources.alerts import AlertOutcome
from muster.words.prices import Prices
from muster.words.signals import Cause
from muster.words.status import Phase

# A recovery is seconds on a laptop and minutes in a cluster.
_RECOVERY_BUCKETS = (1, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1800)


class OperatorMetrics(RunnerListener):
    """Counts what the runner does, in a registry of this operator alone, so that tests can have several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, CPU and open files
        build = Info("muster_operator_build", "The version that runs", registry=self.registry)
        build.info({"version": version("muster-train")})
        self._job_page: Callable[[], str] = str  # nothing, until `show_jobs`
        self._decisions = self._counter("decisions", "Decisions made, by their code", "code")
        self._writes = self._counter("status_writes", "Statuses written")
        self._attempts = self._counter("attempts", "Attempts begun")
        self._restarts = self._counter("restarts", "Attempts that ended in a restart, by cause", "cause")
        self._finished = self._counter("jobs_finished", "Jobs that came to an end, by phase", "phase")
        self._actions = self._counter("actions", "Actions carried out", "action")
        self._failures = self._counter("pass_failures", "Passes that ended in an error, by its type", "error")
        self._reserved = Gauge(
            "muster_operator_reserved_nodes", "Nodes that are reserved for jobs", registry=self.registry
        )
        self._recovery = Histogram(
            "muster_operator_recovery_seconds",
            "From a failure to the next attempt's first step",
            registry=self.registry,
            buckets=_RECOVERY_BUCKETS,
        )
        self._alerts = self._counter("alerts", "Alerts received at the webhook, by what became of them", "outcome")
        self._questions = self._counter("prometheus_queries", "Questions to Prometheus, by how they ended", "outcome")
        # From 0 on: `increase` does not see the first event of a series that begins with it.
        labelled: tuple[tuple[Counter, Iterable[str]], ...] = (
            (self._restarts, Cause),
            (self._finished, (phase for phase in Phase if phase.terminal)),
            (self._alerts, AlertOutcome),
            (self._questions, ("answered", "failed")),
        )
        for counter, words in labelled:
            for word in words:
                counter.labels(str(word))

    def page(self) -> GetPage:
        return GetPage(CONTENT_TYPE_LATEST, generate_latest(self.registry) + self._job_page().encode())

    def alert(self, outcome: str) -> None:
        """An alert came in at the webhook."""
        self._alerts.labels(outcome).inc()

    def asked(self, error: Exception | None) -> None:
        """Prometheus was asked."""
        self._questions.labels("failed" if error else "answered").inc()

    def decided(self, seen: ObservedJob, decision: JobDecision) -> None:
        self._decisions.labels(decision.code or decision.status.code).inc()

    def wrote(self, seen: ObservedJob, decision: JobDecision) -> None:
        before, after = seen.status, decision.status
        self._writes.inc()
        if after.attempt > before.attempt:
            self._attempts.inc()
        for cause, count in after.restarts.by_cause.items():
            self._restarts.labels(cause).inc(max(0, count - before.restarts.by_cause.get(cause, 0)))
        if after.phase.terminal and not before.phase.terminal:
            self._finished.labels(after.phase).inc()
        if after.phase == Phase.RUNNING != before.phase and after.last_failure:
            self._recovery.observe(max(0.0, seen.now - after.last_failure.at))

    def applied(self, uid: str, action: Action) -> None:
        self._actions.labels(type(action).__name__).inc()

    def reserved(self, before: tuple[NodeReservation, ...], after: tuple[NodeReservation, ...]) -> None:
        self._reserved.set(sum(len(entry.nodes) for entry in after))

    def failed(self, key: str, error: Exception, retry_seconds: float) -> None:
        self._failures.labels(type(error).__name__).inc()

    def show_jobs(
        self,
        phases: Callable[[], dict[str, int]],
        jobs: Callable[[], Iterable[JobSummary]],
        prices: Prices,
    ) -> None:
        """Let the scrape ask how many jobs are in each phase, and how each of them is."""
        self.registry.register(_JobCollector(phases))
        self._job_page = lambda: job_page(jobs(), prices, time.time())

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"muster_operator_{name}", help, labels, registry=self.registry)


class _JobCollector(Collector):
    def __init__(self, phases: Callable[[], dict[str, int]]) -> None:
        self._phases = phases

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily("muster_operator_jobs", "Jobs by phase", labels=["phase"])
        counts = self._phases()
        for phase in Phase:  # those without jobs too: no rule could tell "none" from "not scraped"
            family.add_metric([str(phase)], counts.get(str(phase), 0))
        return [family]
