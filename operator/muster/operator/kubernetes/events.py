"""Kubernetes Events of a job: `kubectl describe tj` and `kubectl events` show them. They are written at once while few
jobs have news. In a burst an event waits for its turn, bad news before good, and what happened to its job meanwhile is
written in the same one: nothing is left out, and the API server stays free for what gangs wait for.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass

from muster.kube import paths, timestamps
from muster.kube.client import ApiClient, Object
from muster.operator.core.codes import GIVEN_UP, OF_CAUSE, Code
from muster.operator.core.conditions import TRAINING_CONDITIONS
from muster.operator.core.decision import JobDecision
from muster.operator.core.observed import ObservedJob
from muster.operator.kubernetes.jobs import CachedJob
from muster.operator.pacing import EVENT_WRITES_BURST, EVENT_WRITES_PER_SECOND
from muster.operator.runner import RunnerListener
from muster.words.names import GROUP, KIND, VERSION
from muster.words.status import JobStatus, Phase

NOTE_LENGTH_MAX = 1_024  # the API's own limit
_API = "events.k8s.io/v1"
_BAD = frozenset({*OF_CAUSE.values(), *GIVEN_UP, Code.DEADLINE_EXCEEDED, Code.WORKERS_REJECTED}) - {
    Code.PREEMPTED,
    Code.EVICTED,
}
# On the way to the next phase, and told by it.
_PASSING = frozenset({Phase.STOPPING})


@dataclass(frozen=True, slots=True)
class _PendingEvent:
    """Something that happened to a job, to be reported in an event."""

    job: ObservedJob | CachedJob
    reason: str
    note: str
    bad: bool  # whether the event is a Warning instead of a Normal one
    at: str  # RFC 3339


class EventWriter(RunnerListener):
    """Writer of events about jobs. `instance` is this operator's name, under which it reports them."""

    def __init__(self, client: ApiClient, instance: str) -> None:
        self._client, self._instance = client, instance
        self._waiting: dict[str, list[_PendingEvent]] = {}  # by job's uid, who waits the longest first
        self._urgent: dict[str, None] = {}  # uids of jobs to which something bad happened, likewise
        self._news = asyncio.Event()
        self._numbers = itertools.count()
        self._left: set[str] = set()  # jobs of a newer Muster, told once each

    def decided(self, seen: ObservedJob, decision: JobDecision) -> None:
        """Report by an event that the status is left to a newer Muster, since the status can't say so."""
        if decision.code == Code.NEWER_STATUS and seen.uid not in self._left:
            self._left.add(seen.uid)
            self.tell(seen, decision.code, decision.because, bad=True)

    def wrote(self, seen: ObservedJob, decision: JobDecision) -> None:
        if _is_event(seen.status, decision.status):
            self.tell(seen, decision.status.code, decision.status.because, decision.status.code in _BAD)

        conditions = {condition.type: condition for condition in seen.status.conditions}
        for condition in decision.status.conditions:
            old = conditions.get(condition.type)
            news = old is None or (old.status, old.message) != (condition.status, condition.message)
            if condition.type in TRAINING_CONDITIONS and news and condition.reason != "NotTraining":
                self.tell(seen, condition.reason, condition.message, condition.status == "True")

    def refused(self, job: CachedJob, reason: str, note: str) -> None:
        """A job that the core never sees, because its spec can't run."""
        self.tell(job, reason, note, bad=True)

    def tell(self, seen: ObservedJob | CachedJob, reason: str, note: str, bad: bool = False) -> None:
        self._waiting.setdefault(seen.uid, []).append(_PendingEvent(seen, reason, note, bad, timestamps.now_micro()))
        if bad:
            self._urgent[seen.uid] = None
        self._news.set()

    async def run(self) -> None:
        budget, refilled_at = float(EVENT_WRITES_BURST), time.monotonic()
        while True:
            await self._news.wait()
            now = time.monotonic()
            budget, refilled_at = min(EVENT_WRITES_BURST, budget + (now - refilled_at) * EVENT_WRITES_PER_SECOND), now
            if budget < 1:
                await asyncio.sleep((1 - budget) / EVENT_WRITES_PER_SECOND)
                continue
            budget -= 1
            body = self._body(self._next())
            try:
                await self._client.create(paths.group(_API, body["metadata"]["namespace"], "events"), body)
            except OSError:
                continue  # its namespace may be going away

    def _next(self) -> list[_PendingEvent]:
        """Return the events of the job that waits longest, bad news first, as many as one event object holds."""
        uid = next(iter(self._urgent or self._waiting))
        self._urgent.pop(uid, None)
        waiting = self._waiting.pop(uid)
        count = next((n for n in range(len(waiting), 1, -1) if len(_text_of(waiting[:n])) <= NOTE_LENGTH_MAX), 1)
        if waiting[count:]:
            self._waiting[uid] = waiting[count:]  # and to the end of the line
        elif not self._waiting:
            self._news.clear()
        return waiting[:count]

    def _body(self, pending: list[_PendingEvent]) -> Object:
        """The last of them gives the reason, or the last that is bad."""
        job = pending[-1].job
        reason = next((each.reason for each in reversed(pending) if each.bad), pending[-1].reason)
        return {
            "apiVersion": _API,
            "kind": "Event",
            "metadata": {
                "name": f"{job.name}.{time.time_ns():x}{next(self._numbers) % 0x1000:03x}",
                "namespace": job.namespace,
            },
            "regarding": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": job.name,
                "namespace": job.namespace,
                "uid": job.uid,
            },
            "reason": reason,
            "action": "Reconcile",
            "type": "Warning" if any(each.bad for each in pending) else "Normal",
            "note": _text_of(pending)[:NOTE_LENGTH_MAX],
            "eventTime": pending[-1].at,
            "reportingController": f"{GROUP}/operator",
            "reportingInstance": self._instance[:128],
        }


def _text_of(pending: list[_PendingEvent]) -> str:
    """Return the note; of several events, with the reason and the time before each."""
    if len(pending) == 1:
        return pending[0].note
    return "; ".join(f"{each.at[11:19]} {each.reason}: {each.note}" for each in pending)


def _is_event(before: JobStatus, after: JobStatus) -> bool:
    if before.phase != after.phase:
        return after.phase not in _PASSING
    if before.code != after.code and after.code in (Code.STALLING, Code.WOULD_RESTART):
        return True
    return before.last_failure != after.last_failure and after.last_failure is not None
