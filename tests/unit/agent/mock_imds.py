"""An instance metadata service on loopback, and the ways in which it can be wrong."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ACTION, REBALANCE = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"


@dataclass
class MockImds:
    """documents: what stands at a path; the others answer 404. refuses: tokens that answer 401 (all: every one).
    gives_no_token: takes the request and never answers, as with a hop limit of 1.
    """

    address: str = ""
    documents: dict[str, str] = field(default_factory=dict)
    forgets_tokens: bool = False
    refuses_all: bool = False
    gives_no_token: bool = False
    token_status: int = 200
    asked: Counter[str] = field(default_factory=Counter)
    tokens: set[str] = field(default_factory=set)

    def interrupt(self, action: str = "terminate", time: str = "2030-09-18T08:22:00Z") -> None:
        self.documents[ACTION] = json.dumps({"action": action, "time": time})


@contextmanager
def mock_imds() -> Iterator[MockImds]:
    mock, numbers, over = MockImds(), itertools.count(1), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            mock.asked["PUT"] += 1
            if mock.gives_no_token:
                over.wait(30)
                return self.close()
            token = f"token-{next(numbers)}"
            mock.tokens.add(token)
            good = "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
            self.answer(mock.token_status if good else 400, token)

        def do_GET(self) -> None:
            mock.asked[self.path] += 1
            known = self.headers.get("X-aws-ec2-metadata-token") in mock.tokens
            if mock.forgets_tokens:
                mock.tokens.clear()
            if mock.refuses_all or not known:
                return self.answer(401, "")
            body = mock.documents.get(self.path)
            self.answer(404 if body is None else 200, body or "")

        def answer(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def close(self) -> None:
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    mock.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield mock
    finally:
        over.set()
        server.shutdown()
        server.server_close()
