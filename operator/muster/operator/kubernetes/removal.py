"""Takes workers away: asked once, with the grace that the core gave.

One by one: a DELETE of a collection makes the API server look through all pods of the namespace to find eight, in etcd
itself where its cache lags, and then answers with every pod in full.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from muster.kube import paths
from muster.kube.client import Client
from muster.kube.errors import ApiError
from muster.operator.core.decision import RemoveWorker
from muster.operator.kubernetes.gangs.choice import release_pod
from muster.operator.kubernetes.pods import Pod, Pods
from muster.operator.pacing import REMOVE_AT_ONCE, REMOVE_REPEAT_SECONDS


@dataclass(slots=True)
class _Batch:
    workers: dict[int, float] = field(default_factory=dict)  # → grace, seconds


class Remover:
    """on_error: told of a deletion that failed; the core asks again."""

    def __init__(self, client: Client, pods: Pods, on_error: Callable[[str, Exception], None]) -> None:
        self._client, self._pods, self._on_error = client, pods, on_error
        self._batches: dict[tuple[str, int], _Batch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Semaphore(REMOVE_AT_ONCE)
        self._asked: dict[str, tuple[float, float]] = {}  # pod uid → (grace, when it was answered; infinite: not yet)
        self._swept_at = time.monotonic()

    def remove(self, uid: str, action: RemoveWorker) -> None:
        """Returns at once."""
        key = (uid, action.attempt)
        if key not in self._batches:
            self._batches[key] = _Batch()
            task = asyncio.create_task(self._flush(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._batches[key].workers[action.worker] = action.grace_seconds

    async def _flush(self, key: tuple[str, int]) -> None:
        await asyncio.sleep(0)  # let the rest of the gang be named
        if (now := time.monotonic()) - self._swept_at >= REMOVE_REPEAT_SECONDS:
            self._asked = {uid: told for uid, told in self._asked.items() if now - told[1] < REMOVE_REPEAT_SECONDS}
            self._swept_at = now
        workers = self._batches.pop(key).workers
        mine = [pod for pod in self._pods.of(key[0]) if pod.attempt == key[1] and not pod.gone]
        due = [pod for pod in mine if pod.worker in workers and self._is_due(pod, workers[pod.worker])]
        try:
            await asyncio.gather(*(self._remove_one(pod, workers[pod.worker]) for pod in due))
        except Exception as error:
            for pod in due:
                self._asked.pop(pod.uid, None)
            self._on_error(key[0], error)
        else:
            self._asked |= {pod.uid: (workers[pod.worker], time.monotonic()) for pod in due}

    def _is_due(self, pod: Pod, grace: float) -> bool:
        before = self._asked.get(pod.uid)
        if before is not None and before[0] <= grace and time.monotonic() - before[1] < REMOVE_REPEAT_SECONDS:
            return False
        self._asked[pod.uid] = (grace, math.inf)
        return True

    async def _remove_one(self, pod: Pod, grace: float) -> None:
        options = {"gracePeriodSeconds": int(grace), "preconditions": {"uid": pod.uid}}
        try:
            async with self._turn:
                await self._client.remove(paths.core(pod.namespace, "pods", pod.name), options)
            if not grace and not pod.over:  # by force: nobody is to hold on to it either
                await release_pod(self._client, pod)
        except ApiError as error:
            if error.status not in (404, 409):  # gone, or another pod has its name by now
                raise
