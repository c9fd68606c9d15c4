"""One pod of a gang: rendered, made, and found again where an answer was lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from muster.kube import paths
from muster.kube.client import METADATA, ApiClient, Object
from muster.kube.errors import ApiError
from muster.operator.core.decision import CreateWorker
from muster.operator.kubernetes.gangs.protocol import GangRef, GangScheduler
from muster.operator.kubernetes.jobs import CachedJob
from muster.operator.kubernetes.pods import PodCache, PodState, read_pod
from muster.operator.kubernetes.rejections import WorkerRejection, rejected
from muster.operator.kubernetes.render import (
    SiteSettings,
    UnrenderableJob,
    hold_back,
    pin,
    render_pod,
    require_node_affinity,
)
from muster.operator.pacing import CREATE_AT_ONCE
from muster.words.names import Label, worker_name


class PodMaker:
    """Creator of workers' pods.

    `pods` is notified of each pod that was created. `instance_type` returns that of a node by its name; empty if it is
    not known.
    """

    def __init__(
        self, client: ApiClient, pods: PodCache, site: SiteSettings, instance_type: Callable[[str], str]
    ) -> None:
        self._client, self._pods, self._site, self._instance_type = client, pods, site, instance_type
        self._turn = asyncio.Semaphore(CREATE_AT_ONCE)

    async def make(
        self, job: CachedJob, gang: GangScheduler, ref: GangRef, action: CreateWorker, gate: str | None
    ) -> PodState | WorkerRejection:
        """The pod, or why there is none."""
        try:
            async with self._turn:  # also to render it: manifests that wait would be most of our memory
                manifest = self._manifest(job, gang, ref, action)
                if gate is not None:
                    hold_back(manifest, gate)
                path = paths.core(job.namespace, "pods")
                # What other schedulers' webhooks made of it must be read; without them it is what we sent.
                item = manifest | await self._client.create(path, manifest, METADATA if gang.places else "")
            if refusal := gang.refusal(item):
                await self._client.delete(paths.core(job.namespace, "pods", item["metadata"]["name"]))
                return rejected(OSError(refusal), time.time())
            pod = read_pod(item)
        except (OSError, UnrenderableJob) as error:
            if isinstance(error, ApiError) and error.reason == "AlreadyExists":
                return await self._existing_pod(job, action)
            return rejected(error, time.time())
        assert pod is not None, "we made its labels"
        self._pods.keep(pod)
        return pod

    def _manifest(self, job: CachedJob, gang: GangScheduler, ref: GangRef, action: CreateWorker) -> Object:
        instance_type = self._instance_type(action.node) or (job.spec.gang.instance_types or ("",))[0]
        manifest = render_pod(job, action, self._site, gang.kind, instance_type)
        if gang.places:
            pin(manifest, action.node)
        else:
            require_node_affinity(manifest, job, time.time())
        gang.decorate(manifest, ref)
        return manifest

    async def _existing_pod(self, job: CachedJob, action: CreateWorker) -> PodState | WorkerRejection:
        """A pod of that name is there: ours, unless an earlier job of the same name has left it."""
        name = worker_name(job.name, action.id)
        item = await self._client.get(paths.core(job.namespace, "pods", name))
        if (item["metadata"].get("labels") or {}).get(Label.JOB_UID) != job.uid:
            why = f"a pod named {name} is there that does not belong to this job; it has to go first"
            return rejected(OSError(why), time.time())
        pod = read_pod(item)
        return pod if pod is not None else rejected(OSError(f"the pod {name} lost its labels; delete it"), time.time())
