"""What happened to a job, as Kubernetes Events: `kubectl describe tj` and `kubectl events` tell the story.

Best effort, from a queue that drops rather than waits: the status is the truth, and its writes come first.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from datetime import UTC, datetime

from muster.contract.names import GROUP, KIND, VERSION
from muster.contract.status import JobStatus, Phase
from muster.kube import paths
from muster.kube.client import Client, Object
from muster.operator.core.codes import GIVEN_UP, OF_CAUSE, Code
from muster.operator.core.conditions import TRAINING_CONDITIONS
from muster.operator.core.decision import Decision
from muster.operator.core.observed import Observed
from muster.operator.runner import Listener

QUEUED_MAX = 1_000
NOTE_LENGTH_MAX = 1_024  # the API's own limit
_API = "events.k8s.io/v1"
_BAD = frozenset({*OF_CAUSE.values(), *GIVEN_UP, Code.DEADLINE_EXCEEDED, Code.WORKERS_REJECTED}) - {
    Code.PREEMPTED,
    Code.EVICTED,
}
# On the way to the next phase, and told by it.
_PASSING = frozenset({Phase.STOPPING})


class Events(Listener):
    """instance: this operator's name."""

    def __init__(self, client: Client, instance: str) -> None:
        self._client, self._instance = client, instance
        self._queue: asyncio.Queue[Object] = asyncio.Queue(QUEUED_MAX)
        self._numbers = itertools.count()
        self._left: set[str] = set()  # jobs of a newer Muster, told once each

    def decided(self, seen: Observed, decision: Decision) -> None:
        """Where the status is left to a newer Muster, nothing but an event can say so."""
        if decision.code == Code.NEWER_STATUS and seen.uid not in self._left:
            self._left.add(seen.uid)
            self.tell(seen, decision.code, decision.because, bad=True)

    def wrote(self, seen: Observed, decision: Decision) -> None:
        if _is_told(seen.status, decision.status):
            self.tell(seen, decision.status.code, decision.status.because, decision.status.code in _BAD)

        known = {condition.type: condition for condition in seen.status.conditions}
        for condition in decision.status.conditions:
            old = known.get(condition.type)
            news = old is None or (old.status, old.message) != (condition.status, condition.message)
            if condition.type in TRAINING_CONDITIONS and news and condition.reason != "NotTraining":
                self.tell(seen, condition.reason, condition.message, condition.status == "True")

    def tell(self, seen: Observed, reason: str, note: str, bad: bool = False) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        body = {
            "apiVersion": _API,
            "kind": "Event",
            "metadata": {
                "name": f"{seen.name}.{time.time_ns():x}{next(self._numbers) % 0x1000:03x}",
                "namespace": seen.namespace,
            },
            "regarding": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": seen.name,
                "namespace": seen.namespace,
                "uid": seen.uid,
            },
            "reason": reason,
            "action": "Reconcile",
            "type": "Warning" if bad else "Normal",
            "note": note[:NOTE_LENGTH_MAX],
            "eventTime": now,
            "reportingController": f"{GROUP}/operator",
            "reportingInstance": self._instance[:128],
        }
        try:
            self._queue.put_nowait(body)
        except asyncio.QueueFull:
            pass

    async def run(self) -> None:
        while True:
            body = await self._queue.get()
            try:
                await self._client.create(paths.group(_API, body["metadata"]["namespace"], "events"), body)
            except OSError:
                continue  # its namespace may be going away


def _is_told(before: JobStatus, after: JobStatus) -> bool:
    if before.phase != after.phase:
        return after.phase not in _PASSING
    if before.code != after.code and after.code in (Code.STALLING, Code.WOULD_RESTART):
        return True
    return before.last_failure != after.last_failure and after.last_failure is not None
