"""Creation of an attempt's pods, all of them at once or none.

The core asks worker by worker; requests are gathered, so that a gang of 512 is not made one round trip after another.
What the API server refuses (a quota, a missing service account) is tried again, and reported until it works or the core
takes the order back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from muster.kube.client import ApiClient
from muster.operator.core.decision import CreateWorker
from muster.operator.core.observed import Rejection
from muster.operator.kubernetes.gangs.choice import gang_ref
from muster.operator.kubernetes.gangs.protocol import GangScheduler, MisnamedObject
from muster.operator.kubernetes.gates import TAKEN_BACK, SchedulingGates
from muster.operator.kubernetes.jobs import CachedJob, JobStore
from muster.operator.kubernetes.making import PodMaker
from muster.operator.kubernetes.pods import PodCache, PodState, gang_of
from muster.operator.kubernetes.preparation import JobPreparation
from muster.operator.kubernetes.rejections import WorkerRejection, rejected
from muster.operator.kubernetes.render import (
    SiteSettings,
    UnrenderableJob,
)
from muster.operator.pacing import (
    CREATE_RETRY_SECONDS,
    CREATE_RETRY_SECONDS_MAX,
)
from muster.words.names import WorkerId
from muster.words.status import Phase

Attempt = tuple[str, int]  # job uid, attempt


@dataclass(slots=True)
class _CreationOrder:
    """The workers of one attempt that should exist, and those of them that do not."""

    workers: dict[WorkerId, CreateWorker] = field(default_factory=dict)
    rejected: dict[WorkerId, WorkerRejection] = field(default_factory=dict)  # why a worker does not exist yet

    def reject(self, rejected: dict[WorkerId, WorkerRejection]) -> None:
        """Replace the rejected workers."""
        self.rejected = {id: entry.first_seen(self.rejected.get(id)) for id, entry in rejected.items()}


@dataclass(frozen=True, slots=True)
class RejectedWorker:
    """A worker that should exist and does not."""

    id: WorkerId
    node: str
    rejected: WorkerRejection


class WorkerCreator:
    """Creator of the workers that the core orders, with all other objects that they need.

    `gang_of` returns the adapter to a job's scheduler. `instance_type` returns that of a node by its name; empty if it
    is not known. `enqueue` is called with the uid of a job that changed. `enqueue_later` is called instead where
    further changes of the job are expected, so that one look sees them together.
    """

    def __init__(
        self,
        client: ApiClient,
        jobs: JobStore,
        pods: PodCache,
        site: SiteSettings,
        gang_of: Callable[[CachedJob], GangScheduler],
        instance_type: Callable[[str], str],
        enqueue: Callable[[str], None],
        enqueue_later: Callable[[str], None],
    ) -> None:
        self._jobs, self._pods, self._gang_of = jobs, pods, gang_of
        self._enqueue, self._enqueue_later = enqueue, enqueue_later
        self._preparation = JobPreparation(client, site)
        self._maker = PodMaker(client, pods, site, instance_type)
        self.gates = SchedulingGates(client, pods, enqueue)
        self._orders: dict[Attempt, _CreationOrder] = {}
        self._ordered: dict[str, set[int]] = {}  # job uid → attempts
        self._tasks: dict[Attempt, asyncio.Task[None]] = {}

    def order(self, uid: str, action: CreateWorker) -> None:
        """Order the workers' creation. Returns at once."""
        key = (uid, action.id.attempt)
        order = self._orders.setdefault(key, _CreationOrder())
        self._ordered.setdefault(uid, set()).add(action.id.attempt)
        order.workers.setdefault(action.id, action)
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._carry_out(key), name=f"create {uid}/{action.id.attempt}")

    def cancel(self, uid: str, id: WorkerId) -> None:
        order = self._orders.get((uid, id.attempt))
        if order is not None:
            order.workers.pop(id, None)
            order.rejected.pop(id, None)

    def rejected(self, uid: str) -> tuple[RejectedWorker, ...]:
        return tuple(
            RejectedWorker(id, order.workers[id].node, entry)
            for attempt in self._ordered.get(uid, ())
            if (order := self._orders.get((uid, attempt))) is not None
            for id, entry in order.rejected.items()
            if id in order.workers
        )

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._preparation.forget(uid)
        self.gates.forget(uid)

    def reconcile(self, job: CachedJob, pods: tuple[PodState, ...]) -> None:
        """Continue where an operator died between creating the last pod of a gang and lifting its gates."""
        gate = self._gang_of(job).gate
        if gate is not None and job.status.phase is Phase.STARTING and (job.uid, job.status.attempt) not in self._tasks:
            self.gates.reconcile(job, pods, gate)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, key: Attempt) -> None:
        """Create the workers until all exist, or nobody wants them any more."""
        await asyncio.sleep(0)  # let the rest of the gang be asked for
        pause = CREATE_RETRY_SECONDS
        try:
            while (order := self._orders[key]).workers:
                job = self._jobs.get(key[0])
                if job is None or (job.status.attempt, job.status.phase) != (key[1], Phase.STARTING):
                    return
                await self._make(job, order)
                if not order.rejected:
                    return
                self._enqueue(key[0])
                await asyncio.sleep(pause)
                pause = min(CREATE_RETRY_SECONDS_MAX, 2 * pause)
        finally:
            self._orders.pop(key, None)
            self._tasks.pop(key, None)
            if not (left := self._ordered.get(key[0], set()) - {key[1]}):
                self._ordered.pop(key[0], None)
            else:
                self._ordered[key[0]] = left
            self._enqueue_later(key[0])  # its pods will come up, which is news

    async def _make(self, job: CachedJob, order: _CreationOrder) -> None:
        gang = self._gang_of(job)
        workers = dict(order.workers)
        try:
            ref = gang_ref(job)
            await self._preparation.prepare(job, gang, ref)
        except (OSError, MisnamedObject, UnrenderableJob) as error:
            order.reject(dict.fromkeys(workers, rejected(error, time.time())))
            return
        # What is there is not made again: even a refused request counts against a quota for a while.
        made = {pod.id: pod for pod in gang_of(self._pods.of(job.uid), job.status) if not pod.gone}
        absent = [action for id, action in workers.items() if id not in made]
        gate = gang.gate if self.gates.careful(job.namespace) and ref.size > 1 else None
        results = await asyncio.gather(*(self._maker.make(job, gang, ref, action, gate) for action in absent))
        answers = {action.id: result for action, result in zip(absent, results, strict=True)}
        made |= {id: pod for id, pod in answers.items() if isinstance(pod, PodState)}
        taken = self.gates.taken_back(job.uid)
        back = WorkerRejection(Rejection.TEMPORARY, TAKEN_BACK, time.time())
        order.reject(
            {id: entry for id, entry in answers.items() if isinstance(entry, WorkerRejection)}
            | {id: back for id, pod in made.items() if pod.uid in taken}
        )
        if gang.gate is None:
            return
        if any(isinstance(entry, WorkerRejection) and entry.answered for entry in answers.values()):
            await self.gates.take_back(job, [pod for pod in made.values() if gang.gate not in pod.gates])
        elif not order.rejected and len(made) == job.status.gang.wanted:
            await self.gates.lift(job, tuple(made.values()), gang.gate)
