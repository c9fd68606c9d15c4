"""An HTTP proxy that misbehaves on purpose, in front of an S3 server: what it does to each request follows from a
seed."""

import http.client
import random
import re
import socket
import struct
import threading
import zlib
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

FAULTS = (
    "slow_down",  # 503 SlowDown
    "error",  # 500 InternalError
    "reset_before",  # the connection breaks before the server hears of the request
    "reset_after",  # the server has done it, and the answer is lost
    "truncated",  # the answer's body ends too early
    "late",  # a while before anything happens
    "flipped_answer",  # a bit of the answer's body is another
    "flipped_request",  # a bit of the request's body is another
    "halved",  # an answer that calls itself whole, and is half as long
    "emptied",  # the same of no length at all
    "missing",  # 404 for an object that is there
)
_LISTED = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
HIDDEN = "hidden-"
_ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'


@dataclass
class Plan:
    """rates: by fault, the probability for each request. first_time: the fault that each request has when it comes for
    the first time. gone: refuse every connection. refuse_with: answer all with this S3 error (status, code) while set.
    at_write: called with the number of each request that changes something, before the server has it. checks_crc32:
    refuse bodies that don't match x-amz-checksum-crc32, as S3 does. refuses_checksums: answer every request that has
    such a header with this error. hides_md5: answer with ETags that tell nothing of the body, as a store that encrypts
    does. reads_in: so many bytes of a body, then so many seconds of nothing. refuse_writes_with: as refuse_with, of
    what changes something. lagging: the COMMITs that a listing does not show yet, of the newest; None: every listing
    is empty."""

    seed: int = 0
    rates: dict[str, float] = field(default_factory=dict)
    first_time: str | None = None
    at_write: Callable[[int], None] = lambda number: None
    gone: bool = False
    refuse_with: tuple[int, str] | None = None
    refuse_writes_with: tuple[int, str] | None = None
    lagging: int | None = 0
    checks_crc32: bool = False
    refuses_checksums: tuple[int, str] | None = None
    hides_md5: bool = False
    reads_in: tuple[int, float] | None = None
    late_seconds: float = 0.05
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.lock = threading.Lock()
        self.never = threading.Event()
        self.seen: set[tuple[str, str]] = set()

    def fault(self, command: str, path: str, body: bytes) -> tuple[str | None, float]:
        """What to do to this request, and a number in [0, 1) for the details."""
        with self.lock:
            self.done["requests"] += 1
            detail = self.dice.random()
            likely = [fault for fault, rate in self.rates.items() if self.dice.random() < rate]
            if self.first_time and (command, path) not in self.seen:
                self.seen.add((command, path))
                likely = [self.first_time]
            for fault in likely:
                if _possible(fault, command, path, body):
                    self.done[fault] += 1
                    return fault, detail
            return None, detail

    def count_write(self) -> int:
        with self.lock:
            self.done["writes"] += 1
            return self.done["writes"]


def _possible(fault: str, command: str, path: str, body: bytes) -> bool:
    """Whether it would make a difference to the request."""
    if fault == "flipped_request":
        return bool(body)
    if fault in ("flipped_answer", "halved", "emptied"):
        return command == "GET" and "?" not in path
    if fault == "missing":
        return command in ("GET", "HEAD") and "?" not in path
    return fault != "truncated" or command == "GET"


