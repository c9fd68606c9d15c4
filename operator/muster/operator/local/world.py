"""The operator's world on one machine: jobs in the local cluster, workers as process trees, commits where they lie.

Whatever blocks (SQLite, folders, scans, S3) runs in a thread, so a pass over one job never holds up another.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from muster.local.cluster import LocalCluster, NotFound
from muster.local.gpus import pretends
from muster.local.metric_pages import gathered
from muster.operator.commit_lookup import CommitLookup
from muster.operator.core.decision import Action, CreateWorker, RemoveJob, RemoveWorker
from muster.operator.core.fleet import Fleet, JobSummary
from muster.operator.core.observed import NodeReservation, ObservedJob, WorkerState
from muster.operator.local import processes
from muster.operator.local.documents import InvalidSpec, JobDocuments
from muster.operator.local.environment import WorkerStart, checkpoint_folder
from muster.operator.local.fences import FenceFiles
from muster.operator.local.fleet import LocalFleet
from muster.operator.local.nodes import VirtualNodes
from muster.operator.local.notices import NoticeFiles
from muster.operator.local.processes import WorkerKey, WorkerRecord
from muster.operator.local.reading import HeartbeatReader
from muster.operator.local.removal import WorkerRemovals
from muster.operator.local.starter import WorkerStarter
from muster.operator.local.watch import JobWatch
from muster.operator.local.workers import LocalWorkers
from muster.operator.world import ReservationSet, UnreadableDocument, VersionConflict
from muster.storage.listing import CommitListing
from muster.storage.small_files import write_whole
from muster.words.fleet import NodeReport
from muster.words.job import JobSpec, TrainingJob
from muster.words.names import Env
from muster.words.prices import Prices
from muster.words.state_folder import StateFolder
from muster.words.status import JobStatus

_ENTRIES = TypeAdapter(tuple[NodeReservation, ...])


class LocalWorld:
    """Jobs as processes of this machine, in the state folder `root` (an absolute path).

    Specs are read as `spec_type`, which refuses those that can't run. `worker_command` runs as each worker, which
    inherits the variables that `worker_env` names in addition to those that every worker needs, and may read the files
    and folders of `worker_paths`. `secret_key` has the keys of secrets; None for the file in `root`. `on_error` is
    called with a poll that failed. With `reads_only`, for somebody who looks while the operator works, nothing is
    written and nothing may be applied. Only one operator may act on a state folder; its process sees to that
    (`claim.py`).
    """

    def __init__(
        self,
        root: Path,
        nodes: VirtualNodes,
        worker_command: tuple[str, ...],
        spec_type: type[JobSpec],
        poll_seconds: float = 0.1,
        reads_only: bool = False,
        clock: Callable[[], float] = time.time,
        on_error: Callable[[Exception], None] = lambda error: None,
        worker_env: tuple[str, ...] = (),
        secret_key: Path | None = None,
        prices: Prices = Prices(),
        worker_paths: tuple[str, ...] = (),
    ) -> None:
        self.state = StateFolder(root)
        self.cluster = LocalCluster(self.state.cluster, spec_type)
        self._reads_only = reads_only
        self._fences = FenceFiles(self.state, self.cluster)
        self._documents = JobDocuments(self.cluster, self._fences, self.now)
        self._commits = CommitLookup(CommitListing().read_at)
        self._clock = clock
        heartbeats = self._heartbeats = HeartbeatReader(self.state, clock)
        self._notices = NoticeFiles(self.state.notices)
        self._workers = LocalWorkers(self.state, heartbeats, reads_only)
        self._removals = WorkerRemovals(self.state, self._removed)
        self._watch = JobWatch(self.state, self.cluster, heartbeats, poll_seconds, on_error)
        self._reservations = ReservationFile(self.state)
        self._fleet = LocalFleet(self.cluster, nodes, self._notices, prices, on_error)
        how = WorkerStart(worker_command, worker_env, readable=worker_paths)
        self._starter = WorkerStarter(self.state, self.cluster, nodes, self._workers, self._fences, how, secret_key)

    def now(self) -> float:
        return self._clock()

    def watch(self) -> AsyncIterator[str]:
        return self._watch.events()

    async def jobs(self) -> tuple[str, ...]:
        return await asyncio.to_thread(self.cluster.written_after, 0)

    async def observe(self, uid: str, fresh: bool = False) -> ObservedJob | None:
        under_way = self._removals.under_way()
        seen = await asyncio.to_thread(self._observe, uid, fresh, under_way)
        if seen is None:
            self._commits.forget(uid)
            return None
        if seen.status.attempt:
            # After the object and its workers: who is seen gone can commit nothing more.
            commits = await self._commits.look(uid, seen.checkpoint_uri)
            seen = replace(seen, committed=commits.committed, commits_unreadable=commits.unreadable)
        if not self._reads_only:
            for worker in seen.workers:
                if worker.state == WorkerState.RUNNING:
                    self._follow(WorkerKey.of(uid, worker.id))
        return seen

    async def write_status(self, uid: str, status: JobStatus, version: str) -> None:
        await asyncio.to_thread(self._documents.write_status, uid, status, version)

    async def apply(self, uid: str, action: Action) -> None:
        match action:
            case CreateWorker():
                record = await asyncio.to_thread(self._create, uid, action)
                if record is not None:
                    self._watch.follow(record)
                self._watch.enqueue(uid)
            case RemoveWorker():
                key = WorkerKey.of(uid, action.id)
                if self._starter.drop(key):
                    self._watch.enqueue(uid)
                else:
                    self._removals.remove(key, action.grace_seconds)
            case RemoveJob():
                self._starter.forget(uid)
                await asyncio.to_thread(self._documents.remove, uid)

    async def fleet(self, fresh: bool = False) -> Fleet:
        return await asyncio.to_thread(lambda: self._fleet.read(self.now(), fresh))

    async def reservations(self) -> ReservationSet:
        return await asyncio.to_thread(self._reservations.read)

    async def write_reservations(self, entries: tuple[NodeReservation, ...], version: str) -> None:
        await asyncio.to_thread(self._reservations.write, entries, version)

    def summaries(self) -> tuple[JobSummary, ...]:
        """Return all jobs in short, as of now."""
        return self._fleet.jobs.refresh()

    def node_reports(self) -> tuple[NodeReport, ...]:
        """The virtual nodes, each with what its notices say."""
        return self._fleet.reports()

    def job_summaries(self) -> tuple[JobSummary, ...]:
        """Return all jobs in short, as of the last admission."""
        return self._fleet.jobs.job_summaries()

    def rank_pages(self) -> str:
        """Return the metrics of all ranks on this machine: their own ports are random and open to this machine only."""
        jobs = {job.uid: job for job in self._fleet.jobs.job_summaries()}
        places = [
            ({
                "job_name": jobs[key.job_uid].name, "job_namespace": jobs[key.job_uid].namespace,
                "job_uid": key.job_uid, "attempt": str(key.attempt), "worker": str(key.worker), "rank": str(beat.rank),
            }, beat.metrics_port)
            for key in self._watch.followed() if key.job_uid in jobs
            for beat in self._heartbeats.read(key) if beat.metrics_port
        ]  # fmt: skip
        return gathered(places)

    def current_attempt(self, uid: str) -> int | None:
        """Return the current attempt of a job that has not ended, from any thread."""
        try:
            status = self.cluster.get(uid).status
        except (NotFound, ValidationError):
            return None
        return None if status.phase.terminal else status.attempt

    def enqueue(self, uid: str) -> None:
        """Queue the job, because another source has something about it."""
        self._watch.enqueue(uid)

    def phases(self) -> dict[str, int]:
        """Return the number of jobs in each phase, as of the last admission."""
        return Counter(str(job.status.phase) for job in self._fleet.jobs.job_summaries())

    async def adopt(self) -> tuple[tuple[WorkerRecord, ...], tuple[WorkerKey, ...]]:
        """Take over what runs here. Returns the gangs' workers, and those of jobs that are no more: these are ended."""
        living = await asyncio.to_thread(self._workers.living)
        uids = set(await self.jobs())
        strays = tuple(record.key for record in living if record.job_uid not in uids)
        for key in strays:
            self._removals.remove(key, 0.0)
        ours = tuple(record for record in living if record.job_uid in uids)
        for record in ours:
            await asyncio.to_thread(self._fences.announce_written, record.job_uid)
            self._watch.follow(record)
        return ours, strays

    async def stop_workers(self, grace_seconds: float) -> int:
        """End every worker of this state folder, with time to commit; returns how many there were."""
        living = await asyncio.to_thread(self._workers.living)
        # Not out of sight: that they were asked to stop, and what they committed, is for the next operator to see.
        removals = WorkerRemovals(self.state, self._watch.unfollow)
        for record in living:
            removals.remove(record.key, grace_seconds)
        await removals.finish()
        return len(living)

    def close(self) -> None:
        """Release everything; the workers continue."""
        self._removals.abandon()

    def _observe(self, uid: str, fresh: bool, removing: frozenset[WorkerKey]) -> ObservedJob | None:
        try:
            job = self._documents.read(uid)
        except NotFound:
            return None
        except InvalidSpec as invalid:
            self._documents.refuse(uid, str(invalid), reads_only=self._reads_only)
            return None
        meta, status = job.metadata, job.status
        folder = checkpoint_folder(self.state, job.spec, uid)
        workers = self._workers.of_job(uid, self._starter.concealed(job), removing, fresh)
        workers += tuple(self._starter.refused(uid))
        return ObservedJob(
            uid=uid,
            namespace=meta.namespace,
            name=meta.name,
            created_at=meta.creation_timestamp,
            generation=meta.generation,
            deleting=meta.deletion_timestamp is not None,
            version=meta.resource_version,
            fresh=fresh,
            spec=job.spec,
            status=status,
            workers=workers,
            checkpoint_uri=folder,
            signals=self._notices.signals(status, workers),
            nodes_unfit=self._fleet.unfit(status.gang.nodes),
            reservations=tuple(entry for entry in self._reservations.read().entries if entry.uid == uid),
            now=self.now(),
            notes=self._notes(job),
        )

    def _notes(self, job: TrainingJob) -> tuple[str, ...]:
        """Return a remark for the next attempt's message: that its GPUs are pretended."""
        pretended = job.spec.gang.gpus_per_node and pretends(os.environ)
        return (f"its GPUs are pretended ({Env.PRETEND_GPUS}), so it trains on the CPU",) if pretended else ()

    def _create(self, uid: str, action: CreateWorker) -> WorkerRecord | None:
        return self._starter.start(self._documents.read(uid), action)

    def _follow(self, key: WorkerKey) -> None:
        if not self._watch.follows(key) and (record := processes.read_record(self.state, key)):
            self._watch.follow(record)

    def _removed(self, key: WorkerKey) -> None:
        self._watch.unfollow(key)
        self._workers.close(key)
        self._watch.enqueue(key.job_uid)


