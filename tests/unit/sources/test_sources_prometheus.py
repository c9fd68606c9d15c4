"""What the operator makes of Prometheus: down, slow, lying, or right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.polling import WAIT_SECONDS_MAX
from tests.unit.core.seen import NOW, beat, running, worker

from muster.operator.sources import prometheus
from muster.operator.sources.hub import SignalHub
from muster.operator.sources.prometheus import (
    CONFIRM_SECONDS,
    LEARNT_SECONDS_MIN,
    OTHER_SECONDS,
    RULES,
    SOURCE,
    STEP_SECONDS,
    BadAnswer,
    GangProgress,
    MetricSample,
    PrometheusPoller,
    requested_actions,
    samples_in,
)
from muster.operator.sources.world import HEARTBEAT_FRESH_SECONDS, believed
from muster.words.signals import Signal, SignalKind

# --- progress, by the samples alone ---

BEGAN = 1_700_000_000.0


def gang(
    seen_at: float, step_at: float, stepping: float = 1.0, limit: float | None = 15.0, **labels: str
) -> list[MetricSample]:
    named = {"job_uid": "uid-1", "attempt": "3"} | labels
    parts = {"seen_at": seen_at, "step_at": step_at, "stepping": stepping}
    parts |= {} if limit is None else {"limit": limit}
    return [MetricSample(named | {"is": part}, value) for part, value in parts.items()]


def stalls(history: list[list[MetricSample]]) -> list[bool]:
    progress = GangProgress()
    return [bool(progress.stalled(samples, NOW)) for samples in history]


def test_no_step_for_longer_than_the_limit_is_a_stall() -> None:
    times = [BEGAN + 10.0 * tick for tick in range(20)]
    found = stalls([gang(at, BEGAN) for at in times])
    first = found.index(True)
    assert times[first] - BEGAN == LEARNT_SECONDS_MIN + 10.0
    assert all(found[first:])
    progress = GangProgress()
    said = [report for at in times for report in progress.stalled(gang(at, BEGAN), NOW)]
    assert said[0].signal == Signal(
        kind=SignalKind.STALL,
        attempt=3,
        at=NOW,
        message="Prometheus has seen no step for 130 s (limit 120 s)",
        source=SOURCE,
    )
    assert len({(report.uid, report.key) for report in said}) == 1, "one signal, not one per tick"


def test_slow_steps_are_no_stall() -> None:
    assert not any(stalls([gang(BEGAN + 10.0 * tick, BEGAN, limit=600.0) for tick in range(50)]))


@pytest.mark.parametrize(
    ("stepping", "learnt", "limit"), [(0.0, 300.0, 300.0), (0.0, None, OTHER_SECONDS), (1.0, None, STEP_SECONDS)]
)
def test_what_the_ranks_have_learnt_counts_else_the_table_of_heartbeats(
    stepping: float, learnt: float | None, limit: float
) -> None:
    found = stalls([gang(BEGAN + 60.0 * tick, BEGAN, stepping, learnt) for tick in range(70)])
    assert found.index(True) == limit / 60.0 + 1


def test_what_is_no_longer_scraped_does_not_age() -> None:
    """Prometheus repeats the last sample for five minutes; its own clock goes on, the sample's does not."""
    assert not any(stalls([gang(BEGAN + 10.0, BEGAN)] * 100))


def test_a_clock_of_a_worker_that_is_an_hour_behind_accuses_nobody() -> None:
    history = [gang(BEGAN + 10.0 * tick, BEGAN - 3600.0 + 10.0 * tick) for tick in range(100)]
    assert not any(stalls(history))


def test_a_value_that_goes_backwards_is_progress() -> None:
    history = [gang(BEGAN + 10.0 * tick, BEGAN - 5.0 * tick) for tick in range(100)]
    assert not any(stalls(history))


def test_doubled_series_are_one_gang_and_the_newest_counts() -> None:
    """Two replicas of Prometheus behind one address, or a rank that is scraped twice."""
    history = [gang(BEGAN + 10.0 * tick, BEGAN) + gang(BEGAN + 10.0 * tick, BEGAN + 10.0 * tick) for tick in range(50)]
    assert not any(stalls(history))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_nothing(value: float) -> None:
    assert not any(stalls([gang(BEGAN + 10.0 * tick, value) for tick in range(50)]))
    assert not any(stalls([gang(value, BEGAN) for _ in range(50)]))


def test_series_without_job_or_attempt_are_nothing() -> None:
    for labels in ({"job_uid": ""}, {"attempt": ""}, {"attempt": "x"}):
        assert not any(stalls([gang(BEGAN + 10.0 * tick, BEGAN, **labels) for tick in range(50)]))


def test_a_new_operator_believes_the_ranks_word_after_a_second_look() -> None:
    found = stalls([gang(BEGAN + 1000.0 + 10.0 * tick, BEGAN) for tick in range(5)])
    assert found == [False, False, False, True, True]
    assert CONFIRM_SECONDS == 30.0


# --- rules ---


def test_rules_with_an_action_are_wishes_while_they_hold() -> None:
    labels = {"__name__": "ALERTS", "alertname": "Slow", "muster_action": "restart", "job_uid": "u", "attempt": "2"}
    (told,) = requested_actions([MetricSample(labels, 1.0)], NOW)
    assert (told.uid, told.signal.kind, told.signal.source) == ("u", SignalKind.STALL, RULES)
    assert told.signal.message == "Slow: holds in Prometheus"
    for value in (0.0, float("nan")):
        assert requested_actions([MetricSample(labels, value)], NOW) == ()
    assert requested_actions([MetricSample(labels | {"muster_action": "dance"}, 1.0)], NOW) == ()


