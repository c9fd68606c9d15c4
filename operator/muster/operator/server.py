"""The operator's own HTTP server: pages to scrape, a liveness probe, and what may be posted. It runs in threads of
its own, so that a busy event loop still answers and a slow caller holds up nobody.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase

CALLER_SECONDS_MAX = 10.0  # between two packets of a caller
_SILENCE_SECONDS_MAX = 30.0  # longer without a turn of the event loop, and /healthz says so
# Of a body that was refused so much is read and thrown away: a caller that is cut off in the middle of sending never
# sees the reply, only a broken connection.
_DISCARDED_BYTES_MAX, _CHUNK_BYTES = 16_000_000, 65_536


class LoopLiveness:
    """Time of the event loop's last turn, which /healthz reads from another thread."""

    def __init__(self) -> None:
        self._turn_at = time.monotonic()

    def turned(self) -> None:
        self._turn_at = time.monotonic()

    def silence_seconds(self) -> float:
        return time.monotonic() - self._turn_at


@dataclass(frozen=True)
class GetPage:
    """Response to a GET."""

    kind: str  # its Content-Type
    body: bytes


Pages = dict[str, Callable[[], GetPage]]


@dataclass
class HttpRequest:
    """A request whose body is read when it is wanted, once."""

    headers: Message
    length: int | None  # of the body; None where the caller did not say
    stream: BufferedIOBase
    read: bool = False

    def body(self) -> bytes:
        self.read = True
        return self.stream.read(self.length or 0)


@dataclass(frozen=True)
class HttpReply:
    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


Posts = Mapping[str, Callable[[HttpRequest], HttpReply]]


def refusal(request: HttpRequest, token: str | None, bytes_max: int) -> HttpReply | None:
    """Return why a post is refused before its body is read: no token is set or it is another one, or the body's
    length."""
    if not token:
        return HttpReply(404, words("nothing is posted here: this operator was given no token for it"))
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        return HttpReply(401, words("the bearer token is missing or wrong"), {"WWW-Authenticate": "Bearer"})
    if request.length is None:
        return HttpReply(411, words("a Content-Length is wanted"))
    if request.length > bytes_max:
        return HttpReply(413, words(f"more than {bytes_max} bytes"))
    return None


def words(text: str) -> bytes:
    """A reply's body for people."""
    return f"{text}\n".encode()


def serve_pages(
    liveness: LoopLiveness,
    host: str,
    port: int,
    pages: Pages,
    posts: Posts,
    unready: Callable[[], str] = lambda: "",
) -> ThreadingHTTPServer:
    """Make a server of the pages (more may be added later), of /healthz and /readyz, and of the posts.

    `unready` gives the reason for which /readyz refuses, empty where there is none. If `port` is 0, the server takes
    any free one. Raises OSError when the port is taken.
    """

    class RequestHandler(BaseHTTPRequestHandler):
        timeout = CALLER_SECONDS_MAX

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if path == "/healthz":
                silence = liveness.silence_seconds()
                well = silence <= _SILENCE_SECONDS_MAX
                answer: dict[str, object] = {
                    "status": "ok" if well else "stuck",
                    "secondsSinceLastTurn": round(silence, 1),
                }
                self._answer(200 if well else 503, "application/json", json.dumps(answer).encode())
            elif path == "/readyz":
                problem = unready()
                answer = {"status": "not ready", "because": problem} if problem else {"status": "ok"}
                self._answer(503 if problem else 200, "application/json", json.dumps(answer).encode())
            elif page := pages.get(path):
                made = page()
                self._answer(200, made.kind, made.body)
            else:
                there = ", ".join(["/healthz", "/readyz", *pages])
                self._answer(404, "text/plain", f"there are {there}\n".encode())

        def do_POST(self) -> None:
            given = self.headers.get("Content-Length", "")
            request = HttpRequest(self.headers, int(given) if given.isdecimal() else None, self.rfile)
            post = posts.get(self.path.split("?")[0])
            reply = post(request) if post else HttpReply(404, b"nothing is posted here\n")
            self.close_connection = True
            if not request.read:
                self._discard(min(request.length or 0, _DISCARDED_BYTES_MAX))
            kind = "application/json" if reply.body.startswith((b"{", b"[")) else "text/plain"
            self._answer(reply.status, kind, reply.body, reply.headers)

        def _discard(self, size: int) -> None:
            with contextlib.suppress(OSError):
                while size > 0 and (chunk := self.rfile.read(min(size, _CHUNK_BYTES))):
                    size -= len(chunk)

        def _answer(self, code: int, kind: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A scrape every few seconds is no news."""

    server = ThreadingHTTPServer((host, port), RequestHandler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
