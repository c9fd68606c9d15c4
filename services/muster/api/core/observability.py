"""The API's own metrics, in a registry of each app, so that two apps in one process do not count together."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)

from muster.plan.usage import Amounts

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter that nobody reads

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_USAGE = {
    "gpu_hours": "GPU-hours that the project used",
    "cpu_hours": "CPU-hours of its gangs without GPUs",
    "cost": "What it cost, in the currency of the table of prices, as far as prices are known,",
    "saved": "What spot nodes saved it",
    "lost_gpu_hours": "GPU-hours that failures lost it",
    "unpriced_hours": "Node-hours without a price",
}


class WebhookMetrics:
    """Metrics of the messages to webhooks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.attempts = Counter(
            "muster_api_webhook_attempts",
            "Attempts to deliver a webhook's message: delivered, retried (it is sent again) or given_up.",
            ("outcome",),
            registry=registry,
        )
        self.seconds = Histogram(
            "muster_api_webhook_seconds",
            "Time until the receiver answered, or did not.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.waiting = Gauge(
            "muster_api_webhook_waiting", "Messages that wait, of webhooks that are enabled.", registry=registry
        )
        self.oldest = Gauge(
            "muster_api_webhook_oldest_seconds",
            "Since the oldest message that waits was written; 0 where none waits.",
            registry=registry,
        )


class ApiMetrics:
    """`version` is the API's own, shown as a label of muster_api_build_info."""

    def __init__(self, version: str = "") -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, CPU and open files
        Info("muster_api_build", "The version that runs.", registry=self.registry).info({"version": version})
        self.of_projects = CollectorRegistry()  # names of projects, and what they spend: not for everybody
        self.requests = Counter(
            "muster_api_requests", "Requests answered.", ("method", "route", "status"), registry=self.registry
        )
        self.request_seconds = Histogram(
            "muster_api_request_seconds",
            "Time to the end of the reply.",
            ("method", "route"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.submissions = Counter("muster_api_submissions", "Jobs accepted.", registry=self.registry)
        self.streams = Gauge("muster_api_streams", "Event and log streams open now.", registry=self.registry)
        self.relayed = Counter(
            "muster_api_relayed", "Jobs handed to the cluster, new or changed.", registry=self.registry
        )
        self.relay_failures = Counter(
            "muster_api_relay_failures", "Hand-overs that will be retried.", registry=self.registry
        )
        self.relay_waiting = Gauge(
            "muster_api_relay_waiting", "Rows that the last look found to hand over.", registry=self.registry
        )
        self.mirrored = Counter(
            "muster_api_mirrored_changes", "Versions of statuses taken over.", registry=self.registry
        )
        self.mirror_lag = Gauge(
            "muster_api_mirror_lag_versions", "Versions that the cluster is ahead of the rows.", registry=self.registry
        )
        self.webhooks = WebhookMetrics(self.registry)

        self._usage = {
            name: Gauge(
                f"muster_api_project_{name}", f"{words} this month (UTC).", ("project",), registry=self.of_projects
            )
            for name, words in _USAGE.items()
        }
        self._budgets = Gauge(
            "muster_api_project_budget_ratio",
            "Of a month's budget, what is used: the project's, or that of its person who used most of theirs.",
            ("project", "whose", "unit"),
            registry=self.of_projects,
        )

    def show_usage(self, usage: Mapping[str, Amounts], budgets: Mapping[tuple[str, str, str], float]) -> None:
        """Show `usage` by project, and `budgets` by project, by whose budget it is and by unit."""
        for name, gauge in self._usage.items():
            gauge.clear()
            for project, amounts in usage.items():
                gauge.labels(project).set(getattr(amounts, name))
        self._budgets.clear()
        for labels, ratio in budgets.items():
            self._budgets.labels(*labels).set(ratio)

    def request(self, method: str, route: str, status: int, seconds: float | None) -> None:
        """Count a request. `seconds` is None for a stream, whose length says nothing about the API."""
        self.requests.labels(method, route, str(status)).inc()
        if seconds is not None:
            self.request_seconds.labels(method, route).observe(seconds)
