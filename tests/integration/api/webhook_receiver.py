"""A receiver of webhooks as a process of its own: it writes down each message and answers as its path says.

`python webhook_receiver.py FOLDER [CERTIFICATE]` prints its port. `/ok` takes everything, `/500/N` refuses the first N
messages, `/never` says nothing, `/huge` answers with a body without end, `/redirect` leads to the metadata service,
`/skewed` refuses with a clock that is an hour ahead, and `/busy` asks to be left alone.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HUGE_BYTES = 10 << 30


@dataclass
class Receiver:
    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def heard(self, path: str) -> list[dict[str, Any]]:
        """What came to that path, in order: its `headers`, in lower case, and its `body`."""
        file = self.folder / "heard.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in map(json.loads, lines) if line["path"] == path]

    def sent_bytes(self) -> int:
        """How much of the endless answer was taken, once its reader has gone."""
        return int((self.folder / "huge").read_text())


@contextlib.contextmanager
def receiver(folder: Path, certificate: Path | None = None) -> Iterator[Receiver]:
    """With a `certificate` (and its key, in one file) it speaks TLS."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, str(folder), *([str(certificate)] if certificate else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Receiver(folder, int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class _Handler(BaseHTTPRequestHandler):
    folder: Path
    lock = threading.Lock()
    counts: dict[str, int] = {}  # noqa: RUF012 - of the one process

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        line = {"path": self.path, "headers": {k.lower(): v for k, v in self.headers.items()}, "body": body}
        with self.lock:
            count = self.counts[self.path] = self.counts.get(self.path, 0) + 1
            with (self.folder / "heard.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        kind, _, number = self.path.strip("/").partition("/")
        if kind == "never":
            time.sleep(600)  # not a wait: the receiver that never answers
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
        part = self.folder / "huge.part"
        part.write_text(str(sent))
        part.rename(self.folder / "huge")

    def log_message(self, *_: Any) -> None:
        """Nothing: a test reads what it needs from the file."""


def main() -> None:
    _Handler.folder = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    if len(sys.argv) > 2:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(sys.argv[2])
        server.socket = context.wrap_socket(server.socket, server_side=True)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
