"""Writes of TrainingJobs: statuses, our finalizer, and the deletion of a job whose time to live is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from muster.kube import paths
from muster.kube.client import METADATA, ApiClient, Object
from muster.kube.errors import ApiError
from muster.operator.core.conditions import refused_status
from muster.operator.kubernetes.jobs import CachedJob, JobStore
from muster.operator.world import NotFound, UnreadableDocument, VersionConflict
from muster.words.base import dump
from muster.words.names import FINALIZER, GROUP, KIND, VERSION
from muster.words.status import JobStatus, Phase


class JobWriter:
    """Writer of the status and the finalizer of jobs, which also deletes jobs whose time to live is up.

    `on_refusal` is called with the job, the code and the reason of each spec that was refused. `overtaken` has the uids
    of the jobs whose write was refused because they had changed, and the watch has not said yet how.
    """

    def __init__(self, client: ApiClient, jobs: JobStore, on_refusal: Callable[[CachedJob, str, str], None]) -> None:
        self._client, self._jobs, self._on_refusal = client, jobs, on_refusal
        self.overtaken: set[str] = set()

    async def write_status(self, job: CachedJob, status: JobStatus, version: str) -> None:
        """Write the status of a job. Raises VersionConflict or NotFound.

        `version` is that of the object from which the status was decided.
        """
        # A job that tells of its progress will do so for long: then ending the tracking is soon worth a write.
        goes_on = job.status.phase is status.phase is Phase.RUNNING
        due = FINALIZER not in job.finalizers or (goes_on and job.tracked)
        if due and job.version == version and not job.summary.deleting:
            version = await self._protect(job)
        item = await self._put_status(job, dump(status), version)
        self._jobs.written(job, item, status)

    async def refuse(self, job: CachedJob, why: str) -> None:
        """A spec that the schema let in and that can't run: say so in the status, once. It is not the core's affair."""
        if job.summary.deleting:
            await self.remove(job)
            return
        because = f"the spec was refused: {why}"[:4_000]
        if job.status.because == because or job.status.phase.terminal:
            return
        if job.status.attempt:  # it ran, under another version of Muster: hands off
            raise UnreadableDocument(f"job {job.namespace}/{job.name}: {because}")
        status = refused_status(job.status, because, time.time(), job.generation)
        await self._put_status(job, dump(status), job.version)
        self._on_refusal(job, status.code, because)

    async def remove(self, job: CachedJob) -> None:
        """Drop our finalizer, which lets a deleted object go; and delete it first if its time to live is up."""
        path = paths.job(job.namespace, job.name)
        try:
            if not job.summary.deleting:
                unchanged = {"uid": job.uid, "resourceVersion": job.version}
                await self._client.delete(path, {"preconditions": unchanged, "propagationPolicy": "Background"})
            item = await self._client.get(path)
            finalizers = item["metadata"].get("finalizers") or []
            if item["metadata"]["uid"] == job.uid and FINALIZER in finalizers:
                kept = [name for name in finalizers if name != FINALIZER]
                change = {"metadata": {"finalizers": kept, "resourceVersion": item["metadata"]["resourceVersion"]}}
                await self._client.patch(path, change)
        except ApiError as error:
            if error.status == 409:
                self.overtaken.add(job.uid)
                raise VersionConflict(error.message) from error
            if error.status != 404:
                raise

    async def _put_status(self, job: CachedJob, status: Object, version: str) -> Object:
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {"name": job.name, "namespace": job.namespace, "uid": job.uid, "resourceVersion": version},
            "status": status,
        }
        with self._guarded(job):
            return await self._client.put(f"{paths.job(job.namespace, job.name)}/status", body, METADATA)

    async def _protect(self, job: CachedJob) -> str:
        """Have a deleted job stay until its gang has committed; returns the version that it has then.

        Before its first status, for the same write ends the tracking of who owns which field, which is two fifths of
        what each status costs; unless somebody applies the job server-side, which is what the tracking is for. The API
        gives a job the finalizer itself: then the tracking ends with the first status that shows the job to last.
        """
        others = (name for name in job.finalizers if name != FINALIZER)
        meta: Object = {"finalizers": [*others, FINALIZER], "resourceVersion": job.version}
        if not job.applied:
            meta["managedFields"] = [{}]  # the API's own way to say so
        with self._guarded(job):
            item = await self._client.patch(paths.job(job.namespace, job.name), {"metadata": meta}, accept=METADATA)
        self._jobs.written(job, item)
        return str(item["metadata"]["resourceVersion"])

    @contextmanager
    def _guarded(self, job: CachedJob) -> Iterator[None]:
        """A write that names the version which it is about: it fails where somebody else wrote since."""
        try:
            yield
        except ApiError as error:
            if error.status == 409:
                self.overtaken.add(job.uid)
                raise VersionConflict(error.message) from error
            if error.status == 404:
                self._jobs.forget(job.uid)
                raise NotFound(error.message) from error
            raise
