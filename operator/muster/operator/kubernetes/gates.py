"""All or nothing: pods of a gang that is not whole yet hold no node.

A gang that could be made only in part is taken back at once. It is then made anew behind a scheduling gate, which is
lifted when the last pod exists; one that nobody refuses needs no gate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from muster.kube import paths
from muster.kube.client import STRATEGIC, ApiClient
from muster.operator.kubernetes.jobs import CachedJob
from muster.operator.kubernetes.pods import PodCache, PodState, gang_of, read_pod
from muster.operator.pacing import CAREFUL_SECONDS
from muster.words.status import Phase

TAKE_BACK_SECONDS = 5.0  # grace of a pod that is taken back; it has not met the others, so there is nothing to commit
TAKEN_BACK = "taken back until the whole gang can be made"


class SchedulingGates:
    """Takes back the pods of gangs that could be made only in part, and lifts the gates of gangs that are whole.

    `enqueue` is called with the uid of a job whose gate could not be lifted.
    """

    def __init__(self, client: ApiClient, pods: PodCache, enqueue: Callable[[str], None]) -> None:
        self._client, self._pods, self._enqueue = client, pods, enqueue
        self._lifting: set[tuple[str, int]] = set()  # (job uid, attempt)
        self._careful: dict[str, float] = {}  # namespace → until when (monotonic)
        # Job uid → uids of pods that we deleted ourselves, kept as long as the job: a list may be older than a pod.
        self._taken_back: dict[str, set[str]] = {}

    def careful(self, namespace: str) -> bool:
        """Return whether a pod of that namespace was refused lately, so that the next gang starts behind its gate."""
        return time.monotonic() < self._careful.get(namespace, 0.0)

    def taken_back(self, uid: str) -> set[str]:
        """Return the uids of the job's pods that we deleted ourselves."""
        return self._taken_back.get(uid, set())

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._taken_back.pop(uid, None)

    def as_made(self, job: CachedJob, pods: tuple[PodState, ...]) -> tuple[PodState, ...]:
        """The pods as the core should see them: one that was taken back waits for its like; it is no failure."""
        taken = self._taken_back.get(job.uid)
        if not taken or job.status.phase is not Phase.STARTING:
            return pods
        return tuple(
            replace(pod, deleting=False, over=False, end=None, running_since=0.0, disruption="", trouble=TAKEN_BACK)
            if pod.uid in taken and not pod.gone
            else pod
            for pod in pods
        )

    def reconcile(self, job: CachedJob, pods: tuple[PodState, ...], gate: str) -> None:
        """Lift the gates of a gang that is complete, if an operator died between making the last pod and doing so."""
        key = (job.uid, job.status.attempt)
        mine = [pod for pod in gang_of(pods, job.status) if not pod.gone]
        if key not in self._lifting and len(mine) == job.status.gang.wanted and any(gate in pod.gates for pod in mine):
            self._lifting.add(key)
            task = asyncio.create_task(self.lift(job, tuple(mine), gate))
            task.add_done_callback(lambda _: self._lifting.discard(key))

    async def take_back(self, job: CachedJob, pods: list[PodState]) -> None:
        """Others of the gang were refused: these must not hold their nodes. What fails is done at the next try."""
        self._careful[job.namespace] = time.monotonic() + CAREFUL_SECONDS

        async def take(pod: PodState) -> None:
            options = {"gracePeriodSeconds": int(TAKE_BACK_SECONDS), "preconditions": {"uid": pod.uid}}
            self._taken_back.setdefault(job.uid, set()).add(pod.uid)
            item = await self._client.delete(paths.core(pod.namespace, "pods", pod.name), options)
            left = read_pod(item)
            if left is not None and any(cached.uid == left.uid for cached in self._pods.of(job.uid)):
                self._pods.keep(left)  # else the watch was quicker than the answer, and has seen it go

        gated = (pod for pod in pods if not pod.deleting and job.status.gang.wanted > 1)
        await asyncio.gather(*(take(pod) for pod in gated), return_exceptions=True)

    async def lift(self, job: CachedJob, pods: tuple[PodState, ...], gate: str) -> None:
        """Lift the gates of a gang that exists completely, so that it is scheduled. Idempotent; what fails is repeated
        in the next pass."""
        change = {"spec": {"schedulingGates": [{"name": gate, "$patch": "delete"}]}}

        async def lift(pod: PodState) -> None:
            item = await self._client.patch(paths.core(pod.namespace, "pods", pod.name), change, STRATEGIC)
            if (lifted := read_pod(item)) is not None:
                self._pods.keep(lifted)

        gated = (pod for pod in pods if gate in pod.gates)
        for error in await asyncio.gather(*(lift(pod) for pod in gated), return_exceptions=True):
            if isinstance(error, BaseException):
                self._enqueue(job.uid)
