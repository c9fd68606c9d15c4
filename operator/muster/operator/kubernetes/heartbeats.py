"""Collection of running workers' state: the launcher of each answers with the heartbeats of its ranks.

They are pulled, not pushed: the operator that leads is the one that asks, workers need no address of it and no
permission, and the API server carries none of it (docs/decisions/0011). Worker 0 of a gang is asked most often, for its
ranks meet the others at every step; the others as often as the fleet's size allows, and all at once when something
looks wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pydantic import ValidationError
from pydantic_core import from_json

from muster.operator.core.conditions import change_key
from muster.operator.core.stalls import alarming
from muster.operator.kubernetes.jobs import CachedJob, JobStore
from muster.operator.kubernetes.pods import PodCache, PodState, gang_of
from muster.operator.kubernetes.render import REPORT_PORT
from muster.operator.pacing import (
    POLL_OTHERS_PER_SECOND,
    POLL_ROUND_SECONDS,
    POLL_RUNNING_SECONDS,
    POLL_STARTING_SECONDS,
    POLL_SUSPICIOUS_SECONDS,
    POLL_TIMEOUT_SECONDS,
    POLLS_AT_ONCE,
)
from muster.words.names import HEARTBEATS_PATH
from muster.words.signals import Heartbeat
from muster.words.status import Phase

ANSWER_BYTES_MAX = 4_000_000


@dataclass(frozen=True, slots=True)
class _ReceivedHeartbeat:
    """The newest heartbeat of a rank."""

    beat: Heartbeat  # its times are by our clock, because the worker's may be wrong
    written_at: float  # by the worker's own clock: a beat with another time is a new one


class HeartbeatCache:
    def __init__(self, jobs: JobStore, pods: PodCache, enqueue: Callable[[str], None], port: int = REPORT_PORT) -> None:
        self._jobs, self._pods, self._enqueue, self._port = jobs, pods, enqueue, port
        self._received: dict[str, dict[int, _ReceivedHeartbeat]] = {}  # pod uid → rank → newest
        self._due: dict[str, float] = {}  # job uid → when to ask again (monotonic)
        self._others_due: dict[str, float] = {}  # the same for all of its workers
        self._others_seconds = POLL_RUNNING_SECONDS
        self._asking: set[str] = set()
        self._turn = asyncio.Semaphore(POLLS_AT_ONCE)
        self._errors: dict[str, str] = {}  # pod uid → why it did not answer

    def of(self, pod: PodState) -> tuple[Heartbeat, ...]:
        """Return the heartbeats of the pod's ranks, in rank order, with times by our clock."""
        return tuple(entry.beat for _, entry in sorted(self._received.get(pod.uid, {}).items()))

    def trouble(self, pod: PodState) -> str:
        """Return why it did not answer the last request; empty if it did."""
        return self._errors.get(pod.uid, "")

    async def run(self) -> None:
        while True:
            now = time.monotonic()
            for uid in self._pods.jobs():
                job = self._jobs.get(uid)
                if job is None or not self._is_due(job, now) or (mine := self._pods_to_poll(job, now)) is None:
                    continue
                self._asking.add(job.uid)
                task = asyncio.create_task(self._poll_gang(job, mine))
                task.add_done_callback(lambda _, uid=job.uid: self._asking.discard(uid))  # type: ignore[misc]
            self._sweep()
            self._others_seconds = max(POLL_RUNNING_SECONDS, len(self._pods) / POLL_OTHERS_PER_SECOND)
            await asyncio.sleep(POLL_ROUND_SECONDS)

    def _is_due(self, job: CachedJob, now: float) -> bool:
        if job.status.phase not in (Phase.STARTING, Phase.RUNNING) or job.uid in self._asking:
            return False
        return now >= self._due.get(job.uid, 0.0)

    def _pods_to_poll(self, job: CachedJob, now: float) -> list[PodState] | None:
        """The gang, if there is anybody to ask."""
        mine = gang_of(self._pods.of(job.uid), job.status)
        running_phase = job.status.phase is Phase.RUNNING
        there = sum(1 for pod in mine if pod.running_since or pod.over)
        if not any(map(_answers, mine)) or (not running_phase and there < job.status.gang.wanted):
            return None  # whoever is there waits for the others and has nothing to tell; with the last it is due
        self._due[job.uid] = now + (POLL_RUNNING_SECONDS if running_phase else POLL_STARTING_SECONDS)
        return mine

    async def _poll_gang(self, job: CachedJob, mine: list[PodState]) -> None:
        running, now = sorted(filter(_answers, mine), key=lambda pod: pod.worker), time.monotonic()
        before = self._signs(mine)
        first, *others = running
        answers = [await self._ask(first)]
        if alarmed := any(self._alarm(mine)):
            self._due[job.uid] = now + POLL_SUSPICIOUS_SECONDS
        if not answers[0] or alarmed or now >= self._others_due.setdefault(job.uid, now + self._others_seconds):
            self._others_due[job.uid] = now + self._others_seconds
            answers += await asyncio.gather(*(self._ask(pod) for pod in others))
        for pod, answered in zip(running, answers, strict=False):
            if not answered:
                self._forget_stops(pod)
        if self._signs(mine) != before:
            self._enqueue(job.uid)

    def _alarm(self, pods: list[PodState]) -> tuple[bool, ...]:
        """Return whether the gang calls for a closer look. Of workers that are asked seldom, silence means nothing."""
        stopped = any(beat.stopped for pod in pods for beat in self.of(pod))
        first = min(pods, key=lambda pod: pod.worker)
        return stopped, *alarming(self.of(first), time.time())

    async def _ask(self, pod: PodState) -> bool:
        """Return whether it answered."""
        try:
            async with self._turn, asyncio.timeout(POLL_TIMEOUT_SECONDS):
                document = from_json(await _fetch(pod.ip, self._port))
            entries = document["heartbeats"] if document["jobUid"] == pod.job_uid else ()
        except (OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
            self._errors[pod.uid] = f"{type(error).__name__}: {error}"[:300]
            return False
        self._errors.pop(pod.uid, None)
        for entry in entries:
            self._record_heartbeat(pod, entry)
        return True

    def _forget_stops(self, pod: PodState) -> None:
        """Drop the report of a held process from a worker that no longer answers; it may have been brief."""
        heard = self._received.get(pod.uid, {})
        for rank, entry in heard.items():
            if entry.beat.stopped:
                heard[rank] = replace(entry, beat=entry.beat.model_copy(update={"stopped": False}))

    def _record_heartbeat(self, pod: PodState, entry: object) -> None:
        try:
            beat = Heartbeat.model_validate(entry)
        except ValidationError:
            return  # half a file, or words of another version: no news
        if (beat.attempt, beat.incarnation) != (pod.attempt, pod.incarnation):
            return
        heard = self._received.setdefault(pod.uid, {})
        previous = heard.get(beat.rank)
        if previous is None or previous.written_at != beat.at:
            heard[beat.rank] = _ReceivedHeartbeat(_by_clock_at(beat, time.time()), beat.at)
        elif previous.beat.stopped != beat.stopped:  # which is told of the process, not by it
            heard[beat.rank] = _ReceivedHeartbeat(_by_clock_at(beat, previous.beat.at), beat.at)

    def _signs(self, pods: list[PodState]) -> tuple[object, ...]:
        """Return the parts whose change matters; a mere step does not, but a long lack of steps does."""
        heard = (entry.beat for pod in pods for entry in self._received.get(pod.uid, {}).values())
        return self._alarm(pods), [change_key(beat) for beat in heard]

    def _sweep(self) -> None:
        if len(self._received) < len(self._pods) + 1024 and len(self._due) < 2 * len(self._jobs.uids()) + 1024:
            return
        here = {pod.uid for pod in self._pods.all()}
        self._received = {uid: heard for uid, heard in self._received.items() if uid in here}
        self._errors = {uid: error for uid, error in self._errors.items() if uid in here}
        self._due = {uid: due for uid, due in self._due.items() if self._jobs.get(uid) is not None}
        self._others_due = {uid: due for uid, due in self._others_due.items() if uid in self._due}


async def _fetch(host: str, port: int) -> bytes:
    """The body of one answer. An HTTP client costs three times as much, and there are many workers to ask."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {HEARTBEATS_PATH} HTTP/1.0\r\n\r\n".encode())
        answer = bytearray()
        while (part := await reader.read(ANSWER_BYTES_MAX)) and len(answer) < ANSWER_BYTES_MAX:
            answer += part
        return bytes(answer.partition(b"\r\n\r\n")[2])
    finally:
        writer.close()


def _answers(pod: PodState) -> bool:
    return bool(pod.running_since and pod.ip and not pod.over)


def _by_clock_at(beat: Heartbeat, at: float) -> Heartbeat:
    """Return the heartbeat as if it was written at that time."""
    progressed_at = min(at, beat.progressed_at + at - beat.at)
    return beat.model_copy(update={"at": at, "progressed_at": progressed_at})
