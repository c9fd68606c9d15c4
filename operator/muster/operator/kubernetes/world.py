"""The World protocol over a Kubernetes API server. Reads come from watches; what must be fresh is asked anew."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from muster.contract.address import parse_address
from muster.contract.base import dump
from muster.contract.names import FINALIZER, GROUP, KIND, VERSION, Label
from muster.contract.status import JobStatus, Phase
from muster.kube import paths
from muster.kube.client import METADATA, METADATA_LIST, Client, Object
from muster.kube.errors import ApiError
from muster.kube.watch import SILENCE_SECONDS, ObjectCache, Reflector
from muster.operator.commit_lookup import CommitLookup, KnownCommits
from muster.operator.core.conditions import refused_status
from muster.operator.core.decision import Action, CreateWorker, RemoveJob, RemoveWorker
from muster.operator.core.fleet import Fleet, JobSummary
from muster.operator.core.observed import Observed, Reservation
from muster.operator.kubernetes import observe
from muster.operator.kubernetes.creation import Creator
from muster.operator.kubernetes.gangs.choice import Gangs
from muster.operator.kubernetes.heartbeats import Heartbeats
from muster.operator.kubernetes.jobs import Job, Jobs
from muster.operator.kubernetes.network import plan
from muster.operator.kubernetes.nodes import Nodes, Others
from muster.operator.kubernetes.pods import FIELDS, Pod, Pods, read_pod
from muster.operator.kubernetes.priorities import Priorities
from muster.operator.kubernetes.removal import Remover
from muster.operator.kubernetes.render import REPORT_PORT, SCHEDULER_LABEL, Site, Unrenderable, checkpoint_folder
from muster.operator.kubernetes.reservations import ReservationStore
from muster.operator.kubernetes.slices import Slices
from muster.operator.pacing import (
    ADMISSION_SECONDS_MAX,
    ADMISSION_SHARE,
    COMMITS_SECONDS,
    EVENT_SECONDS,
    EVENT_SECONDS_MAX,
    EVENTS_PER_SECOND,
    LATE_LOOKS,
    LATE_SECONDS,
    LATER_SECONDS,
)
from muster.operator.world import FLEET, Conflict, NotFound, Reservations, Unreadable
from muster.storage.errors import StoreError
from muster.storage.listing import CommitListing, CommitSummary


class KubernetesWorld:
    """limits: accelerators that a namespace's jobs may hold together. on_error: told of what fails beside passes."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        site: Site,
        limits: dict[str, int] | None = None,
        on_error: Callable[[str, Exception], None] = lambda what, error: None,
        silence_seconds: float = SILENCE_SECONDS,
        report_port: int = REPORT_PORT,
        on_refusal: Callable[[Job, str, str], None] = lambda job, code, because: None,
    ) -> None:
        self._client, self._site, self._limits, self._on_error = client, site, limits or {}, on_error
        self._on_refusal = on_refusal
        self._news: asyncio.Queue[str] = asyncio.Queue()
        self._told: set[str] = set()
        self._enqueued_later: set[str] = set()
        self.job_cache = Jobs(self._enqueue)
        self.pods = Pods(self._enqueue, self._enqueue_later)
        self.nodes = Nodes(site.tolerations, self.now, self._node_changed)
        self._others = Others(lambda: self._enqueue(FLEET))
        self._priorities = Priorities(lambda: self._enqueue(FLEET))
        self._slices, self._silence_seconds = Slices(lambda: self._enqueue(FLEET)), silence_seconds
        self._reservations = ReservationStore(client, namespace)
        self.gangs = Gangs(client, self._enqueue, on_error)
        self.heartbeats = Heartbeats(self.job_cache, self.pods, self._enqueue, report_port)
        news = self._enqueue, self._enqueue_later
        self._creator = Creator(client, self.job_cache, self.pods, site, self.gangs.of, self._instance_type, *news)
        self._remover = Remover(client, self.pods, on_error)
        self._commits = CommitListing()
        self._lookup = CommitLookup(self._list_commits)
        self._committed: dict[str, tuple[float, KnownCommits]] = {}  # job uid → when listed, newest
        self._overtaken: set[str] = set()  # jobs whose write was refused: they changed, and the watch has not said how
        self._fleet_read: tuple[float, float] = (0.0, 0.0)  # when last (monotonic), seconds that it took afresh
        only = site.watch_namespace
        self._jobs_path = paths.jobs(only) if only else paths.JOBS
        pods_path = paths.core(only, "pods") if only else paths.PODS
        self._reflectors = [
            Reflector(client, self._jobs_path, self.job_cache, on_error, silence_seconds),
            Reflector(client, paths.NODES, self.nodes, on_error, silence_seconds),
            Reflector(client, pods_path, self.pods, on_error, silence_seconds, FIELDS, labelSelector=Label.JOB_UID),
            Reflector(
                client, pods_path, self._others, on_error, silence_seconds,
                labelSelector=f"{SCHEDULER_LABEL}!=builtin",
                fieldSelector="spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed",
            ),
        ]  # fmt: skip

    def now(self) -> float:
        return time.time()

    async def watch(self) -> AsyncIterator[str]:
        async with asyncio.TaskGroup() as group:

            def follow(path: str, cache: ObjectCache) -> None:
                reflector = Reflector(self._client, path, cache, self._on_error, self._silence_seconds)
                group.create_task(reflector.run())

            follow(paths.PRIORITIES, self._priorities)  # not waited for: it may be forbidden
            for reflector in self._reflectors:
                group.create_task(reflector.run())
            group.create_task(self.heartbeats.run())
            await self.gangs.detect()
            followed: set[str] = set()

            def follow_slices() -> None:
                if self.gangs.claims_served and paths.SLICES not in followed:
                    followed.add(paths.SLICES)
                    follow(paths.SLICES, self._slices)

            def look_again() -> None:
                follow_slices()
                for job in self.job_cache.all():
                    if job.spec.gang.scheduler.kind != "builtin" and not job.status.phase.terminal:
                        self._enqueue(job.uid)

            follow_slices()
            group.create_task(self.gangs.follow_apis(look_again))
            for reflector in self._reflectors:
                await reflector.listed.wait()
            await self._reservations.read()
            while True:
                key = await self._news.get()
                self._told.discard(key)
                self._enqueued_later.discard(key)
                yield key

    async def jobs(self) -> tuple[str, ...]:
        for reflector in self._reflectors:
            await reflector.listed.wait()
        return self.job_cache.uids()

    async def observe(self, uid: str, fresh: bool = False) -> Observed | None:
        job = self.job_cache.get(uid)
        # Else the object is as the watch told it last: every write that is decided by it fails if it has changed.
        if job is not None and fresh and uid in self._overtaken:
            job = await self._read_job(job.namespace, job.name, uid)
            self._overtaken.discard(uid)
        if job is None:
            self._forget(uid)
            return None
        if job.unreadable:
            raise Unreadable(f"job {job.namespace}/{job.name}: {job.unreadable}; it is left to a newer operator")
        if job.invalid:  # first: the stand-in for its spec has faults of its own
            await self._refuse(job, job.invalid)
            return None
        try:
            folder = checkpoint_folder(job, self._site)
        except Unrenderable as error:
            await self._refuse(job, str(error))
            return None
        # Before the first attempt nobody has made a worker, which the object itself says: no need to ask for them.
        pods = await self._read_pods(job) if fresh and job.status.attempt else self.pods.of(uid)
        pods = self._creator.as_made(job, pods)
        # After the object and its workers: who is seen gone can commit nothing more.
        known = await self._committed_in(job, folder, pods, fresh)
        gang = self.gangs.of(job)
        if not fresh:
            self._creator.reconcile(job, pods)
            self.gangs.follow(job, pods)
        if job.status.phase is not Phase.RUNNING:
            self.pods.forget_leaving(uid)  # by us, or it is simply made again
        group = self.gangs.group(job)
        lost = bool(job.status.gang.nodes) and bool(gang.lost(group))
        node_of = self.nodes.get
        return Observed(
            uid=uid,
            namespace=job.namespace,
            name=job.name,
            created_at=job.summary.created_at,
            generation=job.generation,
            deleting=job.summary.deleting,
            version=job.version,
            fresh=fresh,
            spec=job.spec,
            status=job.status,
            workers=observe.workers(
                job, pods, self._creator.rejected(uid), node_of, self.heartbeats.of, self._waiting(job, pods)
            ),
            committed=known.committed,
            commits_unreadable=known.unreadable,
            checkpoint_uri=folder,
            signals=observe.signals(job, (*pods, *self._left(uid, pods)), node_of),
            nodes_unfit=observe.unfit_nodes(job, node_of) if gang.places else job.status.gang.nodes if lost else (),
            reservations=self._reservations.of(uid) if gang.places else self._open_reservation(job),
            now=self.now(),
            notes=self._notes(job),
        )

    async def write_status(self, uid: str, status: JobStatus, version: str) -> None:
        job = self.job_cache.get(uid)
        if job is None:
            raise NotFound(f"no job with uid {uid}")
        if FINALIZER not in job.finalizers and job.version == version and not job.summary.deleting:
            version = await self._protect(job)
        item = await self._put_status(job, dump(status), version)
        self.job_cache.written(job, item, status)

    async def apply(self, uid: str, action: Action) -> None:
        job = self.job_cache.get(uid)
        match action:
            case CreateWorker():
                if job is None or (job.status.attempt, job.status.phase) != (action.attempt, Phase.STARTING):
                    raise Conflict(f"attempt {action.attempt} of job {uid} is not the one that starts")
                self._creator.order(uid, action)
            case RemoveWorker():
                self._creator.cancel(uid, action.attempt, action.worker)
                self._remover.remove(uid, action)
            case RemoveJob():
                if job is not None:
                    await self._remove_job(job)

    async def fleet(self, fresh: bool = False) -> Fleet:
        ended, seconds = self._fleet_read
        if not fresh:  # a pass over a large fleet is dear; one sees to all news that came before it
            pause = min(ADMISSION_SECONDS_MAX, seconds / ADMISSION_SHARE) - (time.monotonic() - ended)
            await asyncio.sleep(max(0.0, pause))
            self._fleet_read = (time.monotonic(), seconds)
        present = await self._list_jobs() if fresh else None
        jobs = (
            job
            for job in self.job_cache.all()
            if (present is None or present(job)) and not (job.invalid and not job.status.gang.nodes)
        )
        summaries = tuple(job.summary for job in jobs)
        nodes, others = self._slices.counted(self.nodes.fleet(self._others)), self._others.held()
        return Fleet(self.now(), fresh, nodes, summaries, self._limits, others, priorities=self._priorities.values)

    async def reservations(self) -> Reservations:
        return await self._reservations.read()

    async def write_reservations(self, entries: tuple[Reservation, ...], version: str) -> None:
        await self._reservations.write(entries, version)

    def known(self) -> tuple[JobSummary, ...]:
        """All jobs in short. From any thread."""
        found = (self.job_cache.get(uid) for uid in self.job_cache.uids())
        return tuple(job.summary for job in found if job is not None)

    def current_attempt(self, uid: str) -> int | None:
        """Of a job that is not over. From any thread."""
        job = self.job_cache.get(uid)
        return None if job is None or job.status.phase.terminal else job.status.attempt

    def enqueue(self, uid: str) -> None:
        """Let the job be looked at: another source has something about it."""
        self._enqueue(uid)

    def phases(self) -> dict[str, int]:
        """How many jobs are in each phase."""
        return Counter(str(job.status.phase) for job in self.job_cache.all())

    async def close(self) -> None:
        await self._creator.close()

    # --- news ---

    def _enqueue(self, key: str) -> None:
        """Let the job be looked at a moment later: pods of a gang come up one by one, and one look sees several."""
        if key not in self._told:
            self._told.add(key)
            pause = min(EVENT_SECONDS_MAX, max(EVENT_SECONDS, len(self._told) / EVENTS_PER_SECOND))
            asyncio.get_running_loop().call_later(pause, self._news.put_nowait, key)

    def _enqueue_later(self, key: str) -> None:
        """Let the job be looked at with its next change, or in LATER_SECONDS: only words and counts of it changed."""

        def remind() -> None:
            if key in self._enqueued_later:
                self._enqueue(key)

        if key not in self._enqueued_later:
            self._enqueued_later.add(key)
            asyncio.get_running_loop().call_later(LATER_SECONDS, remind)

    def _node_changed(self, name: str) -> None:
        for uid in {pod.job_uid for pod in self.pods.all() if pod.node == name}:
            self._enqueue(uid)
        self._enqueue(FLEET)

    def _forget(self, uid: str) -> None:
        self._creator.forget(uid)
        self.gangs.forget(uid)
        self.pods.forget_leaving(uid)
        self._overtaken.discard(uid)
        self._committed.pop(uid, None)
        self._lookup.forget(uid)

    # --- reads ---

    def _notes(self, job: Job) -> tuple[str, ...]:
        """What the next attempt's words should say beside its nodes: which of our settings the user replaced."""
        gang, env = job.spec.gang, job.spec.runtime.env
        if not gang.gpus_per_node or job.status.phase not in (Phase.QUEUED, Phase.RESTARTING):
            return ()
        places = next((entry.nodes for entry in self._reservations.of(job.uid)), job.status.gang.nodes)
        kind = next((kind for node in places[:1] if (kind := self._instance_type(node))), "")
        net = plan(kind or (gang.instance_types or ("",))[0], gang, {item.name: item.value for item in env})
        return tuple(f"by your settings {words}" for words in net.overrides)

    def _instance_type(self, node: str) -> str:
        facts = self.nodes.get(node)
        return facts.node.instance_type if facts else ""

    async def _read_job(self, namespace: str, name: str, uid: str) -> Job | None:
        try:
            item = await self._client.get(paths.job(namespace, name))
        except ApiError as error:
            if error.status != 404:
                raise
            self.job_cache.forget(uid)
            return None
        if item["metadata"]["uid"] != uid:  # deleted, and another of its name was made
            self.job_cache.forget(uid)
            self.job_cache.put(item)
            return None
        return self.job_cache.keep(item)

    async def _read_pods(self, job: Job) -> tuple[Pod, ...]:
        selector = f"{Label.JOB_UID}={job.uid}"
        found: list[Pod] = []
        async for page in self._client.pages(paths.core(job.namespace, "pods"), labelSelector=selector):
            found += [pod for item in page.get("items") or () if (pod := read_pod(item)) is not None]
        self.pods.replace(job.uid, tuple(found))
        return tuple(found)

    async def _list_jobs(self) -> Callable[[Job], bool]:
        """Read from the source which jobs there are in which version, and whole what the watch has not brought yet.
        Returns who of the cache was there, or is newer than the list.
        """
        began = time.monotonic()
        found: dict[str, tuple[str, str, str]] = {}  # by uid: namespace, name and version
        version = 0
        async for page in self._client.pages(self._jobs_path, METADATA_LIST):
            version = version or int(page["metadata"]["resourceVersion"])
            for meta in (item["metadata"] for item in page.get("items") or ()):
                found[meta["uid"]] = meta["namespace"], meta["name"], meta["resourceVersion"]
        late = list(found)
        for _ in range(LATE_LOOKS):
            late = [uid for uid in late if not self.job_cache.has(uid, found[uid][2])]
            if late:  # the watch is mostly just about to bring them, and many at once
                await asyncio.sleep(LATE_SECONDS)
        await asyncio.gather(*(self._read_job(*found[uid][:2], uid) for uid in late))
        self._fleet_read = (time.monotonic(), time.monotonic() - began)
        return lambda job: job.uid in found or int(job.version) > version

    async def _committed_in(self, job: Job, folder: str, pods: tuple[Pod, ...], fresh: bool) -> KnownCommits:
        """Listing costs a request to the store, so it waits for a sign that there is something new."""
        listed_at, known = self._committed.get(job.uid, (-1e9, KnownCommits()))
        beats = (beat for pod in pods for beat in observe.last_heartbeat(pod) or self.heartbeats.of(pod))
        told = max((beat.last_commit_step or 0 for beat in beats), default=0)
        if not job.status.attempt:
            return known
        is_news = told > (known.committed.step if known.committed else 0)
        if not fresh and not is_news and time.monotonic() - listed_at < COMMITS_SECONDS:
            return known
        found = await self._lookup.look(job.uid, folder)
        self._committed[job.uid] = (time.monotonic(), found)
        return found

    def _left(self, uid: str, pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """The pod that was told to go and has done so before we looked: it did not just vanish."""
        here = {pod.uid for pod in pods if not pod.over}
        return tuple(pod for pod in self.pods.leaving(uid) if pod.uid not in here)

    def _list_commits(self, folder: str) -> tuple[CommitSummary, ...]:
        address = parse_address(folder)
        if address.scheme == "file" and not address.local.parent.is_dir():
            raise StoreError(
                f"the checkpoint folder {address.local.parent} can't be seen by the operator, so no commit of the job "
                "can be found; mount its volume into the operator too, or use an s3:// address"
            )
        return self._commits.read(address)

    def _waiting(self, job: Job, pods: tuple[Pod, ...]) -> str:
        """Why another scheduler has not placed the starting gang."""
        gang = self.gangs.of(job)
        if gang.places or job.status.phase is not Phase.STARTING:
            return ""
        mine = tuple(pod for pod in pods if pod.attempt == job.status.attempt)
        return gang.waiting(mine, self.gangs.group(job))

    def _open_reservation(self, job: Job) -> tuple[Reservation, ...]:
        """Another scheduler finds the nodes: the job's request is granted with places that have no node yet."""
        if job.status.phase is not Phase.QUEUED:
            return ()
        size = job.spec.gang_sizes()[0]
        kind = job.spec.gang.scheduler.kind
        nodes = tuple(f"{kind}-{index}" for index in range(size))
        return (Reservation(job.uid, job.status.reservation, job.namespace, nodes, kind, "on-demand", at=self.now()),)

    # --- writes ---

    async def _put_status(self, job: Job, status: Object, version: str) -> Object:
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "metadata": {"name": job.name, "namespace": job.namespace, "uid": job.uid, "resourceVersion": version},
            "status": status,
        }
        with self._guarded(job):
            return await self._client.put(f"{paths.job(job.namespace, job.name)}/status", body, METADATA)

    async def _protect(self, job: Job) -> str:
        """Have a deleted job stay until its gang has committed; returns the version that it has then.

        Before its first status, for the same write ends the tracking of who owns which field, which is two fifths of
        what each status costs; unless somebody applies the job server-side, which is what the tracking is for.
        """
        meta: Object = {"finalizers": [*job.finalizers, FINALIZER], "resourceVersion": job.version}
        if not job.applied:
            meta["managedFields"] = [{}]  # the API's own way to say so
        with self._guarded(job):
            item = await self._client.patch(paths.job(job.namespace, job.name), {"metadata": meta}, accept=METADATA)
        self.job_cache.written(job, item)
        return str(item["metadata"]["resourceVersion"])

    @contextmanager
    def _guarded(self, job: Job) -> Iterator[None]:
        """A write that names the version which it is about: it fails where somebody else wrote since."""
        try:
            yield
        except ApiError as error:
            if error.status == 409:
                self._overtaken.add(job.uid)
                raise Conflict(error.message) from error
            if error.status == 404:
                self.job_cache.forget(job.uid)
                raise NotFound(error.message) from error
            raise

    async def _refuse(self, job: Job, why: str) -> None:
        """A spec that the schema let in and that can't run: say so in the status, once. It is not the core's affair."""
        if job.summary.deleting:
            await self._remove_job(job)
            return
        because = f"the spec was refused: {why}"[:4_000]
        if job.status.because == because or job.status.phase.terminal:
            return
        if job.status.attempt:  # it ran, under another version of Muster: hands off
            raise Unreadable(f"job {job.namespace}/{job.name}: {because}")
        status = refused_status(job.status, because, self.now(), job.generation)
        await self._put_status(job, dump(status), job.version)
        self._on_refusal(job, status.code, because)

    async def _remove_job(self, job: Job) -> None:
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
                self._overtaken.add(job.uid)
                raise Conflict(error.message) from error
            if error.status != 404:
                raise
