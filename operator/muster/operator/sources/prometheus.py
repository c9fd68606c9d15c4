"""Signals from Prometheus, by one query for all jobs: jobs that have made no step for too long, and rules that request
an action.

Prometheus may be down, slow, behind, doubled or wrong. So progress is judged by the samples' own times: a series that
is no longer scraped does not age, a clock that differs from ours does not matter, and any change of a value, also
backwards, is progress. What it said holds for a minute after its last answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import aiohttp

from muster.operator.sources.alerts import SignalReport, report
from muster.operator.sources.hub import SignalHub
from muster.words.hangs import DATA_SECONDS, LIMIT_SECONDS
from muster.words.signals import Signal, SignalKind, TrainerPhase

SOURCE, RULES = "prometheus", "prometheus-rule"
TICK_SECONDS = 10.0
ANSWER_SECONDS = 8.0
ANSWER_BYTES_MAX = 64_000_000  # 10,000 gangs take about 8 MB
HOLD_SECONDS = 60.0

# The deadlines are those of heartbeats: learnt by the ranks, if they tell; a step may wait for data within each.
LEARNT_SECONDS_MIN = DATA_SECONDS
STEP_SECONDS, OTHER_SECONDS = LIMIT_SECONDS[TrainerPhase.STEP], max(LIMIT_SECONDS.values())
CONFIRM_SECONDS = 30.0  # of samples that say the same

_GANG = "max by (job_uid, attempt)"
_STEP_AT = "muster_trainer_last_step_timestamp_seconds"
QUERY = " or ".join(
    [
        f'label_replace({_GANG} ({_STEP_AT}), "is", "step_at", "", "")',
        f'label_replace({_GANG} (timestamp({_STEP_AT})), "is", "seen_at", "", "")',
        f'label_replace({_GANG} (muster_trainer_limit_seconds), "is", "limit", "", "")',
        f'label_replace({_GANG} (muster_trainer_phase{{phase="step"}}), "is", "stepping", "", "")',
        # Rules with that label, and alerts that fire: so a muster_action works without an Alertmanager too.
        '{muster_action!="", __name__!="ALERTS_FOR_STATE", alertstate!="pending"}',
    ]
)


class BadAnswer(Exception):
    """The response is no answer to an instant query; the message says what it is."""


@dataclass(frozen=True, slots=True)
class MetricSample:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class _GangSamples:
    """Samples of one gang so far. Times are by Prometheus' clock."""

    mark: tuple[float, float]  # when the last step ended, and whether ranks are stepping: progress is a change of it
    since: float  # when the mark was first true, as far as is known
    first_at: float  # of the sample in which we saw the mark first


class GangProgress:
    """Gangs whose last step is too old, by the samples so far."""

    def __init__(self) -> None:
        self._gangs: dict[tuple[str, str], _GangSamples] = {}

    def stalled(self, samples: Iterable[MetricSample], now: float) -> tuple[SignalReport, ...]:
        """Reports of the gangs that make no progress. `now` is by our own clock, which the signals carry."""
        seen: dict[tuple[str, str], dict[str, float]] = {}
        for sample in samples:
            labels = sample.labels
            if (part := labels.get("is")) and (uid := labels.get("job_uid")) and math.isfinite(sample.value):
                parts = seen.setdefault((uid, labels.get("attempt", "")), {})
                parts[part] = max(sample.value, parts.get(part, -math.inf))
        whole = {gang: parts for gang, parts in seen.items() if {"step_at", "seen_at"} <= parts.keys()}
        self._gangs = {gang: self._follow(self._gangs.get(gang), parts) for gang, parts in whole.items()}
        judged = (self._judge(gang, parts, now) for gang, parts in whole.items())
        return tuple(each for each in judged if each)

    def _follow(self, before: _GangSamples | None, parts: dict[str, float]) -> _GangSamples:
        step_at, seen_at, stepping = parts["step_at"], parts["seen_at"], parts.get("stepping", 0.0)
        mark = (step_at, stepping)
        if before is not None and before.mark == mark:
            return before
        # At first sight the rank's own clock is believed; later it is enough that the mark moved since the last look.
        own_word = before is None and stepping > 0 and 0 < step_at < seen_at
        return _GangSamples(mark, step_at if own_word else seen_at, seen_at)

    def _judge(self, key: tuple[str, str], parts: dict[str, float], now: float) -> SignalReport | None:
        gang, (uid, attempt) = self._gangs[key], key
        idle = parts["seen_at"] - gang.since
        limit = STEP_SECONDS if parts.get("stepping", 0.0) > 0 else OTHER_SECONDS
        if (learnt := parts.get("limit")) is not None:
            limit = max(LEARNT_SECONDS_MIN, learnt)
        if idle <= limit or parts["seen_at"] - gang.first_at < CONFIRM_SECONDS or not attempt.isdecimal():
            return None
        message = f"Prometheus has seen no step for {idle:.0f} s (limit {limit:.0f} s)"
        signal = Signal(kind=SignalKind.STALL, attempt=int(attempt), at=now, message=message, source=SOURCE)
        return SignalReport(uid, f"stall/{attempt}", signal)


