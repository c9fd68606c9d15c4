"""Connections that bring nothing: uvicorn waits without end for a request's headers; this protocol does not."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose next request has not arrived, headers and all, in `seconds_max`.

    The time runs from the connection's begin, and later from the first byte after a reply; between the two uvicorn's
    own keep-alive time-out holds. The rest of a body that nobody waits for is thrown away, and must end in it too.
    """

    def __init__(self, seconds_max: float, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._seconds_max = seconds_max
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def _watch(self) -> None:
        if self._is_answering():
            self._stop_watching()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self._seconds_max, self._too_slow)

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        self.transport.close()


def timed_protocol(seconds_max: float) -> Callable[..., TimedProtocol]:
    """For uvicorn's `http` option."""
    return functools.partial(TimedProtocol, seconds_max)
