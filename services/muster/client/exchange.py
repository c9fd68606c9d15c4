"""Course of a request to the API, independent of the transport.

What is sent again and for how long, what an answer means, and how a stream goes on after a cut. No IO: the generators
yield what is to be sent, and are given what came of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from muster.client.address import Server
from muster.client.errors import BUSY, MusterError, Unreachable, refusal
from muster.client.signed_in import token_for
from muster.client.steps import FoundResult, PauseStep, RequestStep

# A request that may have been lost is asked again this long: an API that `muster up` restarts is back by then.
PATIENCE_SECONDS = 20.0
# An answer that takes longer is not coming: a busy API's slowest requests (dry runs, pages of logs) take seconds.
ANSWER_SECONDS_MAX = 20.0
SILENCE_SECONDS = 3.0  # after so long a person wants to know what is being waited for
# A stream is waited for longer: whoever follows a job wants to be there when an upgraded API is back.
STREAM_PATIENCE_SECONDS = 300.0
STREAM_SILENCE_SECONDS = 45.0  # three of the server's pings
PAUSE_SECONDS = 0.2
PAUSE_SECONDS_MAX = 2.0
# The request may have been carried out behind the gateway that says this.
_MAYBE_DONE = (502, 504)


@dataclass(frozen=True)
class ExchangeReply:
    """An answer. The headers' names are in lower case."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""


@dataclass(frozen=True)
class SendStep:
    """Step to send a request, which must be answered by a Reply within `seconds_max`. The user is notified after
    `silence_seconds`."""

    ask: RequestStep
    headers: dict[str, str]
    seconds_max: float
    silence_seconds: float


@dataclass(frozen=True)
class OpenStep:
    """Open a stream of server-sent events, instead of one that may be open. Answered by the Reply, whose content is
    empty where the stream is open. Silence of `silence_seconds` is a loss.
    """

    ask: RequestStep
    headers: dict[str, str]
    silence_seconds: float


@dataclass(frozen=True)
class NextEvent:
    """Answered by the next event of the open stream, or None at its end."""


@dataclass(frozen=True)
class StreamEvent:
    """A server-sent event."""

    event: str
    data: str
    id: str = ""

    def json(self) -> Any:
        """Return the event's data, decoded. Raises MusterError."""
        try:
            return json.loads(self.data)
        except ValueError:
            what = f"the server sent a stream event that is not JSON: {self.data[:100]!r}"
            raise MusterError(what, "bad-event") from None


class RequestLost(Exception):
    """The request or its answer was lost on the way. `refused`: nothing listens there."""

    def __init__(self, reason: str, refused: bool = False) -> None:
        self.reason, self.refused = reason, refused
        super().__init__(reason)


class TooSlow(Exception):
    """No answer within Send.seconds_max."""


class RequestExchange:
    """The requests to one server. `waiting` is called with the reason, once for each time that the server has to be
    waited for."""

    def __init__(self, server: Server, patience_seconds: float, waiting: Callable[[str], None]) -> None:
        self.server = server
        self.patience_seconds = patience_seconds
        self.waiting = waiting
        self._answered = False

    def token(self) -> str | None:
        """A token of now: a stream that is taken up again may outlive a sign-in's first one. May ask the provider."""
        return token_for(self.server.url) if self.server.signed_in else self.server.token

    def answer(self, ask: RequestStep) -> Generator[SendStep | PauseStep, ExchangeReply | None, Any]:
        """The answer's JSON. Asked until there is one, as long as patience lasts. Raises MusterError.

        A server that has never answered is not waited for: whoever has none wants to know at once.
        """
        deadline = time.monotonic() + self.patience_seconds
        pause, waited = PAUSE_SECONDS, False
        limit = min(ANSWER_SECONDS_MAX, max(self.patience_seconds, 1.0))
        headers = {"idempotency-key": ask.key} if ask.key else {}
        while True:
            try:
                reply = yield SendStep(ask, headers, limit, SILENCE_SECONDS)
            except TooSlow:
                raise self._silent(limit) from None
            except RequestLost as lost:
                refused = lost.refused and not self._answered
                if refused or not ask.repeat or time.monotonic() + pause > deadline:
                    raise Unreachable(self.server.url, lost.reason) from None
                reason = lost.reason
            else:
                assert reply is not None, "a Send is answered by a Reply"
                self._answered = True
                final = reply.status not in BUSY or (reply.status in _MAYBE_DONE and not ask.repeat)
                if final or time.monotonic() + pause > deadline:
                    self._raise_for(reply)
                    return self._json(reply)
                reason, pause = f"status {reply.status}", _retry_after(reply, pause)
            if not waited:
                self.waiting(reason)
                waited = True
            yield PauseStep(pause)
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    def events(
        self, ask: RequestStep, last_id: str
    ) -> Generator[OpenStep | NextEvent | PauseStep | FoundResult, Any, None]:
        """StreamEvents after `last_id` until the server says `end`, over broken connections by Last-Event-ID."""
        pause, heard, heard_at = PAUSE_SECONDS, False, time.monotonic()
        while True:
            headers = {"accept": "text/event-stream"} | ({"last-event-id": last_id} if last_id else {})
            try:
                reply: ExchangeReply = yield OpenStep(ask, headers, STREAM_SILENCE_SECONDS)
                if reply.status == 204:
                    return
                self._answered = True
                if reply.status not in BUSY:
                    self._raise_for(reply)
                    while (event := (yield NextEvent())) is not None:
                        last_id, pause, heard = event.id or last_id, PAUSE_SECONDS, False
                        heard_at = time.monotonic()
                        yield FoundResult(event)
                        if event.event == "end":
                            return
                reason = "the server closed the stream"
            except RequestLost as lost:
                if not self._answered:
                    raise Unreachable(self.server.url, lost.reason) from None
                reason = lost.reason
            if time.monotonic() - heard_at > STREAM_PATIENCE_SECONDS + STREAM_SILENCE_SECONDS:
                raise Unreachable(self.server.url, reason)
            if not heard:
                self.waiting(reason)
                heard = True
            yield PauseStep(pause)
            pause = min(pause * 2, PAUSE_SECONDS_MAX)

    def _silent(self, limit: float) -> Unreachable:
        next_step = f"`curl -m 5 {self.server.url}/healthz` says whether a Muster listens there; its log says more"
        return Unreachable(self.server.url, f"no answer within {limit:g} s", next_step)

    def _raise_for(self, reply: ExchangeReply) -> None:
        if not 200 <= reply.status < 300:
            raise self.error_of(reply)

    def _json(self, reply: ExchangeReply) -> Any:
        try:
            return json.loads(reply.content) if reply.content else None
        except ValueError:
            raise MusterError(f"what answers at {self.server.url} is no Muster: not JSON", "bad-answer") from None

    def error_of(self, reply: ExchangeReply) -> MusterError:
        """The server's problem+json, or what can be said without one."""
        try:
            body = json.loads(reply.content)
        except ValueError:
            body = {}
        problem = body if isinstance(body, dict) else {}
        return refusal(reply.status, problem, self.server.url, self.server.signed_in)


def _retry_after(reply: ExchangeReply, pause: float) -> float:
    """The pause that the server asks for, if it names seconds, within reason."""
    try:
        return min(max(float(reply.headers.get("retry-after", "")), pause), PAUSE_SECONDS_MAX)
    except ValueError:
        return pause
