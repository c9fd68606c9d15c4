"""Interface between the API and the cluster that carries TrainingJobs, and its implementation for the local cluster."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from pydantic import ValidationError

from muster.local.cluster import AlreadyExists, LocalCluster, NotFound, RawChange, VersionConflict
from muster.recipe.document import JobSpec
from muster.secrets.box import SecretBox, SecretsLocked
from muster.words.base import dump, known_part
from muster.words.fleet import FleetReport
from muster.words.quotas import ProjectQuota
from muster.words.state_folder import StateFolder

_CONFLICTS_MAX = 20


@dataclass(frozen=True)
class DesiredJob:
    """A row's desired state. A job that was `seen` in the cluster is not made again if it is there no more."""

    uid: str
    name: str
    namespace: str
    labels: dict[str, str]
    spec: JobSpec
    seen: bool


@dataclass(frozen=True)
class FoundJob:
    """A job that was made in the cluster by other means, readable or not, with its spec as `shown_spec` gives it.
    `created_at` is in seconds since the epoch."""

    uid: str
    name: str
    namespace: str
    labels: dict[str, str]
    spec: dict[str, Any]
    created_at: float


@dataclass(frozen=True)
class SecretName:
    """Name of a secret, with its project and the namespace where the project's jobs run."""

    project: str
    namespace: str
    name: str


class SecretRefused(Exception):
    """The cluster does not keep the secret; the message says why and what to do, and nothing of its value."""


class ApplyOutcome(StrEnum):
    DONE = "done"
    GONE = "gone"  # it was there once and is no more: nothing is left to apply
    NAME_HELD = "name_held"  # another object has the name
    RETRY = "retry"


@dataclass(frozen=True)
class ApplyResult:
    """Result of applying one DesiredJob. For NAME_HELD, `holder` is the uid of the job that has the name."""

    uid: str
    outcome: ApplyOutcome
    holder: str = ""
    error: str = ""


class JobCluster(Protocol):
    name: str

    async def apply(self, jobs: Sequence[DesiredJob]) -> list[ApplyResult]:
        """Make each job, or bring it up to date; repeating it changes nothing. One result per job, in their order."""
        ...

    async def discard(self, uid: str) -> None:
        """Ask for the object's removal (its operator removes it when the last worker is gone). Idempotent."""
        ...

    async def fetch_log(self, uid: str, attempt: int | None, worker: int | None) -> None:
        """Bring what those workers wrote so far into the state folder.

        `attempt` is None for the current one, and `worker` is None for all of them.
        """
        ...

    async def version(self) -> int: ...

    async def changes(self, after_version: int, limit: int) -> list[RawChange]: ...

    async def behind(self, after_version: int) -> int:
        """Return the number of changes after that version."""
        ...

    async def find(self, uid: str) -> FoundJob | None: ...

    async def write_quotas(self, quotas: Mapping[str, ProjectQuota | None]) -> None:
        """Say what these projects may hold from now on; None for no limit. Repeating it changes nothing."""
        ...

    async def write_limits(self, entries: Mapping[str, str]) -> None:
        """Apply these limits (core/admission_policy.py) to users who bypass the API, in place of the previous ones."""
        ...

    async def write_secret(self, secret: SecretName, data: Mapping[str, str]) -> None:
        """Keep these entries under that name in place of those before. Raises SecretRefused."""
        ...

    async def delete_secret(self, secret: SecretName) -> None:
        """Idempotent. Raises SecretRefused."""
        ...

    async def nodes(self) -> FleetReport | None:
        """Return the operator's latest report of the nodes, or None if it has never made one. Raises the cluster's own
        errors."""
        ...


def shown_spec(document: dict[str, Any]) -> dict[str, Any]:
    """The spec with its defaults. Of one that can't be read, which its operator says in the status, the parts that are
    mappings, and numbers that a column holds: a row of any job can be listed."""
    try:
        return dump(JobSpec.model_validate(known_part(JobSpec, document)))
    except ValidationError:
        return {
            key: part
            for key, part in document.items()
            if isinstance(part, dict) or (isinstance(part, int) and abs(part) < 1 << 31)
        }


