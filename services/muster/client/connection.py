"""The API's answers as plain JSON, over HTTP with threads: what the command line and `Muster` stand on."""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from muster.client import operations
from muster.client.address import Server
from muster.client.exchange import (
    PATIENCE_SECONDS,
    ExchangeReply,
    NextEvent,
    OpenStep,
    RequestExchange,
    SendStep,
    StreamEvent,
    TooSlow,
)
from muster.client.steps import RequestStep, Steps, run, walk

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")


class Connection:
    """One server. Use as a context manager, or close it. Threads may share it.

    Paths are relative to /api/v1. Every method raises MusterError.
    """

    def __init__(
        self,
        server: Server,
        patience_seconds: float = PATIENCE_SECONDS,
        waiting: Callable[[str], None] = lambda _: None,
        transport: Any = None,
    ) -> None:
        """`waiting` is called with the reason, once for each time that the server has to be waited for."""
        import httpx2  # takes a tenth of a second, which `muster --help` need not wait

        from muster.client.wire import client_options

        self.server = server
        self.exchange = RequestExchange(server, patience_seconds, waiting)
        self._http = httpx2.Client(**client_options(server, transport))

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # -- requests -----------------------------------------------------------------------------------------------------

    def get(self, path: str, **params: Any) -> Any:
        return self.ask(RequestStep("GET", path, params))

    def post(self, path: str, body: Any = None, key: str | None = None, repeat: bool = True, **params: Any) -> Any:
        """Post, with an Idempotency-Key if `key` is given. Actions without one may be repeated by their nature (cancel,
        suspend, resume), or are not repeated (`repeat` False).
        """
        return self.ask(RequestStep("POST", path, params, body, key, repeat))

    def put(self, path: str, body: Any) -> Any:
        return self.ask(RequestStep("PUT", path, body=body))

    def patch(self, path: str, body: Any) -> Any:
        return self.ask(RequestStep("PATCH", path, body=body))

    def delete(self, path: str, **params: Any) -> None:
        self.ask(RequestStep("DELETE", path, params))

    def ask(self, ask: RequestStep) -> Any:
        """The answer's JSON, after as many tries as patience allows."""
        return run(self.exchange.answer(ask), self._send)

    def stream(self, path: str, last_id: str = "", **params: Any) -> Iterator[StreamEvent]:
        """Server-sent events until the server says `end`, over broken connections by Last-Event-ID."""
        stream = _EventStream(self._http, self.exchange)
        try:
            yield from walk(self.exchange.events(RequestStep("GET", path, params), last_id), stream.answer_to)
        finally:
            stream.close()

    # -- operations ---------------------------------------------------------------------------------------------------

    def run(self, steps: Steps[T]) -> T:
        return run(steps, self.ask)

    def walk(self, steps: Steps[T]) -> Generator[Any, None, T]:
        return walk(steps, self.ask)

    def job_id(self, name: str) -> str:
        """The id of the newest job of that name, or of that id. Raises NotFound for none."""
        return self.run(operations.find(name))

    def job_pages(self, limit: int, **filters: Any) -> Iterator[list[dict[str, Any]]]:
        """The newest `limit` jobs, newest first, page by page."""
        return self.walk(operations.pages(limit, filters))

    def submit(self, document: Any) -> dict[str, Any]:
        return self.run(operations.submit(document, str(uuid.uuid4())))

    def plan(self, document: Any) -> dict[str, Any]:
        return self.run(operations.plan(document))

    def _send(self, send: SendStep) -> ExchangeReply:
        """Send the request in a thread, because a time-out of httpx ends a silence and not a server that sends a byte
        now and then."""
        from muster.client.wire import address, meant, reply_of, request_options

        answers: queue.SimpleQueue[ExchangeReply | Exception] = queue.SimpleQueue()

        def request() -> None:
            try:
                options = request_options(send.ask, send.headers, self.exchange.token())
                response = self._http.request(send.ask.method, address(send.ask), **options)
                answers.put(reply_of(response, response.content))
            except Exception as error:  # raised again below, in the thread that asked
                answers.put(meant(error))

        threading.Thread(target=request, daemon=True, name="request").start()
        try:
            answer = answers.get(timeout=min(send.seconds_max, send.silence_seconds))
        except queue.Empty:
            if send.seconds_max > send.silence_seconds:
                self.exchange.waiting(f"no answer for {send.silence_seconds:g} s")
            try:
                answer = answers.get(timeout=max(0.0, send.seconds_max - send.silence_seconds))
            except queue.Empty:
                raise TooSlow from None
        if isinstance(answer, Exception):
            raise answer
        return answer


class _EventStream:
    """Connection to at most one open stream of server-sent events."""

    def __init__(self, http: httpx2.Client, exchange: RequestExchange) -> None:
        self._http, self._exchange = http, exchange
        self._response: httpx2.Response | None = None
        self._events: Iterator[httpx2.ServerSentEvent] = iter(())

    def answer_to(self, step: OpenStep | NextEvent) -> ExchangeReply | StreamEvent | None:
        from muster.client.wire import event_of, meant

        try:
            return self._open(step) if isinstance(step, OpenStep) else event_of(next(self._events, None))
        except Exception as error:
            raise meant(error) from None

    def _open(self, order: OpenStep) -> ExchangeReply:
        import httpx2

        from muster.client.wire import address, reply_of, request_options, silence

        self.close()
        options = request_options(order.ask, order.headers, self._exchange.token())
        request = self._http.build_request(order.ask.method, address(order.ask), timeout=silence(order), **options)
        self._response = response = self._http.send(request, stream=True)
        self._events = iter(httpx2.EventSource(response))
        return reply_of(response, b"" if response.is_success else response.read())

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
