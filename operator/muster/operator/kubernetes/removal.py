"""Takes workers away: asked once, with the grace that the core gave.

What lives is deleted pod by pod, all at the same time and each by its own uid. A gang that has ended as a whole is
swept by one deletion of a collection: its pods are named by job, attempt and phase, so none that lives is among them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from muster.kube import paths
from muster.kube.client import ApiClient
from muster.kube.errors import ApiError
from muster.operator.core.decision import RemoveWorker
from muster.operator.kubernetes.gangs.choice import release_pod
from muster.operator.kubernetes.pods import PodCache, PodState
from muster.operator.pacing import REMOVE_AT_ONCE, REMOVE_REPEAT_SECONDS
from muster.words.names import Label, WorkerId

# A pod of one of these phases is not over.
_ENDED = "status.phase!=Pending,status.phase!=Running,status.phase!=Unknown"


@dataclass(slots=True)
class _RemovalBatch:
    workers: dict[WorkerId, float] = field(default_factory=dict)  # → grace, seconds


class PodRemover:
    """Remover of workers' pods. `on_error` is called with each deletion that failed; the core asks for it again."""

    def __init__(self, client: ApiClient, pods: PodCache, on_error: Callable[[str, Exception], None]) -> None:
        self._client, self._pods, self._on_error = client, pods, on_error
        self._batches: dict[tuple[str, int], _RemovalBatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Semaphore(REMOVE_AT_ONCE)
        self._asked: dict[str, tuple[float, float]] = {}  # pod uid → (grace, when it was answered; infinite: not yet)
        self._swept_at = time.monotonic()

    def remove(self, uid: str, action: RemoveWorker) -> None:
        """Returns at once."""
        key = (uid, action.id.attempt)
        if key not in self._batches:
            self._batches[key] = _RemovalBatch()
            task = asyncio.create_task(self._flush(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._batches[key].workers[action.id] = action.grace_seconds

    async def _flush(self, key: tuple[str, int]) -> None:
        await asyncio.sleep(0)  # let the rest of the gang be named
        if (now := time.monotonic()) - self._swept_at >= REMOVE_REPEAT_SECONDS:
            self._asked = {
                uid: request for uid, request in self._asked.items() if now - request[1] < REMOVE_REPEAT_SECONDS
            }
            self._swept_at = now
        workers = self._batches.pop(key).workers
        mine = [pod for pod in self._pods.of(key[0]) if pod.attempt == key[1] and not pod.gone]
        due = [pod for pod in mine if pod.id in workers and self._is_due(pod, workers[pod.id])]
        try:
            if len(due) > 1 and due == mine and all(pod.over for pod in due):
                await self._sweep(due)
            else:
                await asyncio.gather(*(self._remove_one(pod, workers[pod.id]) for pod in due))
        except Exception as error:
            for pod in due:
                self._asked.pop(pod.uid, None)
            self._on_error(key[0], error)
        else:
            self._asked |= {pod.uid: (workers[pod.id], time.monotonic()) for pod in due}

    def _is_due(self, pod: PodState, grace: float) -> bool:
        before = self._asked.get(pod.uid)
        if before is not None and before[0] <= grace and time.monotonic() - before[1] < REMOVE_REPEAT_SECONDS:
            return False
        self._asked[pod.uid] = (grace, math.inf)
        return True

    async def _sweep(self, pods: list[PodState]) -> None:
        """Delete a gang that has ended, by what the API server's cache knows once it is as new as what we saw: to ask
        for the newest state would have it read every pod of the namespace from etcd when it is busy.
        """
        await self._client.delete_all(
            paths.core(pods[0].namespace, "pods"),
            labelSelector=f"{Label.JOB_UID}={pods[0].job_uid},{Label.ATTEMPT}={pods[0].attempt}",
            fieldSelector=_ENDED,
            resourceVersion=str(max(pod.version for pod in pods)),
            resourceVersionMatch="NotOlderThan",
        )

    async def _remove_one(self, pod: PodState, grace: float) -> None:
        options = {"gracePeriodSeconds": int(grace), "preconditions": {"uid": pod.uid}}
        try:
            async with self._turn:
                await self._client.remove(paths.core(pod.namespace, "pods", pod.name), options)
            if not grace and not pod.over:  # by force: nobody is to hold on to it either
                await release_pod(self._client, pod)
        except ApiError as error:
            if error.status not in (404, 409):  # gone, or another pod has its name by now
                raise