@contextmanager
def faulty_proxy(upstream: str, plan: Plan) -> Iterator[str]:
    """The address of a proxy to `upstream` that follows `plan`, which may be changed at any time."""
    target = urlsplit(upstream).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_request(self) -> None:
            body = self._body(int(self.headers.get("Content-Length") or 0))
            fault, detail = (None, 0.0) if plan.gone else plan.fault(self.command, self.path, body)
            if plan.gone or fault == "reset_before":
                return self._reset()
            if plan.refuse_with is not None:
                return self._refuse(*plan.refuse_with)
            if plan.refuse_writes_with is not None and self.command not in ("GET", "HEAD"):
                plan.done["writes refused"] += 1
                return self._refuse(*plan.refuse_writes_with)
            if plan.refuses_checksums is not None and any("checksum" in name.lower() for name in self.headers):
                plan.done["checksums refused"] += 1
                return self._refuse(*plan.refuses_checksums)
            if fault == "missing":
                return self._refuse(404, "NoSuchKey")
            if fault == "slow_down":
                return self._refuse(503, "SlowDown")
            if fault == "error":
                return self._refuse(500, "InternalError")
            if fault == "late":
                plan.never.wait(plan.late_seconds * (0.5 + detail))
            if fault == "flipped_request":
                body = flipped(body, detail)
            if plan.checks_crc32 and not self._crc32_holds(body):
                return self._refuse(400, "BadDigest")
            if self.command not in ("GET", "HEAD"):
                plan.at_write(plan.count_write())
            answer, data = self._ask(body)
            if fault == "reset_after":
                return self._reset()
            if fault == "flipped_answer":
                data = flipped(data, detail)
            if fault in ("halved", "emptied"):
                data = data[: len(data) // 2] if fault == "halved" else b""
            if self.command == "GET" and "list-type=2" in self.path and plan.lagging != 0:
                data = _late(data, plan.lagging)
                plan.done["lagging listings"] += 1
            if self.command == "GET" and "?" not in self.path:
                with plan.lock:
                    plan.done[f"bytes of {self.path.rpartition('.')[2]}"] += len(data)
            self._answer(answer, data, int(len(data) * detail) if fault == "truncated" and data else None)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_request

        def _body(self, size: int) -> bytes:
            if plan.reads_in is None:
                return self.rfile.read(size)
            piece, seconds = plan.reads_in
            read = b""
            while len(read) < size:
                read += self.rfile.read(min(piece, size - len(read)))
                plan.never.wait(seconds)
            return read

        def _ask(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
            connection = http.client.HTTPConnection(target, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            if plan.checks_crc32:  # the server behind does not know what to make of these
                headers = {name: value for name, value in headers.items() if "checksum" not in name.lower()}
                body = without_checksums(body) if self.command == "POST" else body
            if plan.hides_md5 and self.command == "POST":
                body = body.replace(HIDDEN.encode(), b"")
            if self.command == "POST":
                headers["Content-Length"] = str(len(body))
            connection.request(self.command, self.path, body=body, headers=headers)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            return answer, data

        def _answer(self, answer: http.client.HTTPResponse, data: bytes, cut_at: int | None) -> None:
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                    hide = plan.hides_md5 and name.lower() == "etag"
                    self.send_header(name, f'"{HIDDEN}{value[1:]}' if hide else value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            if cut_at is not None:
                self.wfile.write(data[:cut_at])
                return self._reset()
            self.wfile.write(data)

        def _refuse(self, status: int, code: str) -> None:
            data = _ERROR.format(code=code).encode() if self.command != "HEAD" else b""
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _crc32_holds(self, body: bytes) -> bool:
            said = self.headers.get("x-amz-checksum-crc32")
            return (
                said is None or self.command != "PUT" or said == b64encode(struct.pack("!I", zlib.crc32(body))).decode()
            )

        def _reset(self) -> None:
            """A hard end: the other side gets ECONNRESET."""
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

        def log_message(self, *_: object) -> None:
            pass

        def finish(self) -> None:
            try:
                super().finish()
            except (OSError, ValueError):
                pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:  # a client that hung up is nothing to print
            pass

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _late(listing: bytes, behind: int | None) -> bytes:
    """An answer to ListObjectsV2 from which the last objects under commits/ are missing, or all of them (None)."""
    entries = list(_LISTED.finditer(listing))
    if behind is not None:
        entries = [entry for entry in entries if b"/commits/" in entry[0]][-behind:]
    for entry in entries:
        listing = listing.replace(entry[0], b"")
    return listing


def flipped(data: bytes, detail: float) -> bytes:
    if not data:
        return data
    bit = int(detail * len(data) * 8)
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def without_checksums(body: bytes) -> bytes:
    """A CompleteMultipartUpload without the parts' checksums."""
    return re.sub(rb"<ChecksumCRC32>[^<]*</ChecksumCRC32>", b"", body)
