"""A receiver of webhooks in a thread of the test: it notes each message and answers as the path says.

`/ok` takes everything, `/500/N` refuses the first N messages, `/never` says nothing, `/huge` answers with a body that
has no end, `/redirect` leads to the metadata service, `/skewed` refuses with a clock that is an hour ahead, and `/busy`
asks to be left alone.
"""

from __future__ import annotations

import contextlib
import email.utils
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HUGE_BYTES = 10 << 30


class Receiver(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # the answers that never come, and the one without end, are left where they are

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port = int(self.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.lock = threading.Lock()
        self.messages: list[dict[str, Any]] = []
        self.sent_bytes: int | None = None  # how much of the endless answer was taken, once its reader has gone
        self.ended = threading.Event()

    def heard(self, path: str) -> list[dict[str, Any]]:
        """The messages to that path, in order, each with its `headers`, in lower case, and its `body`."""
        with self.lock:
            return [message for message in self.messages if message["path"] == path]

    def note(self, message: dict[str, Any]) -> int:
        """Keep the message; return how many came to its path."""
        with self.lock:
            self.messages.append(message)
            return sum(other["path"] == message["path"] for other in self.messages)

    def handle_error(self, *_: Any) -> None:
        """A sender that has gone, or speaks no TLS, is nothing to print."""


@contextlib.contextmanager
def receiver(certificate: Path | None = None) -> Iterator[Receiver]:
    """With a `certificate` (and its key, in one file) it speaks TLS."""
    server = Receiver()
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        # Greeted in the thread of each connection: one that says nothing does not keep the others waiting.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    serving.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        serving.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        headers = {name.lower(): value for name, value in self.headers.items()}
        count = self.server.note({"path": self.path, "headers": headers, "body": body})
        kind, _, number = self.path.strip("/").partition("/")
        if kind == "never":
            self.server.ended.wait()
        elif kind == "huge":
            self._endless()
        elif kind == "redirect":
            self._answer(302, Location="http://169.254.169.254/latest/meta-data/")
        elif kind == "skewed":
            self._answer(401, ahead=3600.0)
        elif kind == "busy":
            self._answer(503, **{"Retry-After": "600"})
        elif kind == "500" and (not number or count <= int(number)):
            self._answer(500)
        else:
            self._answer(204)

    def _answer(self, status: int, ahead: float = 0.0, **headers: str) -> None:
        self.send_response_only(status)
        self.send_header("Date", email.utils.formatdate(time.time() + ahead, usegmt=True))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _endless(self) -> None:
        self.send_response_only(200)
        self.send_header("Content-Length", str(HUGE_BYTES))
        self.end_headers()
        sent, block = 0, b"x" * 65_536
        with contextlib.suppress(OSError):
            while sent < HUGE_BYTES:
                self.wfile.write(block)
                sent += len(block)
        self.server.sent_bytes = sent

    def log_message(self, *_: Any) -> None:
        """Print nothing."""
