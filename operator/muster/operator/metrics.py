"""muster_operator_*: what the operator did, each counted after the write or action that it counts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from muster.contract.status import Phase
from muster.operator.core.decision import Action, Decision
from muster.operator.core.observed import Observed, Reservation
from muster.operator.runner import Listener

# A recovery is seconds on a laptop and minutes in a cluster.
_RECOVERY_BUCKETS = (1, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1800)
_SILENCE_SECONDS_MAX = 30.0  # longer without a turn of the event loop, and /healthz says so


class Metrics(Listener):
    """registry: of this operator alone, so that tests can have several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._decisions = self._counter("decisions", "Decisions made, by their code", "code")
        self._writes = self._counter("status_writes", "Statuses written")
        self._attempts = self._counter("attempts", "Attempts begun")
        self._restarts = self._counter("restarts", "Attempts that ended in a restart, by cause", "cause")
        self._finished = self._counter("jobs_finished", "Jobs that came to an end, by phase", "phase")
        self._actions = self._counter("actions", "Actions carried out", "action")
        self._failures = self._counter("pass_failures", "Passes that ended in an error, by its type", "error")
        self._reserved = Gauge(
            "muster_operator_reserved_nodes", "Nodes that jobs hold in the ledger", registry=self.registry
        )
        self._recovery = Histogram(
            "muster_operator_recovery_seconds",
            "From a failure to the next attempt's first step",
            registry=self.registry,
            buckets=_RECOVERY_BUCKETS,
        )

    def decided(self, seen: Observed, decision: Decision) -> None:
        self._decisions.labels(decision.code or decision.status.code).inc()

    def wrote(self, seen: Observed, decision: Decision) -> None:
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

    def reserved(self, before: tuple[Reservation, ...], after: tuple[Reservation, ...]) -> None:
        self._reserved.set(sum(len(entry.nodes) for entry in after))

    def failed(self, key: str, error: Exception, retry_seconds: float) -> None:
        self._failures.labels(type(error).__name__).inc()

    def show_jobs(self, phases: Callable[[], dict[str, int]]) -> None:
        """Let the scrape ask how many jobs are in each phase."""
        self.registry.register(_Jobs(phases))

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"muster_operator_{name}", help, labels, registry=self.registry)


class _Jobs(Collector):
    def __init__(self, phases: Callable[[], dict[str, int]]) -> None:
        self._phases = phases

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily("muster_operator_jobs", "Jobs by phase", labels=["phase"])
        for phase, count in self._phases().items():
            family.add_metric([phase], count)
        return [family]


class Pulse:
    """Beaten by the event loop; read by /healthz from another thread."""

    def __init__(self) -> None:
        self._beat_at = time.monotonic()

    def beat(self) -> None:
        self._beat_at = time.monotonic()

    def silence_seconds(self) -> float:
        return time.monotonic() - self._beat_at


def serve_metrics(metrics: Metrics, pulse: Pulse, host: str, port: int) -> ThreadingHTTPServer:
    """/metrics and /healthz in a thread of their own. port 0: any free one. Raises OSError when the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.split("?")[0] == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest(metrics.registry))
            elif self.path == "/healthz":
                silence = pulse.silence_seconds()
                well = silence <= _SILENCE_SECONDS_MAX
                told = {"status": "ok" if well else "stuck", "secondsSinceLastTurn": round(silence, 1)}
                self._answer(200 if well else 503, "application/json", json.dumps(told).encode())
            else:
                self._answer(404, "text/plain", b"there are /metrics and /healthz\n")

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A scrape every few seconds is no news."""

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
