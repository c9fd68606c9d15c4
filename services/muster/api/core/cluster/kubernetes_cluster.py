"""TrainingJobs of a Kubernetes cluster, as the relay and the mirror want them. Namespaces are projects.

An object that this API made carries its row's id in a label; one that was made by other means goes by its own uid.
Changes come from a watch and are kept in memory until they are read; `resourceVersion` is the version. What was deleted
while this process was away is noticed when all jobs are listed, by the rows that have nothing left there (`live`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import structlog

from muster.api.core.cluster import kubernetes_secrets
from muster.api.core.cluster.cluster import ApplyOutcome, ApplyResult, DesiredJob, FoundJob, SecretName, shown_spec
from muster.api.core.cluster.kubernetes_config_maps import read_nodes, write_limits, write_quotas
from muster.api.core.cluster.pod_logs import PodLogs
from muster.kube import paths
from muster.kube.client import ApiClient, Object
from muster.kube.errors import ApiError
from muster.kube.timestamps import seconds_of
from muster.kube.watch import Reflector
from muster.local.cluster import RawChange
from muster.words.base import dump
from muster.words.fleet import FleetReport
from muster.words.names import FINALIZER, GROUP, KIND, VERSION, Label
from muster.words.quotas import ProjectQuota
from muster.words.state_folder import StateFolder

log = structlog.get_logger("muster.api.kubernetes")

LISTED_SECONDS = 10.0
CHANGES_MAX = 50_000  # kept for a mirror that is behind; past that it is given the present state instead


class KubernetesCluster:
    """`live` gives the ids of rows whose job should be in the cluster; logs of workers are mirrored into `layout`. Only
    jobs of `watch_namespace` are carried, where that is not empty."""

    name = "kubernetes"

    def __init__(
        self, client: ApiClient, live: Callable[[], Awaitable[set[str]]], layout: StateFolder, watch_namespace: str = ""
    ) -> None:
        self._client, self._live = client, live
        self._logs = PodLogs(client, layout, lambda uid: self._jobs.get(uid))
        self._jobs: dict[str, Object] = {}  # by id
        self._expected: set[str] = set()  # ids that were to be there when a list began
        self._listing: list[Object] | None = None  # of a list that is not complete: its order is not that of versions
        self._changes: list[RawChange] = []
        self._version = 0
        path = paths.jobs(watch_namespace) if watch_namespace else paths.JOBS
        self._reflector = Reflector(client, path, self, _on_error, before_list=self._expect)
        self._task = asyncio.create_task(self._reflector.run(), name="trainingjobs")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._logs.close()

    async def apply(self, jobs: Sequence[DesiredJob]) -> list[ApplyResult]:
        return [await self._apply(job) for job in jobs]

    async def fetch_log(self, uid: str, attempt: int | None, worker: int | None) -> None:
        await self._logs.fetch(uid, attempt, worker)

    async def discard(self, uid: str) -> None:
        item = self._jobs.get(uid)
        if item is not None:
            meta = item["metadata"]
            try:
                body = {"preconditions": {"uid": meta["uid"]}}
                await self._client.delete(paths.job(meta["namespace"], meta["name"]), body)
            except ApiError as error:
                if error.status not in (404, 409):
                    raise

    async def version(self) -> int:
        await self._have_listed()
        return self._version

    async def changes(self, after_version: int, limit: int) -> list[RawChange]:
        """Return the changes in the order of their versions. Changes of one version are never separated."""
        await self._have_listed()
        newer = [change for change in self._changes if change.version > after_version]
        if len(newer) > limit:
            last = newer[limit - 1].version
            newer = [change for change in newer if change.version <= last]
        return newer

    async def behind(self, after_version: int) -> int:
        await self._have_listed()
        return sum(change.version > after_version for change in self._changes)

    async def find(self, uid: str) -> FoundJob | None:
        item = self._jobs.get(uid)
        return _job_of(item, uid) if item is not None else None

    async def write_quotas(self, quotas: Mapping[str, ProjectQuota | None]) -> None:
        await write_quotas(self._client, self._client.connection.namespace, quotas)

    async def write_limits(self, entries: Mapping[str, str]) -> None:
        await write_limits(self._client, self._client.connection.namespace, entries)

    async def write_secret(self, secret: SecretName, data: Mapping[str, str]) -> None:
        await kubernetes_secrets.write(self._client, secret, data)

    async def delete_secret(self, secret: SecretName) -> None:
        await kubernetes_secrets.delete(self._client, secret)

    async def nodes(self) -> FleetReport | None:
        return await read_nodes(self._client, self._client.connection.namespace)

    async def _have_listed(self) -> None:
        async with asyncio.timeout(LISTED_SECONDS):  # not wait_for: until Python 3.12 it swallows cancellations
            await self._reflector.listed.wait()

    # --- desired jobs ---

    async def _apply(self, job: DesiredJob) -> ApplyResult:
        try:
            return await self._update(job) if job.seen else await self._create(job)
        except Exception as error:  # one bad row must not stop the others
            words = f"{error.status} {error.reason}" if isinstance(error, ApiError) else type(error).__name__
            return ApplyResult(job.uid, ApplyOutcome.RETRY, error=f"{words}: {error}"[:300])

    async def _create(self, job: DesiredJob) -> ApplyResult:
        meta = {
            "name": job.name,
            "namespace": job.namespace,
            "labels": job.labels | {Label.JOB_ID: job.uid},
            "finalizers": [FINALIZER],
        }
        body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": meta, "spec": dump(job.spec)}
        try:
            self._note(await self._client.create(paths.jobs(job.namespace), body))
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            existing = await self._client.get(paths.job(job.namespace, job.name))
            if id_of(existing) != job.uid:
                return ApplyResult(job.uid, ApplyOutcome.NAME_HELD, id_of(existing))
            return await self._update(job)
        return ApplyResult(job.uid, ApplyOutcome.DONE)

    async def _update(self, job: DesiredJob) -> ApplyResult:
        """Change only what REST offers to change; the rest of the spec belongs to whoever edited it in the cluster."""
        path = paths.job(job.namespace, job.name)
        try:
            item = await self._client.get(path)
        except ApiError as error:
            if error.status != 404:
                raise
            return ApplyResult(job.uid, ApplyOutcome.GONE)
        if id_of(item) != job.uid:
            return ApplyResult(job.uid, ApplyOutcome.GONE)
        requests: dict[str, Any] = {"suspend": job.spec.suspend, "cancel": job.spec.cancel}
        if job.spec.cancel_reason:
            requests["cancelReason"] = job.spec.cancel_reason
        if any(item["spec"].get(key, False) != value for key, value in requests.items()):
            # With the uid, so that another object of that name is never changed.
            change = {"metadata": {"uid": item["metadata"]["uid"]}, "spec": requests}
            self._note(await self._client.patch(path, change))
        return ApplyResult(job.uid, ApplyOutcome.DONE)

    # --- news, from the reflector ---

    async def _expect(self) -> None:
        """Note the live jobs before the list is read, so that a job that is created meanwhile is not missed in it."""
        self._expected, self._listing = await self._live(), []

    def put(self, item: Object) -> None:
        if self._listing is None:
            self._note(item)
        else:
            self._listing.append(item)

    def drop(self, item: Object) -> None:
        uid = id_of(item)
        self._jobs.pop(uid, None)
        self._logs.remove(uid)
        self._append(RawChange(_version_of(item), uid, time.time(), True, json.dumps(_status(item))))

    def keep_only(self, uids: set[str]) -> None:
        version = int(self._reflector.version or 0)
        for item in sorted(self._listing or (), key=_version_of):
            self._note(item)
        self._listing = None
        # What was made since is newer than the list.
        present = {
            uid for uid, item in self._jobs.items() if item["metadata"]["uid"] in uids or _version_of(item) > version
        }
        self._logs.keep_only(present)
        for uid in (self._expected | self._jobs.keys()) - present:
            last = self._jobs.pop(uid, {})
            self._append(RawChange(version, uid, time.time(), True, json.dumps(last.get("status") or {})))
        self._version = max(self._version, version)

    # --- changes ---

    def _note(self, item: Object) -> None:
        """A version of a job, once. One that nobody has looked at yet is no change of its status."""
        uid, version = id_of(item), _version_of(item)
        cached = self._jobs.get(uid)
        if cached is not None and _version_of(cached) >= version:
            return
        self._jobs[uid] = item
        self._logs.note(uid, item)
        if cached is None or cached.get("status") != item.get("status"):
            self._append(RawChange(version, uid, time.time(), False, json.dumps(_status(item))))

    def _append(self, change: RawChange) -> None:
        self._changes.append(change)
        if len(self._changes) > 1 and self._changes[-2].version > change.version:
            self._changes.sort(key=lambda each: each.version)
        self._version = max(self._version, change.version)
        if len(self._changes) > CHANGES_MAX:
            newest = {each.uid: each for each in self._changes}
            self._changes = sorted(newest.values(), key=lambda each: each.version)


def _on_error(path: str, error: Exception) -> None:
    log.warning("the watch of TrainingJobs failed and is opened again", path=path, error=str(error))


def id_of(item: Object) -> str:
    """Under which the API knows the object."""
    meta = item["metadata"]
    return str((meta.get("labels") or {}).get(Label.JOB_ID) or meta["uid"])


def _version_of(item: Object) -> int:
    return int(item["metadata"]["resourceVersion"])


def _status(item: Object) -> Object:
    """The status; of an object that no operator has looked at yet, the beginning of one."""
    created_at = item["metadata"]["creationTimestamp"]
    status: Object = item.get("status") or {"phase": "Queued", "queuedAt": created_at, "since": created_at}
    return status


def _job_of(item: Object, uid: str) -> FoundJob:
    meta, spec = item["metadata"], shown_spec(dict(item.get("spec") or {}))
    labels, created_at = meta.get("labels") or {}, seconds_of(meta["creationTimestamp"])
    return FoundJob(uid, meta["name"], meta["namespace"], labels, spec, created_at)
