"""Starts a worker of a job: with its secrets, its fence and its share of the machine, or says why it can't start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from muster.local.cluster import LocalCluster
from muster.operator.core.decision import CreateWorker
from muster.operator.core.observed import ObservedWorker
from muster.operator.local import processes
from muster.operator.local.environment import WorkerStart, ignored, worker_environment
from muster.operator.local.fences import FenceFiles
from muster.operator.local.nodes import VirtualNodes, rendezvous_port
from muster.operator.local.processes import WorkerKey, WorkerRecord
from muster.operator.local.reading import note
from muster.operator.local.secrets import RefusedWorkers, SecretMissing, SecretReader
from muster.operator.local.workers import LocalWorkers
from muster.operator.world import VersionConflict
from muster.words.job import TrainingJob
from muster.words.state_folder import StateFolder
from muster.words.status import Phase


class WorkerStarter:
    """`how` is the same for all workers of this state folder; `secret_key` has the keys of secrets."""

    def __init__(
        self,
        state: StateFolder,
        cluster: LocalCluster,
        nodes: VirtualNodes,
        workers: LocalWorkers,
        fences: FenceFiles,
        how: WorkerStart,
        secret_key: Path | None,
    ) -> None:
        self._state, self._nodes, self._workers, self._fences = state, nodes, workers, fences
        self.how = how
        self._secrets = SecretReader(cluster, secret_key or state.secret_key)
        self._refused = RefusedWorkers()

    def start(self, job: TrainingJob, action: CreateWorker) -> WorkerRecord | None:
        """Start a worker. Return None if it exists already, or can't start (see `refused`). Raises VersionConflict."""
        uid = job.metadata.uid
        id, current = action.id, job.status.current(action.id.worker)
        if (current, job.status.phase) != (id, Phase.STARTING):
            raise VersionConflict(f"{id} of job {uid} is not one that starts: {current} is, and {job.status.phase}")
        key = WorkerKey.of(uid, id)
        if processes.exists(self._state, key):
            return None
        count = job.spec.gang.gpus_per_node
        gpus = self._nodes.gpus(action.node, count, self._workers.living()) if count else ()
        port = rendezvous_port(self._state, uid, id.attempt)
        try:
            secrets = self._secrets.variables(job)
        except SecretMissing as missing:
            self._refused.add(key, action.node, str(missing))
            return None
        self._refused.drop(key)
        start = replace(self.how, secrets=secrets)
        self._fences.tell(uid, job.status)
        fence = self._fences.address(uid)
        environment = worker_environment(self._state, fence, job, action, port, gpus, start)
        self._workers.reopen(key)
        if words := ignored(job.spec.runtime):
            note(self._state, key, f"muster: runtime.{', runtime.'.join(words)} mean nothing on this machine: ignored")
        return processes.start(self._state, key, action.node, self.how.command, environment, gpus)

    def concealed(self, job: TrainingJob) -> dict[str, str]:
        """Return the values to hide in the workers' output, by any name."""
        own = {variable.name: variable.value for variable in job.spec.runtime.env}
        return own | {f"SECRET_{number}": value for number, value in enumerate(self._secrets.values(job))}

    def refused(self, uid: str) -> Iterator[ObservedWorker]:
        """The job's workers that could not start by what it asks for."""
        return self._refused.of_job(uid)

    def drop(self, key: WorkerKey) -> bool:
        """Forget a worker that could not start; whether it was one."""
        return self._refused.drop(key)

    def forget(self, uid: str) -> None:
        self._refused.forget(uid)
