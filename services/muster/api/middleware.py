"""Around every request: id, log line, limits, guard. Plain ASGI: BaseHTTPMiddleware cuts contextvars and streams."""

from __future__ import annotations

import json
import re
import time
import uuid
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from muster.api.errors import MEDIA_TYPE, ApiError, problem_body, problem_headers
from muster.api.observability import Metrics
from muster.api.settings import is_loopback

log = structlog.get_logger("muster.api.request")

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_DRAIN_BYTES_MAX = 100_000_000
_QUIET = ("/healthz", "/readyz", "/metrics")


class RequestLog:
    """Accepts or makes `x-request-id`, puts it into the reply and every log line, counts and times the request."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["request_id"] = request_id
        status, began, started, streams = 500, time.perf_counter(), False, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, started, streams
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                streams = headers.get("content-type", "").startswith("text/event-stream")
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self.app(scope, receive, send_with_id)
            except Exception:
                log.exception("request failed", method=scope["method"], path=scope["path"])
                if started:
                    raise  # the reply is half sent: only a cut connection tells the reader so
                detail = f"The request failed by a fault of the API; its log tells more under request id {request_id}."
                await _refuse(scope, send_with_id, ApiError("internal", detail))
            finally:
                seconds = time.perf_counter() - began
                self.metrics.request(scope["method"], _route(scope), status, None if streams else seconds)
                note = log.debug if scope["path"] in _QUIET else log.info
                note("request", method=scope["method"], path=scope["path"], status=status, seconds=round(seconds, 4))


def _route(scope: Scope) -> str:
    """The route's pattern, so that metrics do not grow with the number of jobs."""
    path = getattr(scope.get("route"), "path", None)
    if path is None:
        return "unknown"
    # FastAPI names a route as its own router knows it, without the prefixes that lead there.
    return f"/api/v1{path}" if scope["path"].startswith("/api/v1/") and not path.startswith("/api/v1") else str(path)


class BodyTooLarge(HTTPException):
    """Raised from `receive`. An HTTPException, for FastAPI turns any other into a 400."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"The body is larger than {limit:,} bytes.")


class BodyLimit:
    """Refuses a body over the limit without ever holding it."""

    def __init__(self, app: ASGIApp, bytes_max: int) -> None:
        self.app, self.bytes_max = app, bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self.bytes_max:
            if headers.get("expect", "").lower() != "100-continue":
                await _drain(receive)
            await _refuse(scope, send, ApiError("body_too_large", str(BodyTooLarge(self.bytes_max).detail)))
            return
        taken = 0

        async def receive_counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.bytes_max:
                if message.get("more_body"):
                    await _drain(receive)
                raise BodyTooLarge(self.bytes_max)
            return message

        await self.app(scope, receive_counted, send)


async def _drain(receive: Receive) -> None:
    """Throw the rest away, chunk by chunk: a connection closed on a sender loses the reply that says why."""
    drained = 0
    while drained < _DRAIN_BYTES_MAX:
        message = await receive()
        drained += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            return


class LoopbackGuard:
    """Where authentication is off, a web page must not reach the API through its visitor's browser.

    A page of another origin shows by Origin or Sec-Fetch-Site; one whose name was re-bound to 127.0.0.1, by Host.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (reason := _foreign(Headers(scope=scope))):
            detail = f"Authentication is off, so only requests from this machine's own programs are served: {reason}."
            await _refuse(scope, send, ApiError("forbidden", detail))
            return
        await self.app(scope, receive, send)


def _foreign(headers: Headers) -> str | None:
    host, origin = headers.get("host", ""), headers.get("origin")
    if not is_loopback(urlsplit(f"//{host}").hostname or ""):
        return f"the Host header names {host[:100]!r}"
    if origin and origin != "null" and not is_loopback(urlsplit(origin).hostname or ""):
        return f"the request comes from a page of {origin[:100]!r}"
    if origin == "null" or headers.get("sec-fetch-site") == "cross-site":
        return "the request comes from a page of another site"
    return None


async def _refuse(scope: Scope, send: Send, error: ApiError) -> None:
    body = json.dumps(problem_body(error, scope["path"], scope.get("request_id", ""))).encode()
    headers = {
        **problem_headers(error),
        "content-type": MEDIA_TYPE,
        "content-length": str(len(body)),
        "connection": "close",
    }
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
