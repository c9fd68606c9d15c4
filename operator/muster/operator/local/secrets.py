"""Secrets of jobs on one machine: opened where a worker starts, and said plainly where one is not there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from muster.local.cluster import LocalCluster
from muster.operator.core.observed import ObservedWorker, Rejection, WorkerState
from muster.operator.local.processes import WorkerKey
from muster.secrets.box import SecretBox, SecretsLocked
from muster.words.environment import SecretUse, secret_uses, steers_processes, variables_of
from muster.words.job import TrainingJob
from muster.words.names import DEFAULT_PROJECT, Label


class SecretMissing(Exception):
    """A worker can't start for want of a secret; the message says which and what to do."""


class SecretReader:
    """The secrets of the projects' jobs. `key_file` has the keys that open them."""

    def __init__(self, cluster: LocalCluster, key_file: Path) -> None:
        self._cluster, self._box = cluster, SecretBox(key_file)

    def variables(self, job: TrainingJob) -> dict[str, str]:
        """Return the workers' variables from secrets, by name. Raises SecretMissing."""
        project, env = (job.metadata.labels.get(Label.PROJECT) or DEFAULT_PROJECT), job.spec.runtime
        kept: Mapping[tuple[str, str], str] | None = None
        values: dict[str, str] = {}
        for use in secret_uses(env.env, env.env_from):
            kept = self._cluster.secrets() if kept is None else kept
            payload = kept.get((project, use.secret))
            if payload is None:
                if use.optional:
                    continue
                raise SecretMissing(_missing(use, project, sorted(name for owner, name in kept if owner == project)))
            data = self._opened(project, use.secret, payload)
            if use.key is not None and use.key not in data and not use.optional:
                there = ", ".join(sorted(data))
                words = f"secret {use.secret!r} of project {project!r} has no entry {use.key!r} (it has {there})"
                raise SecretMissing(f"{words}; {use.path} names it: set it by `muster secrets set {use.secret}`")
            for name, key in variables_of(use, tuple(data)).items():
                if not steers_processes(name):  # refused at submission; the secret may have changed since
                    values[name] = data[key]
        return values

    def values(self, job: TrainingJob) -> tuple[str, ...]:
        """Return the values to hide in the workers' output; none if they can't be read any more."""
        try:
            return tuple(self.variables(job).values())
        except SecretMissing:
            return ()

    def _opened(self, project: str, name: str, payload: str) -> dict[str, str]:
        try:
            return self._box.open(project, name, payload)
        except SecretsLocked as locked:
            raise SecretMissing(str(locked)) from None


class RefusedWorkers:
    """Workers that could not start by what their job asks for. Kept in memory: the next operator finds out anew."""

    def __init__(self) -> None:
        self._refused: dict[WorkerKey, ObservedWorker] = {}

    def add(self, key: WorkerKey, node: str, why: str) -> None:
        now = time.time()
        self._refused[key] = ObservedWorker(
            key.worker, key.attempt, node, WorkerState.STARTING, now, reason=why, since=now,
            rejection=Rejection.PERMANENT, incarnation=key.incarnation,
        )  # fmt: skip

    def drop(self, key: WorkerKey) -> bool:
        """Return whether it was one of them."""
        return self._refused.pop(key, None) is not None

    def of_job(self, uid: str) -> Iterator[ObservedWorker]:
        return (worker for key, worker in list(self._refused.items()) if key.job_uid == uid)

    def forget(self, uid: str) -> None:
        for key in [key for key in self._refused if key.job_uid == uid]:
            self.drop(key)


def _missing(use: SecretUse, project: str, keys: list[str]) -> str:
    there = f"it has {', '.join(keys[:20])}" if keys else "it has none"
    words = f"project {project!r} has no secret {use.secret!r} ({there}); {use.path} names it"
    return f"{words}: set it by `muster secrets set {use.secret}` and clone the job"
