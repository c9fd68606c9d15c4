"""Spot notices of AWS from the instance metadata service (IMDSv2), each second.

`spot/instance-action` comes two minutes ahead, `events/recommendations/rebalance` maybe earlier; both answer 404 as
long as there is nothing (docs.aws.amazon.com: spot-instance-termination-notices, rebalance-recommendations).
"""

from __future__ import annotations

import http.client
import json
import time
from datetime import UTC, datetime
from urllib.parse import urlsplit

from muster.agent.source import LogOnChange
from muster.words.notices import Notice, Remedy
from muster.words.signals import SignalKind

PAUSE_SECONDS = 1.0
ABSENT_SECONDS = 60.0  # no such service here: most likely there never will be one
TROUBLED_SECONDS = 10.0  # it answers, but not as it should
TIMEOUT_SECONDS = 1.0
TOKEN_SECONDS = 21_600  # the longest that IMDSv2 gives
_RENEW_BEFORE_SECONDS = 300.0
BODY_BYTES_MAX = 65_536


class _MetadataAbsent(Exception):
    """Error that no instance metadata can be reached here; the message says why."""


class _MetadataTrouble(Exception):
    """Error that the instance metadata exists but can't be used; the message says why."""


class ImdsSource:
    """Source of announced spot interruptions and rebalances, from AWS' instance metadata service at `address`."""

    name = "imds"

    def __init__(self, address: str) -> None:
        self.pause_seconds = PAUSE_SECONDS
        parts = urlsplit(address)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._connection: http.client.HTTPConnection | None = None
        self._token, self._token_ends = "", 0.0
        self._log = LogOnChange(self.name)

    def look(self) -> tuple[Notice, ...]:
        try:
            action = self._ask("/latest/meta-data/spot/instance-action")
            rebalance = self._ask("/latest/meta-data/events/recommendations/rebalance")
        except _MetadataAbsent as why:
            self._log.say(f"no instance metadata: {why}; asking again every {ABSENT_SECONDS:.0f} s")
            self.pause_seconds = ABSENT_SECONDS
            return ()
        except _MetadataTrouble as why:
            self._log.say(f"instance metadata can't be used: {why}; asking again every {TROUBLED_SECONDS:.0f} s")
            self.pause_seconds = TROUBLED_SECONDS
            return ()
        self._log.fine("instance metadata answers")
        self.pause_seconds = PAUSE_SECONDS
        return tuple(notice for notice in (_action(action), _rebalance(rebalance)) if notice)

    def acknowledge(self) -> None:
        """Do nothing: the service is asked again anyway."""

    def _ask(self, path: str) -> str | None:
        """Return the service's value at the path, or None if there is none. A refused token is replaced once."""
        for _ in range(2):
            if not self._token or time.monotonic() > self._token_ends - _RENEW_BEFORE_SECONDS:
                self._renew()
            try:
                status, body = self._request("GET", path, {"X-aws-ec2-metadata-token": self._token})
            except TimeoutError as error:
                raise _MetadataTrouble(f"{path} does not answer within {TIMEOUT_SECONDS:g} s") from error
            if status == 200:
                return body
            if status == 404:
                return None
            if status != 401:
                raise _MetadataTrouble(f"{path} answers {status}")
            self._token = ""
        raise _MetadataTrouble(f"{path} answers 401 to a token that it has just given")

    def _renew(self) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
        try:
            status, body = self._request("PUT", "/latest/api/token", headers)
        except TimeoutError as error:
            why = "it takes connections and gives no token; with a hop limit of 1 a pod must use the host's network"
            raise _MetadataAbsent(why) from error
        if status != 200 or not body.strip():
            raise _MetadataAbsent(f"asked for a token it answers {status}; this is not IMDSv2, or it is turned off")
        self._token, self._token_ends = body.strip(), time.monotonic() + TOKEN_SECONDS

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        """Over one connection that is kept; one that the server has closed meanwhile is opened anew."""
        for retry in (False, True):
            fresh = self._connection is None
            try:
                connection = self._connection or self._connect()
                connection.request(method, path, headers=headers)
                reply = connection.getresponse()
                body = reply.read(BODY_BYTES_MAX).decode(errors="replace")
                if reply.will_close or not reply.isclosed():
                    self._drop()
                return reply.status, body
            except TimeoutError:
                self._drop()
                raise
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                if retry or fresh:
                    raise _MetadataTrouble(f"{type(error).__name__}: {error}") from error
        raise AssertionError("unreachable")

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise _MetadataAbsent(f"{self._host}:{self._port}: {error.strerror or error}") from error
        self._connection = connection
        return connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _action(body: str | None) -> Notice | None:
    """{"action": "terminate" | "stop" | "hibernate", "time": "2017-09-18T08:22:00Z"}. Anything that stands there is a
    notice, even if we can't read it: to commit in vain costs less than to lose the node unprepared.
    """
    if body is None:
        return None
    document = _document(body)
    what, until = str(document.get("action", "")), _time(document.get("time"))
    message = f"AWS takes the instance back ({what or 'no reason'})" + (f" at {document.get('time')}" if until else "")
    return Notice(
        kind=SignalKind.SPOT_NOTICE,
        remedy=Remedy.DRAIN,
        at=time.time(),
        message=message[:300],
        source="imds",
        until=until,
    )


def _rebalance(body: str | None) -> Notice | None:
    if body is None:
        return None
    return Notice(
        kind=SignalKind.REBALANCE,
        remedy=Remedy.RECORD,
        at=_time(_document(body).get("noticeTime")) or time.time(),
        message="AWS recommends to move away: the instance is at an elevated risk of interruption",
        source="imds",
    )


def _document(body: str) -> dict[str, object]:
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _time(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
