"""Reports of a worker in a cluster to the operator, which can't read the worker's files there.

While it runs, the launcher answers `GET /heartbeats` with the heartbeats of its ranks, and Prometheus' `GET /metrics`
with one page of all of them. When it ends, its exit record is also its pod's termination message. Each of these is
there only where the environment requests it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from muster.worker.heartbeats import heartbeats_in
from muster.worker.names import HEARTBEATS_PATH, LAST_HEARTBEAT, WorkerVariables

TERMINATION_BYTES_MAX = 4_096  # the kubelet keeps no more of a termination message
# What nobody asks of a rank that has ended.
NOT_LAST = ("stands", "doing", "memory", "slowRanks", "lastSkipped", "trackingFault")
MetricsPage = Callable[[str, Mapping[str, str]], str]  # of the ranks whose heartbeats lie in that folder
PLACE = {
    "job_name": WorkerVariables.JOB,
    "job_uid": WorkerVariables.JOB_UID,
    "attempt": WorkerVariables.ATTEMPT,
    "worker": WorkerVariables.WORKER,
}
_HELP = {
    "step": ("gauge", "The last step that this rank finished"),
    "loss": ("gauge", "Training loss of the last step, as the program reports it"),
    "grad_norm": ("gauge", "Gradient norm of the last step, before clipping"),
    "learning_rate": ("gauge", "Learning rate of the last step"),
    "tokens_per_second": ("gauge", "Tokens per second of all ranks over the last step"),
    "rank_step_seconds": ("gauge", "This rank's last step, waits included"),
    "last_step_timestamp_seconds": ("gauge", "When the last step ended"),
    "evaluation_loss": ("gauge", "Loss of the last evaluation"),
    "last_commit_step": ("gauge", "The step of the last checkpoint"),
    "last_commit_timestamp_seconds": ("gauge", "When the last checkpoint was seen"),
    "limit_seconds": ("gauge", "How long this rank may go without progress; missing where it is not watched"),
    "phase": ("gauge", "1 for the phase that this rank is in"),
}


def metrics_page(directory: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return Prometheus' page of all ranks of this worker, under the names that Muster's own trainer has where they
    mean the same."""
    samples: dict[str, list[str]] = {name: [] for name in _HELP}
    place = {label: environ.get(variable, "") for label, variable in PLACE.items()}
    for beat in heartbeats_in(directory):
        labels = {**place, "rank": str(beat["rank"])}
        last = beat.get("lastStep") or {}
        numbers = {
            "step": beat.get("step"),
            "loss": last.get("loss"),
            "grad_norm": last.get("gradNorm") or None,
            "learning_rate": last.get("lr") or None,
            "tokens_per_second": last.get("tokensPerSecond") or None,
            "rank_step_seconds": last.get("stepSeconds") or None,
            "last_step_timestamp_seconds": last.get("at"),
            "evaluation_loss": last.get("evaluationLoss"),
            "last_commit_step": beat.get("lastCommitStep"),
            "last_commit_timestamp_seconds": beat.get("lastCommitAt"),
            "limit_seconds": beat.get("limitSeconds") if beat.get("watched") else None,
        }
        for name, number in numbers.items():
            if isinstance(number, (int, float)):
                samples[name].append(f"muster_trainer_{name}{_labels(labels)} {float(number)!r}")
        samples["phase"].append(f"muster_trainer_phase{_labels({**labels, 'phase': str(beat.get('phase'))})} 1.0")
    lines = []
    for name, values in samples.items():
        if values:
            kind, words = _HELP[name]
            lines += [f"# HELP muster_trainer_{name} {words}", f"# TYPE muster_trainer_{name} {kind}", *values]
    return "\n".join(lines) + "\n" if lines else ""


def serve_reports(directory: str, environ: Mapping[str, str] = os.environ, page: MetricsPage = metrics_page) -> None:
    """Answer in a thread of our own, if MUSTER_REPORT_PORT is set. A taken port is told and ends nothing."""
    port, host = environ.get(WorkerVariables.REPORT_PORT, ""), environ.get(WorkerVariables.POD_IP, "")
    if not port.isdecimal():
        return
    try:
        server = _server_of(host)((host, int(port)), _handler(directory, environ, page))
    except OSError as error:
        print(f"muster: can't report heartbeats on {host or '*'}:{port}: {error.strerror}", file=sys.stderr, flush=True)
        return
    threading.Thread(target=server.serve_forever, name="report", daemon=True).start()


def _labels(labels: Mapping[str, str]) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"


def write_termination_message(record: dict[str, Any], directory: str, environ: Mapping[str, str] = os.environ) -> None:
    """Write the exit record as the termination message, if MUSTER_TERMINATION_LOG names a file for it."""
    path = environ.get(WorkerVariables.TERMINATION_LOG)
    if not path:
        return
    try:
        with open(path, "w") as file:  # it is mounted: it can't be replaced, only filled
            file.write(termination_message(record, directory))
    except OSError as error:
        print(f"muster: can't write the termination message {path}: {error.strerror}", file=sys.stderr, flush=True)


def termination_message(record: dict[str, Any], directory: str) -> str:
    """Return the record with the last heartbeat of the worker's first rank, which nobody can ask for any more, as JSON
    of at most 4 KiB: the log loses its beginning first, then the message its end, and then the heartbeat is left
    out."""
    beat = next(iter(heartbeats_in(directory)), None)
    small = {name: value for name, value in (beat or {}).items() if name not in NOT_LAST}
    for last in (small, None) if small else (None,):
        for tail, message in ((2_000, 1_000), (1_000, 800), (300, 400), (0, 400), (0, 100)):
            cut = {**record, "logTail": (record.get("logTail") or "")[-tail:] if tail else ""}
            cut["message"] = (record.get("message") or "")[:message]
            text = _compact(cut if last is None else {**cut, LAST_HEARTBEAT: last})
            if len(text.encode()) <= TERMINATION_BYTES_MAX:
                return text
    return _compact({name: record.get(name) for name in ("exitCode", "at", "signal", "rank", "step")})


def _compact(document: dict[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"))


def _handler(directory: str, environ: Mapping[str, str], page: MetricsPage) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            code, kind, body = 200, "application/json", b"{}"
            if self.path == "/metrics":
                kind, body = "text/plain; version=0.0.4; charset=utf-8", page(directory, environ).encode()
            elif self.path == HEARTBEATS_PATH:
                document = {"jobUid": environ.get(WorkerVariables.JOB_UID, ""), "heartbeats": heartbeats_in(directory)}
                body = json.dumps(document).encode()
            else:
                code = 404
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A question every few seconds is no news."""

    return Handler


def _server_of(host: str) -> type[ThreadingHTTPServer]:
    class ReportServer(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, request: Any, client_address: Any) -> None:
            """An operator that gives up a question closes its connection: that is no news for the job's user."""
            if not isinstance(sys.exc_info()[1], ConnectionError):
                super().handle_error(request, client_address)

    return ReportServer
