"""The environment that a worker starts with."""

from __future__ import annotations

import os

from muster.contract.address import job_folder
from muster.contract.base import dump_json
from muster.contract.layout import State
from muster.contract.names import Env, Rendezvous
from muster.contract.notices import NOTICES_ENV
from muster.contract.spec import JobSpec, Runtime, TrainingJob, worker_config
from muster.local.cluster import LocalCluster
from muster.operator.core.decision import CreateWorker
from muster.operator.local.processes import WorkerKey, marks
from muster.operator.settings import cores
from muster.storage.settings import platform_variables

# The operator's own settings, and what an enclosing torchrun set for its ranks, are none of the worker's business.
_OURS = ("MUSTER_", "PET_", "TORCHELASTIC_")
_RANKS = frozenset({"MASTER_ADDR", "MASTER_PORT"}).union(
    *({f"{of}RANK", f"{of}WORLD_SIZE"} for of in ("", "LOCAL_", "GROUP_", "ROLE_"))
)


def worker_environment(
    state: State, cluster: LocalCluster, job: TrainingJob, action: CreateWorker, port: int, gpus: tuple[int, ...]
) -> dict[str, str]:
    """The whole environment: this process's own without what is ours, the job's runtime.env, then what Muster sets."""
    gang, meta = job.spec.gang, job.metadata
    key = WorkerKey(meta.uid, action.attempt, action.worker)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OURS) and name not in _RANKS}
    ranks = len(action.nodes) * gang.ranks_per_node
    threads = {"OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", str(max(1, cores() // ranks)))}
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus or not gang.gpus_per_node else {}
    device = {} if gang.gpus_per_node else {Env.DEVICE: "cpu"}
    return (
        inherited
        | threads
        | {"PYTHONUNBUFFERED": "1"}
        | {variable.name: variable.value for variable in job.spec.runtime.env}
        | visible
        | device
        | marks(state, key)
        | platform_variables(os.environ)
        | {
            Env.JOB: meta.name,
            Env.RESUME_STEP: str(action.resume_step),
            Env.CHECKPOINT_URI: checkpoint_folder(state, job.spec, meta.uid),
            Env.CONFIG: dump_json(worker_config(job.spec, job.status)),
            Env.CACHE_DIR: str(state.cache),
            Env.FENCE: cluster.fence,
            NOTICES_ENV: str(state.notices / f"{action.node}.json"),
            Rendezvous.NODES: str(len(action.nodes)),
            Rendezvous.RANKS_PER_NODE: str(gang.ranks_per_node),
            Rendezvous.NODE_RANK: str(action.worker),
            Rendezvous.HOST: "127.0.0.1",
            Rendezvous.PORT: str(port),
        }
    )


def ignored(runtime: Runtime) -> tuple[str, ...]:
    """What the job asks of its runtime that means nothing here: a worker is a process of this machine, not a pod."""
    asked = {
        "image": runtime.image,
        "envFrom": runtime.env_from,
        "volumes": runtime.volumes,
        "serviceAccountName": runtime.service_account_name,
    }
    return tuple(name for name, value in asked.items() if value)


def checkpoint_folder(state: State, spec: JobSpec, uid: str) -> str:
    """The job's own folder under its checkpoint address, or under the state folder's where it names none."""
    return str(job_folder(spec.checkpoint.uri or str(state.checkpoints), uid))
