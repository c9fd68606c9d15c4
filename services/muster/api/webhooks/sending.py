"""One message, sent once: what came of it."""

from __future__ import annotations

import asyncio
import email.utils
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from muster.api.webhooks.reach import NetworkReach, OutOfReach, UnresolvedHost
from muster.words.webhooks import signature

SEND_SECONDS_MAX = 15.0  # for the name, the connection and the answer's beginning: the standard asks for 15 to 30
TOLERANCE_SECONDS = 300.0  # for which receivers take a signature, by the standard's libraries
RETRY_AFTER_SECONDS_MAX = 7_200.0


@dataclass(frozen=True)
class SignedMessage:
    """A message as it is sent, signed by each of the secrets."""

    id: str
    url: str
    body: str
    secrets: Sequence[str]


@dataclass(frozen=True)
class SendResult:
    """`status` is the answer's, None where none came; `error` says why it counts as not delivered, None if it does not.
    `retry_after` is for how many seconds the receiver asks to be left alone."""

    at: float
    status: int | None
    error: str | None
    seconds: float
    retry_after: float = 0.0


async def send(message: SignedMessage, reach: NetworkReach) -> SendResult:
    """Send it. The answer's body is not read, and a redirect is not followed: it would lead past the check."""
    at, begun = time.time(), time.monotonic()
    status, error, retry_after = None, None, 0.0
    try:
        async with asyncio.timeout(SEND_SECONDS_MAX):
            addresses = await reach.addresses(message.url)
            async with (
                _session(addresses) as session,
                session.post(
                    URL(message.url, encoded=True),
                    data=message.body.encode(),
                    headers=headers_of(message, int(at)),
                    allow_redirects=False,
                ) as reply,
            ):
                status, error, retry_after = reply.status, _fault(reply, at), _retry_after(reply)
                reply.close()
    except TimeoutError:
        error = f"no answer within {SEND_SECONDS_MAX:g} s"
    except (OutOfReach, UnresolvedHost) as refused:
        error = str(refused)
    except (ClientError, OSError, ValueError) as failed:
        error = f"no connection or no answer of HTTP: {type(failed).__name__}"
    return SendResult(at, status, error, round(time.monotonic() - begun, 3), retry_after)


def headers_of(message: SignedMessage, timestamp: int) -> dict[str, str]:
    signatures = " ".join(signature(secret, message.id, timestamp, message.body) for secret in message.secrets)
    return {
        "Content-Type": "application/json",
        "User-Agent": "Muster-Webhooks/1",
        "webhook-id": message.id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signatures,
    }


def _session(addresses: Sequence[str]) -> ClientSession:
    """A session that connects to these addresses, whatever its host's name resolves to by now; with the name in the TLS
    handshake and in its certificate. It takes no proxy from the environment, which would resolve the name itself."""
    connector = TCPConnector(resolver=_CheckedResolver(addresses), force_close=True, use_dns_cache=False)
    return ClientSession(connector=connector, timeout=ClientTimeout(total=None), trust_env=False)


class _CheckedResolver(AbstractResolver):
    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


def _fault(reply: ClientResponse, at: float) -> str | None:
    if 200 <= reply.status < 300:
        return None
    if 300 <= reply.status < 400:
        return f"answered {reply.status}, a redirect, which is not followed: set the address where it leads"
    words = f"answered {reply.status}"
    ahead = _clock(reply) - at
    if 400 <= reply.status < 500 and abs(ahead) > TOLERANCE_SECONDS:
        which = "ahead of" if ahead > 0 else "behind"
        words += (
            f"; its clock is {abs(ahead):.0f} s {which} the API's, and signatures are taken for "
            f"{TOLERANCE_SECONDS:.0f} s: set the clocks"
        )
    return words


def _clock(reply: ClientResponse) -> float:
    """The answer's time in seconds since the epoch; now if it gives none."""
    try:
        return email.utils.parsedate_to_datetime(reply.headers.get("Date", "")).timestamp()
    except (ValueError, OverflowError):
        return time.time()


def _retry_after(reply: ClientResponse) -> float:
    """Return the requested delay in seconds; 0 if the reply gives none, or a date."""
    text = reply.headers.get("Retry-After", "")
    return min(float(text), RETRY_AFTER_SECONDS_MAX) if text.isascii() and text.isdigit() and len(text) < 9 else 0.0