class ReservationFile:
    """Reservations of nodes, in one file of the state folder."""

    def __init__(self, state: StateFolder) -> None:
        self._path = state.root / "reservations.json"
        self._cached_set: ReservationSet | None = None

    def read(self) -> ReservationSet:
        """Raises UnreadableDocument when the file is there and makes no sense."""
        if self._cached_set is None:
            self._cached_set = self._load()
        return self._cached_set

    def write(self, entries: tuple[NodeReservation, ...], version: str) -> None:
        if version != self.read().version:
            raise VersionConflict(f"the reservations are at version {self.read().version}, not {version}")
        following = ReservationSet(entries, str(int(version) + 1))
        document = b'{"version":"%s","entries":%s}' % (following.version.encode(), _ENTRIES.dump_json(entries))
        write_whole(self._path, document.decode())
        self._cached_set = following

    def _load(self) -> ReservationSet:
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return ReservationSet((), "0")
        try:
            document = _DOCUMENT.validate_json(text)
            return ReservationSet(_ENTRIES.validate_python(document["entries"]), str(int(str(document["version"]))))
        except (ValidationError, KeyError, ValueError) as error:
            raise UnreadableDocument(
                f"{self._path} can't be understood: {error}. It says which job holds which nodes; "
                "stop the workers, then move it away"
            ) from error


_DOCUMENT = TypeAdapter(dict[str, object])
