"""Settings that both connections, of threads and of asyncio, give to httpx, and the meaning of its errors."""

from __future__ import annotations

from typing import Any

import httpx2

from muster.client.address import Server
from muster.client.errors import MusterError
from muster.client.exchange import ANSWER_SECONDS_MAX, ExchangeReply, OpenStep, RequestLost, StreamEvent
from muster.client.steps import RequestStep


def client_options(server: Server, transport: Any) -> dict[str, Any]:
    return {
        "base_url": server.url,
        "headers": {"user-agent": "muster-client", "accept": "application/json"},
        "timeout": httpx2.Timeout(ANSWER_SECONDS_MAX + 5.0, connect=5.0),  # the connection ends the request before
        "transport": transport,
        "trust_env": not server.local,  # a proxy never knows this machine's loopback
    }


def address(ask: RequestStep) -> str:
    """Return the address of the request, relative to the server's: below /api/v1, but for a path that begins with a
    slash. It is not `jobs:estimate` alone, which would be an address with a scheme."""
    return ask.path if ask.path.startswith("/") else f"/api/v1/{ask.path}"


def request_options(ask: RequestStep, headers: dict[str, str], token: str | None) -> dict[str, Any]:
    params = {name: _query_value(value) for name, value in ask.params.items() if value is not None and value != []}
    authorization = {"authorization": f"Bearer {token}"} if token else {}
    return {"params": params, "json": ask.body, "headers": headers | authorization}


def silence(order: OpenStep) -> httpx2.Timeout:
    """The longest silence of a stream."""
    return httpx2.Timeout(order.silence_seconds, connect=5.0)


def reply_of(response: httpx2.Response, content: bytes) -> ExchangeReply:
    return ExchangeReply(response.status_code, response.headers, content)


def event_of(event: httpx2.ServerSentEvent | None) -> StreamEvent | None:
    return StreamEvent(event.event, event.data, event.id) if event is not None else None


def meant(error: Exception) -> Exception:
    """Translate an error of httpx for the exchange; return any other error unchanged."""
    if isinstance(error, httpx2.SSEError):
        return MusterError(f"what answers is no stream of Muster's: {error}", "bad-stream")
    if isinstance(error, httpx2.TransportError):
        text = str(error) or type(error).__name__
        reason = "connection refused" if "refused" in text.lower() else text
        return RequestLost(reason, refused=isinstance(error, httpx2.ConnectError))
    return error


def _query_value(value: Any) -> Any:
    """Booleans as the API reads them."""
    return str(value).lower() if isinstance(value, bool) else value
