"""Alertmanager's webhook over real HTTP: who may call, what is too much, and what becomes of each alert."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.operator.server import LoopLiveness, serve_pages
from muster.operator.sources.alertmanager import PATH, SOURCE, AlertWebhook, token_in
from muster.operator.sources.hub import PER_JOB_MAX, SignalHub
from muster.words.signals import Signal, SignalKind

TOKEN = "a-token-of-some-length"
LIVING = {"uid-1": 3}


class Desk:
    """An operator's server with nothing behind it but a hub that knows one job, at attempt 3."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "token"
        self.file.write_text(f"{TOKEN}\n")
        self.outcomes: Counter[str] = Counter()
        self.noticed: list[str] = []
        self.webhook = AlertWebhook(token_in(self.file), lambda outcome: self.outcomes.update([outcome]))
        self.hub = self.webhook.hub = SignalHub(LIVING.get, self.noticed.append)
        self.server = serve_pages(LoopLiveness(), "127.0.0.1", 0, {}, {PATH: self.webhook})

    def post(self, body: bytes, token: str | None = TOKEN, **headers: str) -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.server.server_address[1]}{PATH}", body)
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        for name, value in headers.items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def tell(self, *alerts: Any) -> dict[str, int]:
        status, body = self.post(json.dumps({"version": "4", "alerts": alerts}).encode())
        assert status == 200, body
        outcomes: dict[str, int] = json.loads(body)
        return outcomes

    def signals(self, attempt: int = 3) -> tuple[Signal, ...]:
        return self.hub.signals("uid-1", attempt)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.server.shutdown()
    desk.server.server_close()


def alert(fingerprint: str = "f00d", status: str = "firing", action: str = "restart", **labels: str) -> dict[str, Any]:
    named = {"alertname": "Stall", "job_uid": "uid-1", "attempt": "3"} | ({"muster_action": action} if action else {})
    return {
        "status": status,
        "labels": named | labels,
        "annotations": {"summary": "no step for long"},
        "startsAt": "2026-11-21T19:13:50.123456789Z",
        "endsAt": "0001-01-01T00:00:00Z",
        "fingerprint": fingerprint,
    }


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", "ü"])
def test_who_does_not_show_the_token_is_refused(desk: Desk, token: str | None) -> None:
    body = json.dumps({"alerts": [alert()]}).encode()
    assert desk.post(body, token if token != "ü" else "\xfc")[0] == 401
    assert (desk.signals(), desk.outcomes) == ((), Counter())


def test_without_a_token_there_is_no_webhook_and_a_new_one_counts_at_once(desk: Desk) -> None:
    desk.file.unlink()
    assert desk.post(b"{}") == (404, "nothing is posted here: this operator was given no token for it\n")
    assert desk.post(b"{}", "")[0] == 404, "an empty token opens nothing"
    desk.file.write_text("rotated")
    assert desk.post(b'{"alerts": []}', "rotated") == (200, "{}")
    assert desk.post(b'{"alerts": []}')[0] == 401


def test_ten_megabytes_are_refused_and_one_is_taken(desk: Desk) -> None:
    assert desk.post(b" " * 10_000_000) == (413, "more than 1000000 bytes\n")
    assert desk.post(b" " * 10_000_000, None)[0] == 401, "who may not call is told that, whatever he sends"
    padding = b" " * (1_000_000 - len(b'{"alerts": []}'))
    assert desk.post(b'{"alerts": []}' + padding) == (200, "{}")
    assert desk.outcomes == Counter()


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b"null", b'{"alerts": 3}', b"\xff\xfe", b"[" * 100_000], ids=lambda b: repr(b[:9])
)
def test_what_is_no_notification_is_refused(desk: Desk, body: bytes) -> None:
    status, words = desk.post(body)
    assert status == 400
    assert "alerts" in words


def test_an_alert_becomes_a_signal_and_the_job_is_looked_at(desk: Desk) -> None:
    assert desk.tell(alert(action="exclude-node", node="ip-10-0-0-7", worker="1", rank="9")) == {"taken": 1}
    assert desk.signals() == (
        Signal(
            kind=SignalKind.GPU_FAULT,
            attempt=3,
            at=1795288430.123456,
            worker=1,
            rank=9,
            node="ip-10-0-0-7",
            message="Stall: no step for long",
            source=SOURCE,
        ),
    )
    assert desk.noticed == ["uid-1"]


def test_a_storm_of_retries_is_one_signal(desk: Desk) -> None:
    for _ in range(50):
        desk.tell(*[alert() for _ in range(20)])
    assert len(desk.signals()) == 1
    assert desk.noticed == ["uid-1"]
    assert desk.outcomes == {"taken": 1, "repeated": 999}


def test_a_storm_of_new_alerts_fills_no_memory(desk: Desk) -> None:
    outcomes = desk.tell(*[alert(f"{number:x}") for number in range(1_000)])
    assert outcomes == {"taken": PER_JOB_MAX, "too_many": 1_000 - PER_JOB_MAX}


def test_a_resolved_alert_is_withdrawn(desk: Desk) -> None:
    desk.tell(alert("a"), alert("b"))
    assert desk.tell(alert("a", "resolved")) == {"resolved": 1}
    assert len(desk.signals()) == 1
    assert desk.tell(alert("never-heard-of", "resolved")) == {"resolved": 1}
    assert len(desk.noticed) == 3


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({"job_uid": "somebody-else"}, "job_gone"),
        ({"attempt": "2"}, "attempt_gone"),
        ({"attempt": "4"}, "attempt_gone"),
        ({"attempt": "three"}, "no_attempt"),
        ({"attempt": ""}, "no_attempt"),
        ({"attempt": "-3"}, "no_attempt"),
        ({"job_uid": ""}, "no_attempt"),
        ({"muster_action": "explode"}, "unknown_action"),
        ({"muster_action": ""}, "no_action"),
    ],
)
def test_what_concerns_nobody_is_answered_and_ignored(desk: Desk, changed: dict[str, str], outcome: str) -> None:
    assert desk.tell(alert(**changed)) == {outcome: 1}
    assert (desk.signals(), desk.noticed, desk.outcomes) == ((), [], {outcome: 1})


def test_one_bad_alert_does_not_hold_up_the_others(desk: Desk) -> None:
    bad = [None, 7, "alert", {}, {"labels": None}, alert() | {"startsAt": "soon"}, alert() | {"status": "maybe"}]
    assert desk.tell(*bad, alert("good")) == {"malformed": len(bad), "taken": 1}


def test_signals_go_with_their_attempt(desk: Desk) -> None:
    desk.tell(alert())
    assert desk.signals(attempt=4) == ()
    assert desk.signals(attempt=3) == (), "dropped, not only hidden"


def test_who_does_not_lead_says_so_and_alertmanager_tries_again(desk: Desk) -> None:
    desk.webhook.hub = None
    assert desk.post(b'{"alerts": []}')[0] == 503


def test_an_action_of_none_is_told_and_asks_for_nothing(desk: Desk) -> None:
    desk.tell(alert(action="none"))
    assert [signal.kind for signal in desk.signals()] == [SignalKind.ALERT]
