"""Fresh reads from the API server itself: one job, its pods, the list of all jobs, warnings about pods that hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from muster.kube import paths
from muster.kube.client import METADATA_LIST, ApiClient
from muster.kube.errors import ApiError
from muster.operator.kubernetes.jobs import CachedJob, JobStore
from muster.operator.kubernetes.pod_warnings import PodWarnings
from muster.operator.kubernetes.pods import PodCache, PodState, read_pod
from muster.operator.pacing import LATE_LOOKS, LATE_SECONDS
from muster.words.names import Label


class FreshReads:
    """Reader of jobs and pods from the API server, which also stores what it has read in `jobs` and `pods`.

    `jobs_path` is the path of the collection of jobs that is served: of one namespace, or of all.
    """

    def __init__(
        self, client: ApiClient, jobs: JobStore, pods: PodCache, jobs_path: str, warnings: PodWarnings
    ) -> None:
        self.warnings = warnings
        self._client, self._jobs, self._pods, self._jobs_path = client, jobs, pods, jobs_path

    async def job(self, namespace: str, name: str, uid: str) -> CachedJob | None:
        """Read the job from the API server, or return None if it is gone."""
        try:
            item = await self._client.get(paths.job(namespace, name))
        except ApiError as error:
            if error.status != 404:
                raise
            self._jobs.forget(uid)
            return None
        if item["metadata"]["uid"] != uid:  # deleted, and another of its name was made
            self._jobs.forget(uid)
            self._jobs.put(item)
            return None
        return self._jobs.keep(item)

    async def pods(self, job: CachedJob) -> tuple[PodState, ...]:
        """Read all of the job's pods, of whatever attempt."""
        selector = f"{Label.JOB_UID}={job.uid}"
        fresh: list[PodState] = []
        async for page in self._client.pages(paths.core(job.namespace, "pods"), labelSelector=selector):
            fresh += [pod for item in page.get("items") or () if (pod := read_pod(item)) is not None]
        self._pods.replace(job.uid, tuple(fresh))
        return self._pods.of(job.uid)  # with what is remembered of them

    async def present(self) -> Callable[[CachedJob], bool]:
        """Read from the source which jobs there are in which version, and whole what the watch has not brought yet.
        Returns who of the cache was there, or is newer than the list.
        """
        versions: dict[str, tuple[str, str, str]] = {}  # by uid: namespace, name and version
        version = 0
        async for page in self._client.pages(self._jobs_path, METADATA_LIST):
            version = version or int(page["metadata"]["resourceVersion"])
            for meta in (item["metadata"] for item in page.get("items") or ()):
                versions[meta["uid"]] = meta["namespace"], meta["name"], meta["resourceVersion"]
        late = list(versions)
        for _ in range(LATE_LOOKS):
            late = [uid for uid in late if not self._jobs.has(uid, versions[uid][2])]
            if late:  # the watch is mostly just about to bring them, and many at once
                await asyncio.sleep(LATE_SECONDS)
        await asyncio.gather(*(self.job(*versions[uid][:2], uid) for uid in late))
        return lambda job: job.uid in versions or int(job.version) > version
