"""The World protocol over a Kubernetes API server. Reads come from watches; what must be fresh is asked anew."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable

from muster.kube import paths
from muster.kube.client import ApiClient
from muster.kube.watch import SILENCE_SECONDS
from muster.operator.core.decision import Action, CreateWorker, RemoveJob, RemoveWorker
from muster.operator.core.fleet import Fleet, JobSummary
from muster.operator.core.observed import NodeReservation, ObservedJob
from muster.operator.kubernetes import observe
from muster.operator.kubernetes.change_queue import ChangeQueue
from muster.operator.kubernetes.commits import JobCommits
from muster.operator.kubernetes.creation import WorkerCreator
from muster.operator.kubernetes.fleet import FleetView
from muster.operator.kubernetes.gangs.choice import GangSchedulers
from muster.operator.kubernetes.heartbeats import HeartbeatCache
from muster.operator.kubernetes.jobs import CachedJob, JobStore
from muster.operator.kubernetes.network import plan
from muster.operator.kubernetes.nodes import NodeCache
from muster.operator.kubernetes.pod_warnings import PodWarnings
from muster.operator.kubernetes.pods import PodCache, PodState, gang_of
from muster.operator.kubernetes.quotas import QuotaReader
from muster.operator.kubernetes.reads import FreshReads
from muster.operator.kubernetes.removal import PodRemover
from muster.operator.kubernetes.render import REPORT_PORT, SiteSettings, UnrenderableJob, checkpoint_folder
from muster.operator.kubernetes.reservations import ReservationStore
from muster.operator.kubernetes.watches import ApiWatches
from muster.operator.kubernetes.writes import JobWriter
from muster.operator.world import FLEET, NotFound, ReservationSet, UnreadableDocument, VersionConflict
from muster.words.fleet import NodeReport
from muster.words.job import JobSpec
from muster.words.prices import Prices
from muster.words.status import JobStatus, Phase


class KubernetesWorld:
    """A Kubernetes cluster as the core sees it: it looks, and does what was decided.

    Specs are read as `spec_type`, which refuses those that can't run; for each of these `on_refusal` is called with the
    job, the code and the reason. `limits` has the number of accelerators that the jobs of a namespace may hold
    together, by namespace. `on_error` is called with what fails outside a pass.
    """

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        site: SiteSettings,
        spec_type: type[JobSpec],
        limits: dict[str, int] | None = None,
        on_error: Callable[[str, Exception], None] = lambda what, error: None,
        silence_seconds: float = SILENCE_SECONDS,
        report_port: int = REPORT_PORT,
        on_refusal: Callable[[CachedJob, str, str], None] = lambda job, code, because: None,
        prices: Prices = Prices(),
    ) -> None:
        self._site, self._changes = site, ChangeQueue()
        changes = self._changes.enqueue, self._changes.enqueue_later
        self.job_cache = JobStore(self.enqueue, spec_type, site.resources)
        self.pods = PodCache(*changes)
        self.nodes = NodeCache(site.tolerations, self.now, self._node_changed)
        self.gangs = GangSchedulers(client, self.enqueue, on_error)
        self.heartbeats = HeartbeatCache(self.job_cache, self.pods, self.enqueue, report_port)
        only = site.watch_namespace
        warnings = PodWarnings(client, self.enqueue, on_error)
        self._reads = FreshReads(client, self.job_cache, self.pods, paths.jobs(only) if only else paths.JOBS, warnings)
        quotas = QuotaReader(client, namespace, on_error)
        self._fleet = FleetView(self.job_cache, self.nodes, self._reads, self._changes, limits or {}, quotas, prices)
        self._watches = ApiWatches(
            client, only, self.job_cache, self.pods, self.nodes, self._fleet, on_error, silence_seconds
        )
        self._writer = JobWriter(client, self.job_cache, on_refusal)
        self._commits = JobCommits(self.heartbeats)
        self._creator = WorkerCreator(
            client, self.job_cache, self.pods, site, self.gangs.of, self._instance_type, *changes
        )
        self._remover = PodRemover(client, self.pods, on_error)
        self._reservations = ReservationStore(client, namespace)

    def now(self) -> float:
        return time.time()

    async def watch(self) -> AsyncIterator[str]:
        async with asyncio.TaskGroup() as group:
            await self._watches.start(group, self.gangs, self._changes)
            group.create_task(self.heartbeats.run())
            await self._watches.listed()
            await self._reservations.read()
            while True:
                yield await self._changes.next()

    async def jobs(self) -> tuple[str, ...]:
        await self._watches.listed()
        return self.job_cache.uids()

    async def observe(self, uid: str, fresh: bool = False) -> ObservedJob | None:
        job = self.job_cache.get(uid)
        # Else the object is as the watch told it last: every write that is decided by it fails if it has changed.
        if job is not None and fresh and uid in self._writer.overtaken:
            job = await self._reads.job(job.namespace, job.name, uid)
            self._writer.overtaken.discard(uid)
        if job is None:
            self._forget(uid)
            return None
        if job.unreadable:
            raise UnreadableDocument(
                f"job {job.namespace}/{job.name}: {job.unreadable}; it is left to a newer operator"
            )
        if job.invalid:  # first: the stand-in for its spec has faults of its own
            await self._writer.refuse(job, job.invalid)
            return None
        try:
            folder = checkpoint_folder(job, self._site)
        except UnrenderableJob as error:
            await self._writer.refuse(job, str(error))
            return None
        # Before the first attempt nobody has made a worker, which the object itself says: no need to ask for them.
        pods = await self._reads.pods(job) if fresh and job.status.attempt else self.pods.of(uid)
        if not fresh:
            self._reads.warnings.follow(job, pods, self.now())
        pods = self._reads.warnings.added_to(job, self._creator.gates.as_made(job, pods))
        # After the object and its workers: who is seen gone can commit nothing more.
        commits = await self._commits.of(job, folder, pods, fresh)
        gang = self.gangs.of(job)
        if not fresh:
            self._creator.reconcile(job, pods)
            self.gangs.follow(job, pods)
        if job.status.phase is not Phase.RUNNING:
            self.pods.forget_leaving(uid)  # by us, or it is simply made again
        group = self.gangs.group(job)
        lost = bool(job.status.gang.nodes) and bool(gang.lost(group))
        node_of = self.nodes.get
        return ObservedJob(
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
            committed=commits.committed,
            commits_unreadable=commits.unreadable,
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
        await self._writer.write_status(job, status, version)

    async def apply(self, uid: str, action: Action) -> None:
        job = self.job_cache.get(uid)
        match action:
            case CreateWorker():
                id = action.id
                if job is None or (job.status.current(id.worker), job.status.phase) != (id, Phase.STARTING):
                    raise VersionConflict(f"{id} of job {uid} is not one that starts")
                self._creator.order(uid, action)
            case RemoveWorker():
                self._creator.cancel(uid, action.id)
                self._remover.remove(uid, action)
            case RemoveJob():
                if job is not None:
                    await self._writer.remove(job)

    async def fleet(self, fresh: bool = False) -> Fleet:
        return await self._fleet.look(fresh, self.now())

    async def reservations(self) -> ReservationSet:
        return await self._reservations.read()

    async def write_reservations(self, entries: tuple[NodeReservation, ...], version: str) -> None:
        await self._reservations.write(entries, version)

    def node_reports(self) -> tuple[NodeReport, ...]:
        """The nodes as they were last seen."""
        return self._fleet.reports()

    def job_summaries(self) -> tuple[JobSummary, ...]:
        """Return all jobs in short, from any thread."""
        cached = (self.job_cache.get(uid) for uid in self.job_cache.uids())
        return tuple(job.summary for job in cached if job is not None)

    def current_attempt(self, uid: str) -> int | None:
        """Return the current attempt of a job that has not ended, from any thread."""
        job = self.job_cache.get(uid)
        return None if job is None or job.status.phase.terminal else job.status.attempt

    def enqueue(self, uid: str) -> None:
        """Queue the job, because another source has something about it."""
        self._changes.enqueue(uid)

    def phases(self) -> dict[str, int]:
        """Return the number of jobs in each phase. It may be called from any thread."""
        return Counter(str(job.status.phase) for job in self.job_summaries())

    async def close(self) -> None:
        await self._creator.close()

    def _node_changed(self, name: str) -> None:
        for uid in {pod.job_uid for pod in self.pods.all() if pod.node == name}:
            self.enqueue(uid)
        self.enqueue(FLEET)

    def _forget(self, uid: str) -> None:
        self._creator.forget(uid)
        self.gangs.forget(uid)
        self.pods.forget_leaving(uid)
        self._writer.overtaken.discard(uid)
        self._commits.forget(uid)
        self._reads.warnings.forget(uid)

    def _notes(self, job: CachedJob) -> tuple[str, ...]:
        """Return a remark for the next attempt's message: which of our settings the user replaced."""
        gang, env = job.spec.gang, job.spec.runtime.env
        if not gang.gpus_per_node or job.status.phase not in (Phase.QUEUED, Phase.RESTARTING):
            return ()
        places = next((e.nodes for e in self._reservations.of(job.uid) if not e.nominated), job.status.gang.nodes)
        kind = next((kind for node in places[:1] if (kind := self._instance_type(node))), "")
        net = plan(kind or (gang.instance_types or ("",))[0], gang, {item.name: item.value for item in env})
        return tuple(f"by your settings {words}" for words in net.overrides)

    def _instance_type(self, node: str) -> str:
        facts = self.nodes.get(node)
        return facts.node.instance_type if facts else ""

    def _left(self, uid: str, pods: tuple[PodState, ...]) -> tuple[PodState, ...]:
        """The pod that was asked to end and has done so before we looked: it did not just vanish."""
        here = {pod.uid for pod in pods if not pod.over}
        return tuple(pod for pod in self.pods.leaving(uid) if pod.uid not in here)

    def _waiting(self, job: CachedJob, pods: tuple[PodState, ...]) -> str:
        """Return why another scheduler has not placed the starting gang."""
        gang = self.gangs.of(job)
        if gang.places or job.status.phase is not Phase.STARTING:
            return ""
        return gang.waiting(tuple(gang_of(pods, job.status)), self.gangs.group(job))

    def _open_reservation(self, job: CachedJob) -> tuple[NodeReservation, ...]:
        """Grant the job's request with places that have no node yet, because another scheduler finds the nodes."""
        if job.status.phase is not Phase.QUEUED:
            return ()
        size = job.spec.gang_sizes()[0]
        kind = job.spec.gang.scheduler.kind
        nodes = tuple(f"{kind}-{index}" for index in range(size))
        return (
            NodeReservation(job.uid, job.status.reservation, job.namespace, nodes, kind, "on-demand", at=self.now()),
        )