class LocalJobCluster:
    """muster.local.LocalCluster, asked in a thread."""

    name = "local"

    def __init__(self, cluster: LocalCluster, secrets: SecretBox | None = None) -> None:
        self._cluster = cluster
        self._secrets = secrets or SecretBox(StateFolder(cluster.path.parent).secret_key)

    async def apply(self, jobs: Sequence[DesiredJob]) -> list[ApplyResult]:
        return await asyncio.to_thread(self._apply_all, jobs)

    async def fetch_log(self, uid: str, attempt: int | None, worker: int | None) -> None:
        """Do nothing: workers write to the folder themselves."""

    async def discard(self, uid: str) -> None:
        try:
            await asyncio.to_thread(self._cluster.delete, uid)
        except NotFound:
            pass

    async def version(self) -> int:
        return await asyncio.to_thread(self._cluster.version)

    async def changes(self, after_version: int, limit: int) -> list[RawChange]:
        return await asyncio.to_thread(self._cluster.raw_changes, after_version, limit)

    async def behind(self, after_version: int) -> int:
        return await asyncio.to_thread(self._cluster.count_changes, after_version)

    async def find(self, uid: str) -> FoundJob | None:
        try:
            job = await asyncio.to_thread(self._cluster.raw, uid)
        except NotFound:
            return None
        meta = job.metadata
        spec = shown_spec(json.loads(job.spec))
        return FoundJob(uid, meta.name, meta.namespace, meta.labels, spec, meta.creation_timestamp)

    async def write_quotas(self, quotas: Mapping[str, ProjectQuota | None]) -> None:
        for project, quota in quotas.items():
            await asyncio.to_thread(self._cluster.write_quota, project, quota)

    async def write_limits(self, entries: Mapping[str, str]) -> None:
        """Do nothing: on one machine only the owner of the API's files can bypass the API."""

    async def write_secret(self, secret: SecretName, data: Mapping[str, str]) -> None:
        def write() -> None:
            payload = self._secrets.seal(secret.project, secret.name, data)
            self._cluster.write_secret(secret.project, secret.name, payload)

        try:
            await asyncio.to_thread(write)
        except SecretsLocked as locked:
            raise SecretRefused(str(locked)) from None

    async def delete_secret(self, secret: SecretName) -> None:
        await asyncio.to_thread(self._cluster.write_secret, secret.project, secret.name, None)

    def renew_secrets(self) -> tuple[str, ...]:
        """Seal all secrets by the first key, where there are several. Returns what no key opens, as `project/name`.

        Raises SecretsLocked for an unusable key file.
        """
        if self._secrets.keys() < 2:
            return ()
        lost = []
        for (project, name), payload in self._cluster.secrets().items():
            if (renewed := self._secrets.renewed(payload)) is None:
                lost.append(f"{project}/{name}")
            else:
                self._cluster.write_secret(project, name, renewed)
        return tuple(lost)

    async def nodes(self) -> FleetReport | None:
        text = await asyncio.to_thread(self._cluster.nodes)
        return FleetReport.model_validate_json(text) if text is not None else None

    def _apply_all(self, jobs: Sequence[DesiredJob]) -> list[ApplyResult]:
        """Apply the jobs in one transaction, because PostgreSQL, which the submissions wait for, flushes to the same
        disk."""
        try:
            with self._cluster.together():
                return [self._apply(job) for job in jobs]
        except Exception as error:
            return [_again(job, error) for job in jobs]

    def _apply(self, job: DesiredJob) -> ApplyResult:
        try:
            return self._update(job) if job.seen else self._create(job)
        except sqlite3.OperationalError:  # the disk's, which ends the transaction that all are in
            raise
        except Exception as error:  # one bad row must not stop the others
            return _again(job, error)

    def _create(self, job: DesiredJob) -> ApplyResult:
        try:
            self._cluster.create(job.name, job.namespace, job.spec, job.labels, job.uid)
        except AlreadyExists as taken:
            return (
                self._update(job) if taken.uid == job.uid else ApplyResult(job.uid, ApplyOutcome.NAME_HELD, taken.uid)
            )
        return ApplyResult(job.uid, ApplyOutcome.DONE)

    def _update(self, desired: DesiredJob) -> ApplyResult:
        """Change only what REST offers to change; the rest of the spec belongs to whoever edited it in the cluster."""
        for _ in range(_CONFLICTS_MAX):
            try:
                job = self._cluster.get(desired.uid)
                requested = ("suspend", "cancel", "cancel_reason")
                spec = job.spec.model_copy(update={name: getattr(desired.spec, name) for name in requested})
                self._cluster.write_spec(desired.uid, spec, job.metadata.resource_version)
            except VersionConflict:
                continue  # a status was written between the two; both writers are short
            except NotFound:
                return ApplyResult(desired.uid, ApplyOutcome.GONE)
            return ApplyResult(desired.uid, ApplyOutcome.DONE)
        return ApplyResult(desired.uid, ApplyOutcome.RETRY, error="the job is being written all the time")


def _again(job: DesiredJob, error: Exception) -> ApplyResult:
    return ApplyResult(job.uid, ApplyOutcome.RETRY, error=f"{type(error).__name__}: {error}"[:300])