def requested_actions(samples: Iterable[MetricSample], now: float) -> tuple[SignalReport, ...]:
    """Return the reports of rules that carry muster_action and hold: their value is a number other than 0."""
    reports = []
    for sample in samples:
        labels = sample.labels
        if not labels.get("muster_action") or not sample.value or math.isnan(sample.value):
            continue
        name = labels.get("alertname") or labels.get("__name__", "a rule")
        key = hashlib.blake2b(json.dumps(sorted(labels.items())).encode(), digest_size=8).hexdigest()
        action = report(labels, f"{name}: holds in Prometheus", now, RULES, key)
        if isinstance(action, SignalReport):
            reports.append(action)
    return tuple(reports)


def samples_in(body: bytes) -> tuple[MetricSample, ...]:
    """Raises BadAnswer."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"no JSON: {body[:80]!r}") from error
    try:
        if document["status"] != "success" or document["data"]["resultType"] != "vector":
            raise BadAnswer(f"{document.get('errorType')}: {document.get('error')}"[:300])
        pairs = [(entry["metric"], float(entry["value"][1])) for entry in document["data"]["result"]]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswer(f"not the answer to an instant query: {type(error).__name__}: {error}"[:300]) from error
    if not all(isinstance(labels, dict) for labels, _ in pairs):
        raise BadAnswer("a series without labels")
    return tuple(MetricSample(labels, value) for labels, value in pairs)


class PrometheusPoller:
    """Poller of a Prometheus server, which reports gangs without progress to the hub.

    `url` is that of its HTTP API without /api/v1. `token` returns the bearer token for it, or None. `told` is called
    after every question, with the error if there was one.
    """

    def __init__(
        self,
        url: str,
        hub: SignalHub,
        on_answer: Callable[[Exception | None], None],
        token: Callable[[], str | None] = lambda: None,
        tick_seconds: float = TICK_SECONDS,
    ) -> None:
        self._url, self._hub, self._on_answer, self._token = url.rstrip("/"), hub, on_answer, token
        self._tick_seconds = tick_seconds
        self._progress = GangProgress()
        self._answered_at = time.monotonic()

    async def run(self) -> None:
        limits = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        async with aiohttp.ClientSession(timeout=limits) as session:
            while True:
                began = time.monotonic()
                await self.turn(session)
                await asyncio.sleep(max(0.0, self._tick_seconds - (time.monotonic() - began)))

    async def turn(self, session: aiohttp.ClientSession) -> None:
        """Query once, and report to the hub. No error is raised."""
        try:
            samples = await self._query(session)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, BadAnswer) as error:
            if time.monotonic() - self._answered_at > HOLD_SECONDS:
                self._publish((), ())
            self._on_answer(error)
            return
        self._answered_at, now = time.monotonic(), time.time()
        self._publish(self._progress.stalled(samples, now), requested_actions(samples, now))
        self._on_answer(None)

    def _publish(self, stalled: tuple[SignalReport, ...], requested: tuple[SignalReport, ...]) -> None:
        self._hub.replace(SOURCE, stalled)
        self._hub.replace(RULES, requested)

    async def _query(self, session: aiohttp.ClientSession) -> tuple[MetricSample, ...]:
        token = self._token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        parameters = {"query": QUERY, "timeout": f"{ANSWER_SECONDS:g}s"}
        async with session.get(f"{self._url}/api/v1/query", params=parameters, headers=headers) as reply:
            body = await _read(reply)
            if reply.status != 200:
                raise BadAnswer(f"HTTP {reply.status}: {body[:200]!r}")
        return await asyncio.to_thread(samples_in, body)


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    """StreamReader.read(n) returns what is there; all of it is wanted, up to the limit."""
    parts, size = [], 0
    async for chunk in reply.content.iter_any():
        size += len(chunk)
        if size > ANSWER_BYTES_MAX:
            raise BadAnswer(f"more than {ANSWER_BYTES_MAX} bytes")
        parts.append(chunk)
    return b"".join(parts)
