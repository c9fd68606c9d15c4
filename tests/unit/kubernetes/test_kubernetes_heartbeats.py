"""Which workers are asked how they are, and how often; and what makes all of them be asked at once."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from tests.unit.kubernetes.making import JOB_UID, pod_item

from muster.operator.kubernetes.heartbeats import HeartbeatCache
from muster.operator.kubernetes.jobs import CachedJob, JobStore
from muster.operator.kubernetes.pods import PodCache, PodState, read_pod
from muster.operator.pacing import (
    POLL_OTHERS_PER_SECOND,
    POLL_ROUND_SECONDS,
    POLL_RUNNING_SECONDS,
    POLL_SUSPICIOUS_SECONDS,
)
from muster.words.signals import Heartbeat
from muster.words.status import GangStatus, JobStatus, Phase


@dataclass
class Gang:
    """Three workers of a rank each, asked by a Heartbeats whose clock is ours."""

    now: float = 1_000.0
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    asked: list[int] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    others: int = 0

    def __post_init__(self) -> None:
        pods = [read_pod(pod_item(worker)) for worker in range(3)]
        self.pods = [pod for pod in pods if pod is not None]
        self.heartbeats = HeartbeatCache(cast(JobStore, self), cast(PodCache, self), self.told.append)
        self.heartbeats._ask = self._answer  # type: ignore[method-assign]

    def of(self, uid: str) -> tuple[PodState, ...]:
        return tuple(self.pods)

    async def _answer(self, pod: PodState) -> bool:
        self.asked.append(pod.worker)
        if pod.worker in self.silent:
            return False
        beat = {
            "attempt": 1, "rank": pod.worker, "pid": 1, "phase": "step", "step": 4, "at": self.now,
            "progressedAt": self.now, "startedAt": 1.0, "limitSeconds": 15.0,
        }  # fmt: skip
        self.heartbeats._record_heartbeat(pod, beat | self.facts.get(pod.worker, {}))
        return True

    async def ask(self, job: CachedJob | None = None) -> list[int]:
        """Whom one turn asks, once it is due."""
        self.asked.clear()
        job = job or JOB
        due = self.heartbeats._is_due(job, time.monotonic())
        if due and (mine := self.heartbeats._pods_to_poll(job, time.monotonic())) is not None:
            await self.heartbeats._poll_gang(job, mine)
        return sorted(self.asked)

    def beats(self) -> list[Heartbeat]:
        return [beat for pod in self.pods for beat in self.heartbeats.of(pod)]


STATUS = JobStatus(phase=Phase.RUNNING, attempt=1, gang=GangStatus(wanted=3))


@dataclass
class _Job:
    uid: str = JOB_UID
    status: JobStatus = STATUS


JOB = cast(CachedJob, _Job())


@pytest.fixture
def gang(monkeypatch: pytest.MonkeyPatch) -> Gang:
    gang = Gang()
    monkeypatch.setattr(time, "monotonic", lambda: gang.now)
    monkeypatch.setattr(time, "time", lambda: gang.now)
    return gang


async def test_the_first_worker_is_asked_most_and_the_others_as_the_fleet_allows(gang: Gang) -> None:
    gang.heartbeats._others_seconds = 3 * POLL_RUNNING_SECONDS
    asked = []
    for _ in range(8):
        asked.append(await gang.ask())
        assert await gang.ask() == [], "not before it is due"
        gang.now += POLL_RUNNING_SECONDS
    assert asked == [[0], [0], [0], [0, 1, 2], [0], [0], [0, 1, 2], [0]]
    assert POLL_OTHERS_PER_SECOND * POLL_RUNNING_SECONDS >= 200, "a small fleet is asked whole, each time"


@pytest.mark.parametrize(
    ("facts", "silent"),
    [
        ({0: {"progressedAt": 900.0}}, set()),
        ({0: {"stopped": True}}, set()),
        ({}, {0}),
    ],
)
async def test_all_are_asked_when_something_is_wrong(
    gang: Gang, facts: dict[int, dict[str, Any]], silent: set[int]
) -> None:
    gang.heartbeats._others_seconds = 1_000.0
    await gang.ask()
    gang.told.clear()
    gang.facts, gang.silent = facts, silent
    gang.now += POLL_RUNNING_SECONDS
    assert await gang.ask() == [0, 1, 2]
    if facts:
        assert gang.told == [JOB_UID], "and the operator looks at once"
        gang.now += POLL_SUSPICIOUS_SECONDS
        assert await gang.ask() == [0, 1, 2]
        gang.facts = {}
        gang.now += POLL_SUSPICIOUS_SECONDS
        await gang.ask()
        gang.now += POLL_SUSPICIOUS_SECONDS
        assert await gang.ask() == [], "the alarm is over"


async def test_a_gang_is_asked_in_the_round_in_which_its_last_worker_comes_up(gang: Gang) -> None:
    job = cast(CachedJob, _Job(status=STATUS.model_copy(update={"phase": Phase.STARTING})))
    last = gang.pods.pop()
    assert await gang.ask(job) == [], "two of three wait for the third"
    gang.now += POLL_ROUND_SECONDS
    gang.pods.append(last)
    assert await gang.ask(job) == [0]


async def test_that_a_process_is_stopped_is_news_of_an_old_heartbeat(gang: Gang) -> None:
    gang.heartbeats._others_due[JOB_UID] = gang.now
    await gang.ask()
    then = gang.now
    gang.facts = {1: {"at": then, "stopped": True}}
    gang.now += POLL_RUNNING_SECONDS
    await gang.ask()
    beat = gang.beats()[1]
    assert (beat.stopped, beat.at) == (True, then)


async def test_a_worker_that_does_not_answer_no_longer_calls_a_process_stopped(gang: Gang) -> None:
    """A rank may be held for a moment, and its node cut off in just that moment: that is no rank that hangs."""
    gang.heartbeats._others_seconds, gang.heartbeats._others_due[JOB_UID] = 1_000.0, gang.now
    gang.facts = {1: {"stopped": True}}
    await gang.ask()
    assert gang.beats()[1].stopped
    gang.silent = {1}
    gang.now += POLL_RUNNING_SECONDS
    await gang.ask()
    assert not gang.beats()[1].stopped
