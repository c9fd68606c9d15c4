"""Choice of a job's gang scheduler, the state of its group there, and its removal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from muster.kube import paths
from muster.kube.client import STRATEGIC, ApiClient, Object
from muster.kube.errors import ApiError
from muster.operator.kubernetes.gangs import kueue, workload
from muster.operator.kubernetes.gangs.builtin import BuiltinScheduler
from muster.operator.kubernetes.gangs.coscheduling import CoschedulingPlugin
from muster.operator.kubernetes.gangs.kai import KaiScheduler
from muster.operator.kubernetes.gangs.kueue import KueueScheduler
from muster.operator.kubernetes.gangs.protocol import GangRef, GangScheduler, MisnamedObject, UnservedApi
from muster.operator.kubernetes.gangs.volcano import VolcanoScheduler
from muster.operator.kubernetes.gangs.workload import WorkloadGang
from muster.operator.kubernetes.jobs import CachedJob
from muster.operator.kubernetes.pods import PodState
from muster.operator.kubernetes.render import owner_reference
from muster.operator.pacing import APIS_SECONDS, GROUP_RUNNING_SECONDS, GROUP_WAITING_SECONDS
from muster.words.status import Phase

_HOLDING = frozenset({Phase.STARTING, Phase.RUNNING, Phase.RESTARTING, Phase.STOPPING})


class GangSchedulers:
    """The adapter to each gang scheduler, and the groups that the schedulers keep for the jobs.

    `enqueue` is called with the uid of a job whose group changed. `on_error` is called with what failed and will be
    tried again, and the error.
    """

    def __init__(
        self, client: ApiClient, enqueue: Callable[[str], None], on_error: Callable[[str, Exception], None]
    ) -> None:
        self._client, self._enqueue, self._on_error = client, enqueue, on_error
        self._versions: tuple[str | None, str | None] = (None, None)  # of Kueue's and of Kubernetes' Workload
        self._gangs: dict[str, GangScheduler] = all_gangs(None, None)
        self._groups: dict[str, Object] = {}
        self._looked: dict[str, float] = {}
        self._released: dict[str, int] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.claims_served = False

    async def detect(self) -> bool:
        """Find out which versions of the schedulers' APIs are served, and whether devices can be claimed; whether that
        has changed.
        """
        before = (self.claims_served, self._versions)
        served = {group["name"]: group for group in (await self._client.get("/apis"))["groups"]}
        devices = served.get("resource.k8s.io") or {"versions": []}
        self.claims_served = any(version["version"] == "v1" for version in devices["versions"])
        self._versions = (
            await self._newest(served.get(kueue.API_GROUP), kueue.VERSIONS),
            await self._newest(served.get(workload.API_GROUP), workload.VERSIONS),
        )
        self._gangs = all_gangs(*self._versions)
        return before != (self.claims_served, self._versions)

    async def follow_apis(self, changed: Callable[[], None]) -> None:
        """Run forever, and call `changed` whenever the served APIs have changed: they may be installed after us."""
        while True:
            await asyncio.sleep(APIS_SECONDS)
            try:
                if await self.detect():
                    changed()
            except OSError as error:
                self._on_error("served APIs", error)

    def of(self, job: CachedJob) -> GangScheduler:
        return self._gangs[job.spec.gang.scheduler.kind]

    def group(self, job: CachedJob) -> Object | None:
        """The group's object as last seen."""
        return self._groups.get(job.uid)

    def follow(self, job: CachedJob, pods: tuple[PodState, ...]) -> None:
        """Keep an eye on the job's group while it has one; clear away what is left of it when the nodes are given back.
        Returns at once.
        """
        gang = self.of(job)
        if gang.places or job.uid in self._tasks:
            return
        if job.status.phase in _HOLDING:
            pause = GROUP_RUNNING_SECONDS if job.status.phase is Phase.RUNNING else GROUP_WAITING_SECONDS
            if time.monotonic() - self._looked.get(job.uid, -1e9) >= pause:
                self._start(job, self._look(job, gang))
        elif job.status.attempt and self._released.get(job.uid) != job.status.reservation:
            self._start(job, self._clear(job, gang, pods))

    def forget(self, uid: str) -> None:
        for cache in (self._groups, self._looked, self._released):
            cache.pop(uid, None)

    def _start(self, job: CachedJob, work: object) -> None:
        assert asyncio.iscoroutine(work), "we made it"
        task = self._tasks[job.uid] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(job.uid, None))

    async def _look(self, job: CachedJob, gang: GangScheduler) -> None:
        self._looked[job.uid] = time.monotonic()
        try:
            path = gang.status_path(gang_ref(job))
            group = await self._client.get(path) if path else None
        except (UnservedApi, MisnamedObject):
            return
        except OSError as error:
            if not isinstance(error, ApiError) or error.status != 404:
                self._on_error(f"group of {job.namespace}/{job.name}", error)
                return
            group = None
        before = self._groups.get(job.uid)
        if group is None:
            self._groups.pop(job.uid, None)
        else:
            self._groups[job.uid] = group
        if _version(before) != _version(group):
            self._enqueue(job.uid)

    async def _clear(self, job: CachedJob, gang: GangScheduler, pods: tuple[PodState, ...]) -> None:
        """The groups of reservations before this one: nobody can use them any more."""
        self._groups.pop(job.uid, None)
        try:
            for back in (1, 2):  # ending for good voids two numbers: its own, and that of an offer to grow
                for path in gang.remains(replace(gang_ref(job), reservation=job.status.reservation - back)):
                    await self._delete(path)
            for pod in pods:
                if pod.gone:
                    await release_pod(self._client, pod)
        except OSError as error:
            self._on_error(f"remains of {job.namespace}/{job.name}", error)
            self._enqueue(job.uid)
            return
        self._released[job.uid] = job.status.reservation

    async def _delete(self, path: str) -> None:
        try:
            await self._client.delete(path)
        except ApiError as error:
            if error.status != 404:
                raise

    async def _newest(self, group: Object | None, versions: tuple[str, ...]) -> str | None:
        """Return the newest of the known versions that is served with Workloads."""
        served = {version["version"] for version in (group or {}).get("versions") or ()}
        for version in versions:
            if version in served and group is not None:
                listed = await self._client.get(f"/apis/{group['name']}/{version}")
                if any(resource["name"] == "workloads" for resource in listed.get("resources") or ()):
                    return version
        return None


