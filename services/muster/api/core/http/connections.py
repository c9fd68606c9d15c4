"""Connections that bring nothing, or take nothing: uvicorn waits for them without end; this protocol does not."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that ends a connection whose next request has not arrived, headers and all, in `receive_seconds_max`, or
    whose reader has not taken what is ready for it in `send_seconds_max`.

    The time to receive runs from the connection's begin, and later from the first byte after a reply; between the two
    uvicorn's own keep-alive time-out holds. The rest of a body that nobody waits for is thrown away, and must end in it
    too. The time to send runs from when the reader is 64 KB behind to when it is 16 KB behind.
    """

    def __init__(self, receive_seconds_max: float, send_seconds_max: float, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._receive_seconds_max, self._send_seconds_max = receive_seconds_max, send_seconds_max
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()
        self._stop_watching_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._send_timer is None:
            # Not `close`, which would wait for the reader to take the rest.
            self._send_timer = self.loop.call_later(self._send_seconds_max, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching_reader()

    def _watch(self) -> None:
        if self._is_answering():
            self._stop_watching()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self._receive_seconds_max, self._too_slow)

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_watching_reader(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _too_slow(self) -> None:
        self._timer = None
        self.transport.close()


def timed_protocol(receive_seconds_max: float, send_seconds_max: float) -> Callable[..., TimedProtocol]:
    """Return the protocol factory for uvicorn's `http` option."""
    return functools.partial(TimedProtocol, receive_seconds_max, send_seconds_max)
