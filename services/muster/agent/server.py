"""/notices for the workers of this node, /metrics, /healthz.

Workers ask; they need no permission for it, and nobody can send the agent anything. What is answered is no secret: that
the node will go, or that a GPU is broken (docs/decisions/0041).
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from muster.words.base import dump_json
from muster.words.notices import NOTICES_PATH, NodeNotices

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
IDLE_SECONDS = 30.0  # a connection that asks nothing for so long is closed


def serve(
    host: str,
    port: int,
    notices: Callable[[], NodeNotices],
    metrics: Callable[[], bytes],
    stuck: Callable[[], str],
) -> ThreadingHTTPServer:
    """Answer requests in threads of our own. `stuck` names the source that has stopped looking, or is empty.

    Raises OSError where the port can't be had.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = IDLE_SECONDS

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == NOTICES_PATH:
                self._answer(200, "application/json", dump_json(notices()).encode())
            elif path == "/metrics":
                self._answer(200, METRICS_TYPE, metrics())
            elif path == "/healthz":
                why = stuck()
                body = json.dumps({"status": "stuck" if why else "ok"} | ({"why": why} if why else {}))
                self._answer(503 if why else 200, "application/json", body.encode())
            else:
                self._answer(404, "text/plain", b"there are /notices, /metrics and /healthz\n")

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A question a second from each worker is no news."""

    class AgentServer(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    server = AgentServer((host, port), Handler)
    threading.Thread(target=server.serve_forever, name="server", daemon=True).start()
    return server
