"""Spot notices from a metadata service that behaves, and from all that a metadata service can do wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from tests.ports import free_port
from tests.unit.agent.mock_imds import ACTION, REBALANCE, MockImds, mock_imds

from muster.agent import imds as module
from muster.agent.imds import ImdsSource
from muster.words.notices import Remedy
from muster.words.signals import SignalKind


@pytest.fixture
def service() -> Iterator[MockImds]:
    with mock_imds() as mock:
        yield mock


def test_nothing_is_announced_and_one_token_serves_all_looks(service: MockImds) -> None:
    imds = ImdsSource(service.address)
    assert [imds.look() for _ in range(5)] == [()] * 5
    assert service.asked == {"PUT": 1, ACTION: 5, REBALANCE: 5}
    assert imds.pause_seconds == 1.0


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_an_interruption_is_a_spot_notice_with_its_time(service: MockImds, action: str) -> None:
    service.interrupt(action, "2030-09-18T08:22:00Z")
    (notice,) = ImdsSource(service.address).look()
    assert (notice.kind, notice.remedy, notice.source) == (SignalKind.SPOT_NOTICE, Remedy.DRAIN, "imds")
    assert notice.until == datetime(2030, 9, 18, 8, 22, tzinfo=UTC).timestamp()
    assert action in notice.message
    assert notice.keeps_out
    assert notice.asks_to_leave


@pytest.mark.parametrize("body", ["", "not json", "[]", '{"action": 7}', '{"time": "soon"}'])
def test_a_notice_that_can_not_be_read_is_one_all_the_same(service: MockImds, body: str) -> None:
    service.documents[ACTION] = body
    (notice,) = ImdsSource(service.address).look()
    assert (notice.kind, notice.until) == (SignalKind.SPOT_NOTICE, None)


def test_a_rebalance_recommendation_moves_nobody(service: MockImds) -> None:
    service.documents[REBALANCE] = '{"noticeTime": "2030-11-05T08:22:00Z"}'
    (notice,) = ImdsSource(service.address).look()
    assert (notice.kind, notice.at) == (
        SignalKind.REBALANCE,
        datetime(2030, 11, 5, 8, 22, tzinfo=UTC).timestamp(),
    )
    assert not notice.keeps_out
    assert not notice.asks_to_leave


def test_a_token_that_ran_out_early_is_replaced_within_the_look(service: MockImds) -> None:
    imds = ImdsSource(service.address)
    imds.look()
    service.tokens.clear()
    service.interrupt()
    assert [notice.kind for notice in imds.look()] == [SignalKind.SPOT_NOTICE]
    assert service.asked["PUT"] == 2


def test_a_token_is_renewed_before_it_ends(service: MockImds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKEN_SECONDS", 1)  # less than is left when a token is renewed
    imds = ImdsSource(service.address)
    imds.look()
    before = service.asked["PUT"]
    imds.look()
    assert service.asked["PUT"] > before
    assert imds.pause_seconds == 1.0


def test_a_service_that_refuses_every_token_is_asked_a_bounded_number_of_times(
    service: MockImds, caplog: pytest.LogCaptureFixture
) -> None:
    service.refuses_all = True
    imds = ImdsSource(service.address)
    with caplog.at_level(logging.WARNING):
        looks = [imds.look() for _ in range(3)]
    assert looks == [()] * 3
    assert service.asked["PUT"] <= 6
    assert service.asked[ACTION] == 6
    assert imds.pause_seconds == module.TROUBLED_SECONDS
    assert len([line for line in caplog.messages if "401" in line]) == 1, "said once"
    service.refuses_all = False
    service.interrupt()
    assert [notice.kind for notice in imds.look()] == [SignalKind.SPOT_NOTICE]
    assert imds.pause_seconds == 1.0, "and then each second again"


def test_where_there_is_none_it_is_said_once_and_seldom_asked(caplog: pytest.LogCaptureFixture) -> None:
    imds = ImdsSource(f"http://127.0.0.1:{free_port()}")
    with caplog.at_level(logging.WARNING):
        assert [imds.look() for _ in range(3)] == [()] * 3
    assert imds.pause_seconds == module.ABSENT_SECONDS
    assert len(caplog.messages) == 1


def test_a_hop_limit_of_one_is_named(
    service: MockImds, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "TIMEOUT_SECONDS", 0.1)
    service.gives_no_token = True
    imds = ImdsSource(service.address)
    with caplog.at_level(logging.WARNING):
        assert [imds.look(), imds.look()] == [(), ()]
    (line,) = caplog.messages
    assert "hop limit" in line
    assert imds.pause_seconds == module.ABSENT_SECONDS


def test_another_clouds_service_is_no_imds(service: MockImds, caplog: pytest.LogCaptureFixture) -> None:
    service.token_status = 405
    imds = ImdsSource(service.address)
    with caplog.at_level(logging.WARNING):
        assert imds.look() == ()
    assert "405" in caplog.messages[0]
    assert imds.pause_seconds == module.ABSENT_SECONDS


def test_a_connection_that_was_closed_meanwhile_is_opened_anew(service: MockImds) -> None:
    imds = ImdsSource(service.address)
    imds.look()
    assert imds._connection is not None
    assert imds._connection.sock is not None
    imds._connection.sock.close()
    service.interrupt()
    assert len(imds.look()) == 1
