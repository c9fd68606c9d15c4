"""Reports of a worker in a cluster to the operator, which can't read the worker's files there.

While it runs, the launcher answers `GET /heartbeats` with the heartbeats of its ranks, and Prometheus' `GET /metrics`
with the pages of all of them. When it ends, its exit record is also its pod's termination message. Each of these is
there only where the environment requests it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from muster.local.metric_pages import CONTENT_TYPE, gathered
from muster.local.processes import is_stopped
from muster.words.base import dump_json
from muster.words.names import HEARTBEAT, HEARTBEATS_PATH, LAST_HEARTBEAT, Env, heartbeat_rank
from muster.words.signals import WorkerExit

NOT_LAST = (
    "stands",
    "memory",
    "slowRanks",
    "lastSkipped",
    "trackingFault",
)  # what nobody asks of a rank that has ended
TERMINATION_BYTES_MAX = 4_096  # the kubelet keeps no more of a termination message


def serve_reports(directory: Path) -> None:
    """Answer in a thread of our own, if MUSTER_REPORT_PORT is set. A taken port is told and ends nothing."""
    port = os.environ.get(Env.REPORT_PORT, "")
    if not port.isdecimal():
        return
    host = os.environ.get(Env.POD_IP, "")
    try:
        server = _server_of(host)((host, int(port)), _handler(directory, os.environ.get(Env.JOB_UID, "")))
    except OSError as error:
        print(f"can't report heartbeats on {host or '*'}:{port}: {error.strerror}", file=sys.stderr, flush=True)
        return
    threading.Thread(target=server.serve_forever, name="report", daemon=True).start()


def write_termination_message(end: WorkerExit) -> None:
    """Write the exit record as the termination message, if MUSTER_TERMINATION_LOG names a file for it."""
    path = os.environ.get(Env.TERMINATION_LOG)
    if not path:
        return
    try:
        Path(path).write_text(termination_message(end))  # it is mounted: it can't be replaced, only filled
    except OSError as error:
        print(f"can't write the termination message {path}: {error.strerror}", file=sys.stderr, flush=True)


def termination_message(end: WorkerExit) -> str:
    """The record, with the last heartbeat of the worker's first rank: nobody can ask for it any more."""
    beats = heartbeats(Path(os.environ.get(Env.WORKER_DIR) or "."))
    beat = min(beats, key=lambda each: each.get("rank", 0), default=None)
    beat = {name: value for name, value in beat.items() if name not in NOT_LAST} if beat else None
    extra = json.dumps({LAST_HEARTBEAT: beat}, separators=(",", ":"))[1:] if beat else ""
    if not extra or len(extra.encode()) > TERMINATION_BYTES_MAX // 2:
        return fitting(end, TERMINATION_BYTES_MAX)
    return f"{fitting(end, TERMINATION_BYTES_MAX - len(extra.encode()))[:-1]},{extra}"


def fitting(end: WorkerExit, size: int) -> str:
    """The record as JSON of at most `size` bytes: first the log tail loses its beginning, then the message its end."""
    for tail, message in ((2_000, 1_000), (1_000, 800), (300, 400), (0, 400), (0, 100)):
        log_tail = end.log_tail[-tail:] if tail else ""
        text = dump_json(end.model_copy(update={"log_tail": log_tail, "message": end.message[:message]}))
        if len(text.encode()) <= size:
            return text
    return dump_json(WorkerExit(exit_code=end.exit_code, at=end.at, signal=end.signal, rank=end.rank, step=end.step))


def heartbeats(directory: Path) -> list[dict[str, Any]]:
    """Return the heartbeats of all ranks that have left one, in no order."""
    beats = []
    for path in directory.glob(HEARTBEAT.format(rank="*")):
        if heartbeat_rank(path.name) is not None:
            try:
                beat = json.loads(path.read_bytes())
                beats.append(beat | {"stopped": True} if is_stopped(int(beat.get("pid", 0))) else beat)
            except (OSError, ValueError, AttributeError, TypeError):
                continue
    return beats


def metrics_page(directory: Path, environ: Mapping[str, str]) -> str:
    """Return one page with the metrics of all ranks of this worker. Prometheus knows this one port, and not the ranks'
    random ones."""
    place = {
        "job_name": environ.get(Env.JOB, ""),
        "job_uid": environ.get(Env.JOB_UID, ""),
        "attempt": environ.get(Env.ATTEMPT, ""),
        "worker": environ.get(Env.WORKER, ""),
    }
    ranks = sorted((beat["rank"], port) for beat in heartbeats(directory) if (port := beat.get("metricsPort")))
    return gathered([(place | {"rank": str(rank)}, port) for rank, port in ranks])


def _handler(directory: Path, job_uid: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served, kind = self.path in (HEARTBEATS_PATH, "/metrics"), "application/json"
            if self.path == "/metrics":
                kind, body = CONTENT_TYPE, metrics_page(directory, os.environ).encode()
            else:
                document = {"jobUid": job_uid, "heartbeats": heartbeats(directory)} if served else {}
                body = json.dumps(document).encode()
            self.send_response(200 if served else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A question every few seconds is no news."""

    return Handler


def _server_of(host: str) -> type[ThreadingHTTPServer]:
    import socket

    class ReportServer(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """An operator that gives up a question closes its connection: that is no news for the job's user."""
            if not isinstance(sys.exc_info()[1], ConnectionError):
                super().handle_error(request, client_address)

        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    return ReportServer
