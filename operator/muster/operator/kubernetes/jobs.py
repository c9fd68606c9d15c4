"""The TrainingJobs of all namespaces, understood once per version and kept small.

Specs repeat (a sweep is a hundred jobs that differ in one number), so equal parts are kept once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from muster.kube.client import Object
from muster.kube.timestamps import seconds_of
from muster.operator.core.fleet import JobSummary
from muster.words.base import InvalidDocument, known_part, parse
from muster.words.gang import Resources
from muster.words.job import JobSpec
from muster.words.names import DEFAULT_PROJECT, Label
from muster.words.status import STATUS_VERSION, GangStatus, JobStatus, Phase

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class CachedJob:
    """One TrainingJob.

    `version` is its resourceVersion. `queue` is the Kueue label's value, which names other schedulers' queues, too.
    The API knows the job as `id`. `applied` says that somebody owns fields of it by server-side apply, so the API
    server must go on tracking whose is what. `tracked` says that it does so for nobody, at the price of each write.

    `unreadable` says why the stored object can't be understood (a newer Muster wrote it); it is then not touched.
    `invalid` says why the spec is refused, although the schema let it in; the job then can't run. In both cases `spec`
    is a stand-in.
    """

    summary: JobSummary
    version: str
    generation: int
    finalizers: tuple[str, ...]
    queue: str
    id: str
    applied: bool = False
    tracked: bool = False
    unreadable: str = ""
    invalid: str = ""

    def __hash__(self) -> int:
        return hash((self.uid, self.version))

    @property
    def uid(self) -> str:
        return self.summary.uid

    @property
    def namespace(self) -> str:
        return self.summary.namespace

    @property
    def name(self) -> str:
        return self.summary.name

    @property
    def spec(self) -> JobSpec:
        return self.summary.spec

    @property
    def status(self) -> JobStatus:
        return self.summary.status


class JobStore:
    """All jobs as last read, by uid. `enqueue` is called with the uid of each job that changed. Specs are read as
    `spec_type`, which refuses those that can't run. A job whose workers ask for no CPU or memory has those of
    `resources`.
    """

    def __init__(
        self, enqueue: Callable[[str], None], spec_type: type[JobSpec], resources: Resources = Resources()
    ) -> None:
        self._enqueue, self._spec_type, self._resources = enqueue, spec_type, resources
        self._jobs: dict[str, CachedJob] = {}
        self._parts: dict[tuple[type, bytes], Any] = {}

    def get(self, uid: str) -> CachedJob | None:
        return self._jobs.get(uid)

    def has(self, uid: str, version: str) -> bool:
        """Return whether the job is known in that version or a newer one."""
        job = self._jobs.get(uid)
        return job is not None and int(job.version) >= int(version)

    def all(self) -> Iterator[CachedJob]:
        yield from self._jobs.values()

    def uids(self) -> tuple[str, ...]:
        return tuple(self._jobs)

    def put(self, item: Object) -> None:
        self.keep(item)

    def keep(self, item: Object) -> CachedJob:
        """The job as it is now known, which may be newer than `item`."""
        uid = item["metadata"]["uid"]
        cached = self._jobs.get(uid)
        if cached is not None and self.has(uid, item["metadata"]["resourceVersion"]):
            return cached
        job = self._jobs[uid] = self._read(item, cached)
        self._enqueue(uid)
        return job

    def written(self, job: CachedJob, item: Object, status: JobStatus | None = None) -> CachedJob:
        """We wrote this status, or only metadata, which the answer has. Returns the job as it is now known."""
        meta = item["metadata"]
        if self.has(job.uid, meta["resourceVersion"]) or int(meta.get("generation", 1)) != job.generation:
            return self._jobs.get(job.uid, job)  # known, or somebody changed the spec, which the watch will tell
        summary = replace(job.summary, status=status or job.status, deleting="deletionTimestamp" in meta)
        finalizers = tuple(meta.get("finalizers") or ())
        tracked = bool(meta.get("managedFields")) and not job.applied
        job = replace(job, summary=summary, version=meta["resourceVersion"], finalizers=finalizers, tracked=tracked)
        self._jobs[job.uid] = job
        return job

    def drop(self, item: Object) -> None:
        self.forget(item["metadata"]["uid"])

    def keep_only(self, uids: set[str]) -> None:
        for uid in self._jobs.keys() - uids:
            self.forget(uid)
        if len(self._parts) > 4 * len(self._jobs) + 64:
            self._parts = {}

    def forget(self, uid: str) -> None:
        if self._jobs.pop(uid, None) is not None:
            self._enqueue(uid)

    def _read(self, item: Object, cached: CachedJob | None) -> CachedJob:
        meta = item["metadata"]
        generation = int(meta.get("generation", 1))
        labels, managed = meta.get("labels") or {}, meta.get("managedFields") or ()
        applied = any(entry.get("operation") == "Apply" for entry in managed)
        if cached is not None and cached.generation == generation and not cached.unreadable:
            spec, invalid = cached.spec, cached.invalid
        else:
            spec, invalid = self._spec(item.get("spec"))
        created_at = seconds_of(meta["creationTimestamp"])
        status, unreadable = _status(item.get("status") or {}, created_at)
        if invalid and status.schema_version > STATUS_VERSION:
            unreadable = unreadable or f"its spec is of a newer Muster: {invalid}"
        return CachedJob(
            summary=JobSummary(
                uid=meta["uid"],
                namespace=meta["namespace"],
                name=meta["name"],
                created_at=created_at,
                deleting="deletionTimestamp" in meta,
                spec=spec,
                status=status,
                project=labels.get(Label.PROJECT) or DEFAULT_PROJECT,
                owner=labels.get(Label.OWNER, ""),
            ),
            version=meta["resourceVersion"],
            generation=generation,
            finalizers=tuple(meta.get("finalizers") or ()),
            queue=labels.get(QUEUE_LABEL, ""),
            id=labels.get(Label.JOB_ID) or meta["uid"],
            applied=applied,
            tracked=bool(managed) and not applied,
            unreadable=unreadable,
            invalid=invalid,
        )

    def _spec(self, document: object) -> tuple[JobSpec, str]:
        if isinstance(document, dict):
            document = known_part(self._spec_type, document)
        try:
            spec = parse(self._spec_type, document, "spec")
        except InvalidDocument as error:
            return _STAND_IN, "; ".join(str(problem) for problem in error.problems)
        return self._shared(with_resources(spec, self._resources)), ""

    def _shared(self, model: M) -> M:
        """The one that is kept of all that are equal, made of such parts. Known by a digest, which is smaller."""
        key = (type(model), hashlib.blake2b(model.model_dump_json().encode(), digest_size=16).digest())
        if (shared := self._parts.get(key)) is None:
            parts = {name: self._shared(value) for name, value in model if isinstance(value, BaseModel)}
            shared = self._parts[key] = model.model_copy(update=parts) if parts else model
        return shared


def with_resources(spec: JobSpec, default: Resources) -> JobSpec:
    """The spec with the installation's default where its workers ask for nothing.

    Filled in where the job is read, so that placement, pods and explanations go by the same numbers.
    """
    own = spec.gang.resources
    asked = own.model_copy(update={"cpu": own.cpu or default.cpu, "memory": own.memory or default.memory})
    if asked == own:
        return spec
    return spec.model_copy(update={"gang": spec.gang.model_copy(update={"resources": asked})})


# Never runs; it only keeps the place of a spec that can't be read.
_STAND_IN = JobSpec.model_construct(**{
    name: field.get_default(call_default_factory=True)
    for name, field in JobSpec.model_fields.items()
    if not field.is_required()
})  # fmt: skip


def _status(document: Object, created_at: float) -> tuple[JobStatus, str]:
    """The status; what the reservations need of it, and why the rest is not readable, if a newer Muster wrote it."""
    if not document:
        return JobStatus(queued_at=created_at, since=created_at), ""
    try:
        return JobStatus.model_validate(document), ""
    except ValidationError as error:
        gang = document.get("gang") or {}
        status = JobStatus.model_construct(
            schema_version=STATUS_VERSION + 1,
            phase=Phase.RUNNING,
            attempt=int(document.get("attempt") or 0),
            reservation=int(document.get("reservation") or 0),
            gang=GangStatus.model_construct(nodes=tuple(gang.get("nodes") or ()), pool=gang.get("pool"), capacity=None),
        )
        fault = error.errors(include_url=False)[0]
        return (
            status,
            f"its status has words that this Muster does not know: {json.dumps(fault['loc'])}: {fault['msg']}",
        )
