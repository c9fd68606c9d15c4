"""Answers the reports of Hugging Face's Trainer, which it sends by itself where KUBEFLOW_TRAINER_SERVER_URL is set.

Each is a POST of {"trainerStatus": {"progressPercentage", "estimatedRemainingSeconds", "metrics": [{"name", "value"}]}}
with a bearer token from a file, every five seconds at most (transformers' KubeflowCallback, since 5.0). The server is
reached from this machine alone, and the token keeps other jobs of the machine from reporting for this one.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BODY_BYTES_MAX = 64 * 1024
METRICS_MAX = 100
TOKEN_FILE = "trainer-status.token"  # noqa: S105 - a file's name
_STEPS = {"current_step": "step", "total_steps": "steps"}
_IGNORED = ("total_flos", "train_runtime")
_NAMES = {"eval_loss": "evaluation_loss"}


class StatusServer:
    """Server of one worker. `report` hears of each report, as step, steps, loss and values; `page` makes the page of
    metrics, which it answers too."""

    def __init__(self, directory: str, report: Callable[[dict[str, Any]], None], page: Callable[[], str]) -> None:
        self._token = secrets.token_hex(16)
        self._token_path = os.path.join(directory, TOKEN_FILE)
        self._server = _StatusServer(("127.0.0.1", 0), _handler(self._token, report, page))
        self.port = int(self._server.server_address[1])

    def start(self) -> dict[str, str]:
        """Answer in a thread of our own, and return the variables that the program needs. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._token_path)
        with os.fdopen(os.open(self._token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self._token)
        threading.Thread(target=self._server.serve_forever, name="status", daemon=True).start()
        return {
            "KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{self.port}/",
            "KUBEFLOW_TRAINER_SERVER_TOKEN": self._token_path,
        }


def parse_status(body: bytes) -> dict[str, Any] | None:
    """Return what a report says: step, steps, loss and other values by name. None for what is no report."""
    try:
        status = json.loads(body)["trainerStatus"]
        metrics = status.get("metrics") or []
        numbers = {str(each["name"])[:100]: float(each["value"]) for each in metrics[:METRICS_MAX]}
        remaining = status.get("estimatedRemainingSeconds")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    report: dict[str, Any] = {"source": "trainer-status"}
    values: dict[str, float] = {}
    for name, value in numbers.items():
        if not abs(value) < float("inf"):
            continue
        if name in _STEPS:
            report[_STEPS[name]] = int(value)
        elif name == "loss":
            report["loss"] = value
        elif name not in _IGNORED:
            values[_NAMES.get(name, name)] = value
    if isinstance(remaining, int) and not isinstance(remaining, bool):
        values["remaining_seconds"] = float(remaining)
    return {**report, "values": values}


class _StatusServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A program that ends closes its connection: that is no news."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _handler(
    token: str, report: Callable[[dict[str, Any]], None], page: Callable[[], str]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length") or ""
            given = self.headers.get("Authorization") or ""
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                self._answer(401, b"")
            elif not length.isdecimal() or int(length) > BODY_BYTES_MAX:
                self._answer(413, b"")
            else:
                status = parse_status(self.rfile.read(int(length)))
                if status is not None:
                    report(status)
                self._answer(400 if status is None else 200, b"{}")

        def do_GET(self) -> None:
            is_page = self.path == "/metrics"
            self._answer(200 if is_page else 404, page().encode() if is_page else b"", "text/plain; version=0.0.4")

        def _answer(self, code: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A report every few seconds is no news."""

    return Handler
