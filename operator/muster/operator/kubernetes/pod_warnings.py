"""Warnings of kubelets about pods that hang before their first container: a volume that can't be mounted, a network
that can't be made. A pod's status says nothing of them, so the events of such a pod are read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from muster.kube import paths
from muster.kube.client import ApiClient, Object
from muster.kube.timestamps import seconds_of
from muster.operator.kubernetes.jobs import CachedJob
from muster.operator.kubernetes.pods import PodState
from muster.operator.kubernetes.refusals import is_refusal
from muster.operator.pacing import WARNINGS_SECONDS
from muster.words.status import Phase

# Before these are done, the pod has no address.
_REASONS = frozenset({"FailedMount", "FailedMapVolume", "FailedAttachVolume", "FailedCreatePodSandBox"})
# A kubelet tries a volume anew after two minutes at most: a warning that is older than that beside another has passed.
_TRIES_SECONDS = 150.0


class PodWarnings:
    """The newest warning about the first hanging pod of each starting gang. The pods of a gang mount the same volumes,
    so one of them speaks for all.

    `enqueue` is called with the uid of a job whose pod has another warning. `on_error` is called with what could not be
    read and will be tried again, and the error.
    """

    def __init__(
        self, client: ApiClient, enqueue: Callable[[str], None], on_error: Callable[[str, Exception], None]
    ) -> None:
        self._client, self._enqueue, self._on_error = client, enqueue, on_error
        self._warnings: dict[str, tuple[str, str, bool]] = {}  # job uid → pod uid, trouble, whether it lasts
        self._looked: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def follow(self, job: CachedJob, pods: tuple[PodState, ...], now: float) -> None:
        """Read the events of a pod that hangs, every now and then. Returns at once."""
        first = _hanging(job, pods, now)
        if first is None:
            self.forget(job.uid)
        elif job.uid not in self._tasks and time.monotonic() - self._looked.get(job.uid, -1e9) >= WARNINGS_SECONDS:
            task = self._tasks[job.uid] = asyncio.create_task(self._look(job, first))
            task.add_done_callback(lambda _: self._tasks.pop(job.uid, None))

    def added_to(self, job: CachedJob, pods: tuple[PodState, ...]) -> tuple[PodState, ...]:
        """The pods, with what was read of the one that hangs."""
        uid, trouble, lasts = self._warnings.get(job.uid, ("", "", False))
        return tuple(
            replace(pod, trouble=trouble, refused=lasts) if pod.uid == uid and _may_hang(job, pod) else pod
            for pod in pods
        )

    def forget(self, uid: str) -> None:
        """The job is gone, or no pod of it hangs."""
        self._warnings.pop(uid, None)
        self._looked.pop(uid, None)

    async def _look(self, job: CachedJob, pod: PodState) -> None:
        self._looked[job.uid] = time.monotonic()
        try:
            page = await self._client.get(
                paths.core(pod.namespace, "events"), fieldSelector=f"involvedObject.uid={pod.uid},type=Warning"
            )
        except OSError as error:
            self._on_error(f"events of pod {pod.namespace}/{pod.name}", error)
            return
        warning = _newest(page.get("items") or ())
        before = self._warnings.get(job.uid)
        if warning is None or job.uid not in self._looked:  # the job went meanwhile
            self._warnings.pop(job.uid, None)
        else:
            reason, message = warning
            trouble = f"{reason}: {message}".rstrip(": ")
            self._warnings[job.uid] = pod.uid, trouble, is_refusal(reason, message)
        if self._warnings.get(job.uid) != before:
            self._enqueue(job.uid)


def _hanging(job: CachedJob, pods: tuple[PodState, ...], now: float) -> PodState | None:
    """Return the first pod of the gang that hangs for longer than a start takes."""
    candidates = [
        pod for pod in pods if _may_hang(job, pod) and now - (pod.scheduled_at or pod.created_at) >= WARNINGS_SECONDS
    ]
    return min(candidates, key=lambda pod: pod.worker, default=None)


def _may_hang(job: CachedJob, pod: PodState) -> bool:
    """Return whether it is on a node, yet without an address: its first container waits for volumes or a network."""
    starts = job.status.phase is Phase.STARTING and pod.id == job.status.current(pod.worker)
    return starts and bool(pod.node) and not (pod.ip or pod.over or pod.deleting or pod.trouble)


def _newest(events: Iterable[Object]) -> tuple[str, str] | None:
    """(reason, message) of the newest warning; of those that are repeated, one that lasts until the user acts."""
    warnings = sorted(
        ((_at(event), event["reason"], event.get("message") or "") for event in events if event["reason"] in _REASONS),
        reverse=True,
    )
    recent = [(reason, message) for at, reason, message in warnings if at >= warnings[0][0] - _TRIES_SECONDS]
    return next((each for each in recent if is_refusal(*each)), recent[0] if recent else None)


def _at(event: Object) -> float:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return max(seconds_of(each) for each in times)
