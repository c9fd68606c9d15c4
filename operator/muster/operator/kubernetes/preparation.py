"""Preparation before a gang's first pod: names, the fence's permission, the gang's own objects."""

from __future__ import annotations

import asyncio
import time

from muster.kube import paths
from muster.kube.client import ApiClient, Object
from muster.kube.errors import ApiError
from muster.operator.kubernetes import companions
from muster.operator.kubernetes.gangs.protocol import GangRef, GangScheduler, MisnamedObject
from muster.operator.kubernetes.jobs import CachedJob
from muster.operator.kubernetes.render import CLAIMS_API, SiteSettings
from muster.operator.pacing import SHARED_SECONDS


class JobPreparation:
    """Creates the objects other than pods, each once: what is known to be there is not asked for again."""

    def __init__(self, client: ApiClient, site: SiteSettings) -> None:
        self._client, self._site = client, site
        self._ready_jobs: set[str] = set()  # whose own objects are there
        self._groups: set[tuple[str, str]] = set()  # (job uid, group) whose objects are there
        self._shared: dict[str, float] = {}  # path of what the gangs of a namespace share → when it was seen there
        self._first = asyncio.Lock()

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._ready_jobs.discard(uid)
        self._groups = {entry for entry in self._groups if entry[0] != uid}

    async def prepare(self, job: CachedJob, gang: GangScheduler, ref: GangRef) -> None:
        """Return when all of it is there. Raises OSError, and MisnamedObject for what the job names and nobody has."""
        async with self._first:  # many jobs may be the first of their namespace
            await self._share(
                paths.group(f"{companions.RBAC}/v1", job.namespace, "rolebindings"),
                companions.fence_binding(job.namespace, self._site.account(job), bool(self._site.watch_namespace)),
                "subjects",
            )
            if job.spec.gang.nodes.max > 1:  # one that will never have another needs no name
                await self._share(paths.core(job.namespace, "services"), companions.service(job.namespace), "spec")
        if job.uid not in self._ready_jobs:
            await self._make_claims(job)
            if (policy := companions.network_policy(job, self._site)) is not None:
                await self._make_sure(
                    paths.group("networking.k8s.io/v1", job.namespace, "networkpolicies"), policy, job.uid
                )
            self._ready_jobs.add(job.uid)
        if (job.uid, ref.group) not in self._groups:
            for item in gang.objects(ref):
                try:
                    await self._make_sure(item.path, item.body, job.uid)
                except ApiError as error:
                    if error.status == 404:
                        raise OSError(f"{item.needs} is not installed in this cluster ({item.path})") from error
                    raise
            self._groups.add((job.uid, ref.group))

    async def _make_sure(self, path: str, body: Object, job_uid: str) -> None:
        try:
            await self._client.create(path, body)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            existing = await self._client.get(f"{path}/{body['metadata']['name']}")
            owners = existing["metadata"].get("ownerReferences") or ()
            if all(owner["uid"] != job_uid for owner in owners):
                kind, name = body["kind"], body["metadata"]["name"]
                raise OSError(
                    f"a {kind} named {name} is there that does not belong to this job; delete or rename it"
                ) from error

    async def _share(self, path: str, body: Object, what: str) -> None:
        """Make an object that the gangs of a namespace share and that no job owns.

        `what` is the key of `body` by which an object of that name that is there already is known to be ours. Raises
        OSError if it is not ours, or if the API server refuses.
        """
        kind, name = body["kind"], body["metadata"]["name"]
        place = f"{path}/{name}"
        if time.monotonic() - self._shared.get(place, -SHARED_SECONDS) < SHARED_SECONDS:
            return
        try:
            await self._client.create(path, body)
        except ApiError as error:
            if error.reason != "AlreadyExists":  # the platform's trouble, which no job of the namespace can help
                raise OSError(f"{kind} {name}: {error.message}") from error
            ours, theirs = body[what], (await self._client.get(place))[what]
            same = all(theirs.get(key) == ours[key] for key in ours) if isinstance(ours, dict) else theirs == ours
            if not same:
                raise OSError(f"a {kind} named {name} is there that Muster did not make; delete it") from error
        self._shared[place] = time.monotonic()

    async def _make_claims(self, job: CachedJob) -> None:
        """The template of claims, and first whether anybody could ever fulfil them."""
        template = companions.claim_template(job)
        if template is None:
            return
        for request in template["spec"]["spec"]["devices"]["requests"]:
            name = request["exactly"]["deviceClassName"]
            try:
                await self._client.get(f"/apis/{CLAIMS_API}/deviceclasses/{name}")
            except ApiError as error:
                if error.status != 404:
                    raise
                served = error.reason == "NotFound" and "deviceclasses" in error.message
                if served:
                    where = f"spec.gang.deviceClasses.{request['name']}"
                    raise MisnamedObject(f"{where}: this cluster has no DeviceClass named {name}") from error
                raise OSError(
                    f"spec.gang.deviceClasses: this cluster does not serve {CLAIMS_API} (Kubernetes 1.34)"
                ) from error
        path = paths.group(CLAIMS_API, job.namespace, "resourceclaimtemplates")
        await self._make_sure(path, template, job.uid)
