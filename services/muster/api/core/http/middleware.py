"""Around every request: id, log line, limits, guard. Plain ASGI: BaseHTTPMiddleware cuts contextvars and streams."""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from muster.api.core.errors import MEDIA_TYPE, ApiError, problem_body, problem_headers
from muster.api.core.observability import ApiMetrics
from muster.api.core.settings import is_loopback

log = structlog.get_logger("muster.api.request")

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# What a sender may still have on its way when the reply is there: longer than one that listens takes to notice, and
# nothing that keeps a connection busy.
_DRAIN_BYTES_MAX = 64_000_000
_DRAIN_SECONDS_MAX = 2.0
# Whose bodies are taken as they come, however large: their routes bound them, and never hold them.
_UPLOADS = re.compile(r"(/api/v1/files|/v1/files)(/.*)?|/v1/uploads/[^/]+/parts", re.DOTALL)
_DATA = ("/api/v1/", "/v1/")
_QUIET = ("/healthz", "/readyz", "/metrics")


class RequestLog:
    """Accepts or makes `x-request-id`, puts it into the reply and every log line, counts and times the request."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics) -> None:
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
                if scope["path"].startswith(_DATA):  # what a token opened is kept by no cache, and is no page
                    headers.setdefault("cache-control", "no-store")
                    headers.setdefault("x-content-type-options", "nosniff")
                streams = headers.get("content-type", "").startswith("text/event-stream")
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self.app(scope, receive, send_with_id)
            except ClientDisconnect:
                status = 499  # nginx's number for a client that went away before its answer
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
    for prefix in ("/api/v1", "/v1"):
        if scope["path"].startswith(f"{prefix}/") and not path.startswith(prefix):
            return f"{prefix}{path}"
    return str(path)


class BodyTooLarge(HTTPException):
    """Raised from `receive`. An HTTPException, for FastAPI turns any other into a 400."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"The body is larger than {limit:,} bytes.")


class BodyTooSlow(HTTPException):
    """Raised from `receive`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(408, f"The body did not arrive within {seconds:g} s.")


class BodyLimits:
    """Refuses a body that is too large or comes too slowly, without ever holding it. An upload may have any size, and
    only the next piece of it must come in time.

    A reply that does not wait for the body (it is too large, or the token is no good) ends the connection: what is
    still on its way is thrown away for a moment, for a connection closed on a sender loses the reply that says why, and
    no longer than that.
    """

    def __init__(self, app: ASGIApp, bytes_max: int, seconds_max: float) -> None:
        self.app, self.bytes_max, self.seconds_max = app, bytes_max, seconds_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        waits = headers.get("expect", "").lower() == "100-continue"  # nothing is on its way until somebody asks for it
        streams = _is_upload(scope)
        bytes_max = None if streams else self.bytes_max
        body = _RequestBody(receive, send, bytes_max, self.seconds_max, on_its_way=not waits and _comes(headers))
        if bytes_max is not None and length.isdigit() and int(length) > bytes_max:
            await _refuse(scope, body.send, ApiError("body_too_large", str(BodyTooLarge(self.bytes_max).detail)))
            return
        await self.app(scope, body.receive, body.send)


def _is_upload(scope: Scope) -> bool:
    return scope["method"] in ("POST", "PATCH") and _UPLOADS.fullmatch(scope["path"]) is not None


def _comes(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


class _RequestBody:
    """One request's body on its way to the app: `on_its_way` says that there is more of it than the app has taken."""

    def __init__(
        self, receive: Receive, send: Send, bytes_max: int | None, seconds_max: float, on_its_way: bool
    ) -> None:
        """`bytes_max` is None where there is no bound, and the time is then that of each piece."""
        self._receive, self._send = receive, send
        self._bytes_max, self._seconds_max = bytes_max, seconds_max
        self._on_its_way = on_its_way
        self._taken, self._complete = 0, False
        self._deadline: float | None = None

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()  # a disconnection, which a stream waits for as long as it lasts
        loop = asyncio.get_running_loop()
        if self._deadline is None or self._bytes_max is None:
            self._deadline = loop.time() + self._seconds_max
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._next()
        except TimeoutError:
            raise BodyTooSlow(self._seconds_max) from None
        if self._bytes_max is not None and self._taken > self._bytes_max:
            raise BodyTooLarge(self._bytes_max)
        return message

    async def send(self, message: Message) -> None:
        if not self._on_its_way:
            await self._send(message)
        elif message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
            await self._send(message)
        elif message.get("more_body"):
            await self._send(message)
        else:
            await self._send({**message, "more_body": True})
            await self._throw_away()
            await self._send({"type": "http.response.body", "body": b""})

    async def _next(self) -> Message:
        message = await self._receive()
        self._taken += len(message.get("body", b""))
        self._on_its_way = message["type"] == "http.request" and bool(message.get("more_body"))
        self._complete = not self._on_its_way
        return message

    async def _throw_away(self) -> None:
        taken = self._taken
        try:
            async with asyncio.timeout(_DRAIN_SECONDS_MAX):
                while self._on_its_way and self._taken - taken < _DRAIN_BYTES_MAX:
                    await self._next()
        except TimeoutError:
            pass


class LoopbackGuard:
    """Middleware that keeps web pages from reaching the API through a visitor's browser where authentication is off.

    A page of another origin is recognized by Origin or Sec-Fetch-Site, and a page whose name was rebound to 127.0.0.1
    by Host.

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
