"""TrainingJobs of a Kubernetes cluster, as the relay and the mirror want them. Namespaces are projects.

An object that this API made carries its row's id in a label; one that was made by other means goes by its own uid.
Changes come from a watch and are kept in memory until they are read; `resourceVersion` is the version. What was deleted
while this process was away is noticed when all jobs are listed, by the rows that have nothing left there (`live`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence

import structlog
from pydantic import ValidationError

from muster.api.cluster import Answer, Outcome, Wish
from muster.api.kubernetes_client import ALL_JOBS, Client, ClusterError, Object, jobs_path
from muster.api.pod_logs import PodLogs
from muster.contract.base import dump, known_part
from muster.contract.cluster import RawChange
from muster.contract.kubernetes import seconds_of
from muster.contract.layout import State
from muster.contract.names import GROUP, KIND, VERSION, Label
from muster.contract.spec import JobSpec, Metadata, TrainingJob

log = structlog.get_logger("muster.api.kubernetes")

RETRY_SECONDS = 2.0
LISTED_SECONDS = 10.0
CHANGES_MAX = 50_000  # kept for a mirror that is behind; past that it is given the present state instead
FINALIZER = f"{GROUP}/gang"  # the operator's; set here it saves it a write


class KubernetesCluster:
    """live: the ids of rows whose job should be in the cluster. layout: where logs of its workers are mirrored."""

    name = "kubernetes"

    def __init__(self, client: Client, live: Callable[[], Awaitable[set[str]]], layout: State) -> None:
        self._client, self._live = client, live
        self._logs = PodLogs(client, layout, lambda uid: self._jobs.get(uid))
        self._jobs: dict[str, Object] = {}  # by id
        self._changes: list[RawChange] = []
        self._version = 0
        self._listed = asyncio.Event()
        self._task = asyncio.create_task(self._follow(), name="trainingjobs")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._logs.close()
        await self._client.close()

    async def fulfil(self, wishes: Sequence[Wish]) -> list[Answer]:
        return [await self._fulfil(wish) for wish in wishes]

    async def fetch_log(self, uid: str, attempt: int | None, worker: int | None) -> None:
        await self._logs.fetch(uid, attempt, worker)

    async def discard(self, uid: str) -> None:
        item = self._jobs.get(uid)
        if item is not None:
            meta = item["metadata"]
            try:
                body = {"preconditions": {"uid": meta["uid"]}}
                await self._client.ask("DELETE", jobs_path(meta["namespace"], meta["name"]), body)
            except ClusterError as error:
                if error.status not in (404, 409):
                    raise

    async def version(self) -> int:
        await self._have_listed()
        return self._version

    async def changes(self, after_version: int, limit: int) -> list[RawChange]:
        """In order of version; those of one version are never torn apart."""
        await self._have_listed()
        found = [change for change in self._changes if change.version > after_version]
        if len(found) > limit:
            last = found[limit - 1].version
            found = [change for change in found if change.version <= last]
        return found

    async def find(self, uid: str) -> TrainingJob | None:
        item = self._jobs.get(uid)
        return _job(item, uid) if item is not None else None

    async def _have_listed(self) -> None:
        async with asyncio.timeout(LISTED_SECONDS):  # not wait_for: until Python 3.12 it swallows cancellations
            await self._listed.wait()

    # --- wishes ---

    async def _fulfil(self, wish: Wish) -> Answer:
        try:
            return await self._update(wish) if wish.seen else await self._create(wish)
        except Exception as error:  # one bad row must not stop the others
            return Answer(wish.uid, Outcome.RETRY, error=f"{type(error).__name__}: {error}"[:300])

    async def _create(self, wish: Wish) -> Answer:
        meta = {
            "name": wish.name,
            "namespace": wish.namespace,
            "labels": wish.labels | {Label.JOB_ID: wish.uid},
            "finalizers": [FINALIZER],
        }
        body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": meta, "spec": dump(wish.spec)}
        try:
            self._note(await self._client.ask("POST", jobs_path(wish.namespace), body))
        except ClusterError as error:
            if error.reason != "AlreadyExists":
                raise
            found = await self._client.ask("GET", jobs_path(wish.namespace, wish.name))
            if id_of(found) != wish.uid:
                return Answer(wish.uid, Outcome.NAME_HELD, id_of(found))
            return await self._update(wish)
        return Answer(wish.uid, Outcome.DONE)

    async def _update(self, wish: Wish) -> Answer:
        """Change only what REST offers to change; the rest of the spec belongs to whoever edited it in the cluster."""
        path = jobs_path(wish.namespace, wish.name)
        try:
            item = await self._client.ask("GET", path)
        except ClusterError as error:
            if error.status != 404:
                raise
            return Answer(wish.uid, Outcome.GONE)
        if id_of(item) != wish.uid:
            return Answer(wish.uid, Outcome.GONE)
        wanted = {"suspend": wish.spec.suspend, "cancel": wish.spec.cancel}
        if any(item["spec"].get(key, False) != value for key, value in wanted.items()):
            # With the uid, so that another object of that name is never changed.
            change = {"metadata": {"uid": item["metadata"]["uid"]}, "spec": wanted}
            self._note(await self._client.ask("PATCH", path, change))
        return Answer(wish.uid, Outcome.DONE)

    # --- news ---

    async def _follow(self) -> None:
        version = ""
        while True:
            try:
                version = version or await self._list()
                async for event in self._client.watch(ALL_JOBS, version):
                    item = event["object"]
                    if event["type"] == "ERROR":
                        raise ClusterError(item.get("code", 500), item.get("reason", ""), item.get("message", ""))
                    if event["type"] == "DELETED":
                        self._gone(item)
                    elif event["type"] != "BOOKMARK":
                        self._note(item)
                    version = item["metadata"]["resourceVersion"]
            except TimeoutError:
                continue  # silent: open it again where it ended
            except (OSError, ValueError) as error:
                if isinstance(error, ClusterError) and error.status == 410:
                    version = ""
                    continue
                log.warning("the watch of TrainingJobs failed and is opened again", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)

    async def _list(self) -> str:
        items: list[Object] = []
        following, version = "", "0"
        while True:
            query = {"limit": "500"} | ({"continue": following} if following else {})
            page = await self._client.ask("GET", ALL_JOBS, None, **query)
            items += page.get("items") or ()
            version = str(page["metadata"]["resourceVersion"])
            if not (following := page["metadata"].get("continue", "")):
                break
        for item in sorted(items, key=_version_of):
            self._note(item)
        present = {id_of(item) for item in items}
        self._logs.keep_only(present)
        for uid in (await self._live() | self._jobs.keys()) - present:
            last = self._jobs.pop(uid, {})
            self._append(RawChange(int(version), uid, time.time(), True, json.dumps(last.get("status") or {})))
        self._version = max(self._version, int(version))
        self._listed.set()
        return version

    def _note(self, item: Object) -> None:
        """A version of a job, once. One that nobody has looked at yet is no change of its status."""
        uid, version = id_of(item), _version_of(item)
        known = self._jobs.get(uid)
        if known is not None and _version_of(known) >= version:
            return
        self._jobs[uid] = item
        self._logs.note(uid, item)
        if known is None or known.get("status") != item.get("status"):
            self._append(RawChange(version, uid, time.time(), False, json.dumps(_status(item))))

    def _gone(self, item: Object) -> None:
        uid = id_of(item)
        self._jobs.pop(uid, None)
        self._logs.remove(uid)
        self._append(RawChange(_version_of(item), uid, time.time(), True, json.dumps(_status(item))))

    def _append(self, change: RawChange) -> None:
        self._changes.append(change)
        if len(self._changes) > 1 and self._changes[-2].version > change.version:
            self._changes.sort(key=lambda each: each.version)
        self._version = max(self._version, change.version)
        if len(self._changes) > CHANGES_MAX:
            newest = {each.uid: each for each in self._changes}
            self._changes = sorted(newest.values(), key=lambda each: each.version)


def id_of(item: Object) -> str:
    """Under which the API knows the object."""
    meta = item["metadata"]
    return str((meta.get("labels") or {}).get(Label.JOB_ID) or meta["uid"])


def _version_of(item: Object) -> int:
    return int(item["metadata"]["resourceVersion"])


def _status(item: Object) -> Object:
    """The status; of an object that no operator has looked at yet, the beginning of one."""
    created_at = seconds_of(item["metadata"]["creationTimestamp"])
    status: Object = item.get("status") or {"phase": "Queued", "queuedAt": created_at, "since": created_at}
    return status


def _job(item: Object, uid: str) -> TrainingJob | None:
    meta = item["metadata"]
    try:
        spec = JobSpec.model_validate(known_part(JobSpec, item["spec"]))
    except ValidationError:
        return None  # refused by the operator, which says so in the status; there is no row for it
    return TrainingJob(
        metadata=Metadata(
            name=meta["name"],
            namespace=meta["namespace"],
            uid=uid,
            generation=meta.get("generation", 1),
            resource_version=meta["resourceVersion"],
            creation_timestamp=seconds_of(meta["creationTimestamp"]),
            labels=meta.get("labels") or {},
        ),
        spec=spec,
    )