def all_gangs(kueue_version: str | None, workload_version: str | None) -> dict[str, GangScheduler]:
    gangs: tuple[GangScheduler, ...] = (
        BuiltinScheduler(),
        KueueScheduler(kueue_version),
        CoschedulingPlugin(),
        VolcanoScheduler(),
        KaiScheduler(),
        WorkloadGang(workload_version),
    )
    return {gang.kind: gang for gang in gangs}


async def release_pod(client: ApiClient, pod: PodState) -> None:
    """A pod that has ended, or whose node was given up, is kept only by Kueue's finalizer: take that away."""
    change = {"metadata": {"$deleteFromPrimitiveList/finalizers": [kueue.FINALIZER]}}
    try:
        await client.patch(paths.core(pod.namespace, "pods", pod.name), change, STRATEGIC)
    except ApiError as error:
        if error.status != 404:
            raise


def gang_ref(job: CachedJob) -> GangRef:
    """The gang of the job's current attempt."""
    return GangRef(
        namespace=job.namespace,
        job=job.name,
        job_uid=job.uid,
        attempt=job.status.attempt,
        reservation=job.status.reservation,
        size=job.status.gang.wanted,
        spec=job.spec,
        queue=job.spec.gang.scheduler.queue or job.queue,
        owner=owner_reference(job),
    )


def _version(group: Object | None) -> str:
    return str(group["metadata"]["resourceVersion"]) if group else ""