# --- whom to believe ---


def told(source: str) -> Signal:
    return Signal(kind=SignalKind.STALL, attempt=1, at=NOW, source=source)


def test_heartbeats_are_the_authority_and_prometheus_the_second_witness() -> None:
    seen = replace(running(), now=NOW)
    fresh = replace(seen, workers=tuple(worker(i, heartbeats=(beat(1, 5, NOW - 1.0, rank=i),)) for i in range(2)))
    silent = NOW - HEARTBEAT_FRESH_SECONDS - 1.0
    blind = replace(seen, workers=tuple(worker(i, heartbeats=(beat(1, 5, silent, rank=i),)) for i in range(2)))
    said = (told(SOURCE), told(RULES), told("alertmanager"))
    assert believed(said, fresh) == said[1:]
    assert believed(said, blind) == said
    assert believed(said, replace(seen, workers=())) == said


# --- over HTTP ---

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Stands in for Prometheus where it misbehaves in ways to which the real one can't be brought."""

    def __init__(self) -> None:
        self.asked: list[web.Request] = []
        self.answer: Answer = answer_of([])

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        return await self.answer(request)


def answer_of(result: list[dict[str, Any]]) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})

    return answer


def text_of(text: str, status: int = 200) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text=text, status=status)

    return answer


FIRING = [
    {
        "metric": {"__name__": "ALERTS", "alertname": "A", "muster_action": "restart", "job_uid": "u", "attempt": "1"},
        "value": [1, "1"],
    }
]


class Asker:
    def __init__(self, url: str) -> None:
        self.errors: list[Exception | None] = []
        self.hub = SignalHub({"u": 1}.get, lambda uid: None)
        self.prometheus = PrometheusPoller(url, self.hub, self.errors.append, lambda: "secret")

    async def turn(self, seconds: float = WAIT_SECONDS_MAX) -> Exception | None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds)) as session:
            await self.prometheus.turn(session)
        return self.errors[-1]


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    server, app = Server(), web.Application()
    app.router.add_get("/prefix/api/v1/query", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield server, f"http://{host}:{port}/prefix/"
    await runner.cleanup()


async def test_one_query_for_all_jobs(server: tuple[Server, str]) -> None:
    fake, url = server
    fake.answer = answer_of(FIRING)
    asker = Asker(url)
    assert await asker.turn() is None
    assert len(fake.asked) == 1
    assert fake.asked[0].headers["Authorization"] == "Bearer secret"
    assert len(asker.hub.signals("u", 1)) == 1
    fake.answer = answer_of([])
    assert await asker.turn() is None
    assert asker.hub.signals("u", 1) == (), "what it no longer says is withdrawn"


@pytest.mark.parametrize(
    "answer",
    [
        text_of("<html>log in</html>"),
        text_of("", 500),
        text_of('{"status": "error", "errorType": "execution", "error": "too many series"}', 422),
        text_of('{"status": "error"}'),
        text_of('{"status": "success", "data": {"resultType": "matrix", "result": []}}'),
        answer_of([{"metric": {}, "value": [1]}]),
        text_of(
            '{"status": "success", "data": {"resultType": "vector", "result": [{"metric": 3, "value": [1, "1"]}]}}'
        ),
        text_of("null"),
        text_of("[" * 100_000),
    ],
)
async def test_rubbish_is_an_error_and_changes_nothing(server: tuple[Server, str], answer: Answer) -> None:
    fake, url = server
    asker = Asker(url)
    fake.answer = answer_of(FIRING)
    await asker.turn()
    fake.answer = answer
    assert isinstance(await asker.turn(), BadAnswer)
    assert len(asker.hub.signals("u", 1)) == 1


async def test_a_slow_one_is_given_up(server: tuple[Server, str]) -> None:
    fake, url = server

    async def never(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    fake.answer = never
    assert isinstance(await Asker(url).turn(0.5), TimeoutError)


async def test_too_large_an_answer_is_not_read_to_its_end(
    server: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = server
    monkeypatch.setattr(prometheus, "ANSWER_BYTES_MAX", 10_000)
    fake.answer = text_of(" " * 20_000)
    assert isinstance(await Asker(url).turn(), BadAnswer)


async def test_what_a_dead_one_said_last_holds_for_a_minute(
    server: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = server
    fake.answer = answer_of(FIRING)
    asker = Asker(url)
    await asker.turn()
    fake.answer = text_of("", 503)
    await asker.turn()
    assert len(asker.hub.signals("u", 1)) == 1
    monkeypatch.setattr(prometheus, "HOLD_SECONDS", 0.0)
    await asker.turn()
    assert asker.hub.signals("u", 1) == ()


async def test_nobody_there_is_an_error_like_any_other() -> None:
    assert isinstance(await Asker("http://127.0.0.1:9").turn(), OSError)


def test_samples_are_read_as_prometheus_writes_them() -> None:
    body = {
        "status": "success",
        "data": {"resultType": "vector", "result": [{"metric": {"a": "b"}, "value": [1.5, "NaN"]}]},
    }
    (sample,) = samples_in(json.dumps(body).encode())
    assert sample.labels == {"a": "b"}
    assert sample.value != sample.value
