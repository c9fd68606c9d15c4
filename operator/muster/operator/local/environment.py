"""The environment that a worker starts with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from muster.local.gpus import pretends
from muster.local.sandbox import Sandbox, named_paths, state_problems, uploaded
from muster.operator.core.decision import CreateWorker
from muster.operator.local.processes import WorkerKey, marks
from muster.operator.settings import cores
from muster.storage.settings import platform_variables
from muster.words.address import job_folder, parse_address
from muster.words.base import dump_json
from muster.words.checkpoint import READERS
from muster.words.job import JobSpec, Runtime, TrainingJob, worker_config
from muster.words.names import DEFAULT_PROJECT, Env, Label, Rendezvous
from muster.words.notices import NOTICES_ENV
from muster.words.quantities import quantity
from muster.words.state_folder import StateFolder

# What of the platform's environment a worker gets: what its interpreter, libraries and devices are steered by, and how
# stores are reached. Tokens, addresses of databases, agents' sockets and whatever else the user of this machine has
# exported are not the job's.
_INHERITED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
})  # fmt: skip
_INHERITED_PREFIXES = (
    "LC_", "XDG_", "PYTHON", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_",
    "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "AWS_",
)  # fmt: skip
# Of these variables the paths are no leave to read there.
_NO_PATHS = ("HOME", "TMPDIR", "SHELL", "XDG_")


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Command of each worker, the variables that it inherits in addition to those that every worker needs, and those
    that come from secrets."""

    command: tuple[str, ...]
    inherited: tuple[str, ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict)
    readable: tuple[str, ...] = ()  # files and folders that every worker may read


def worker_environment(
    state: StateFolder,
    fence: str,
    job: TrainingJob,
    action: CreateWorker,
    port: int,
    gpus: tuple[int, ...],
    start: WorkerStart,
) -> dict[str, str]:
    """The whole environment: the little that is inherited, then what Muster sets. The job's own variables stand in it
    by names that no library knows, until the launcher has given up its rights and takes them in."""
    gang, meta = job.spec.gang, job.metadata
    key = WorkerKey.of(meta.uid, action.id)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in _INHERITED or name.startswith(_INHERITED_PREFIXES) or name in start.inherited
    }
    ranks = len(action.nodes) * gang.ranks_per_node
    threads = {"OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", str(max(1, cores() // ranks)))}
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus or not gang.gpus_per_node else {}
    device = {Env.DEVICE: "cuda" if gang.gpus_per_node and not pretends(os.environ) else "cpu"}
    temporary = str(state.jobs / meta.uid / "tmp")
    caches = {"TRITON_CACHE_DIR": f"{temporary}/triton", "CUDA_CACHE_PATH": f"{temporary}/cuda"}
    hub = _hub_variables(inherited, cache_folder(state, job)) if job.spec.program is not None else {}
    ours = (
        visible
        | device
        | marks(state, key)
        | platform_variables(os.environ)
        | job.spec.checkpoint.variables
        | {
            Env.JOB: meta.name,
            Env.RESUME_STEP: str(action.resume_step),
            Env.CHECKPOINT_URI: checkpoint_folder(state, job.spec, meta.uid),
            Env.CONFIG: dump_json(worker_config(job.spec, job.status)),
            Env.CACHE_DIR: str(cache_folder(state, job)),
            Env.FENCE: fence,
            Env.SANDBOX: dump_json(_sandbox(state, job, key, inherited, start)),
            "TMPDIR": temporary,  # of the job's attempts, so that what they compile there is compiled once
            NOTICES_ENV: str(state.notices / f"{action.node}.json"),
            Rendezvous.NODES: str(len(action.nodes)),
            Rendezvous.RANKS_PER_NODE: str(gang.ranks_per_node),
            Rendezvous.NODE_RANK: str(action.id.worker),
            Rendezvous.HOST: "127.0.0.1",
            Rendezvous.PORT: str(port),
        }
    )
    given = _own(job.spec.runtime, start.secrets)
    own = {f"{Env.OWN_PREFIX}{name}": value for name, value in given.items() if name not in ours}
    everything = caches | inherited | threads | {"PYTHONUNBUFFERED": "1"} | hub | own | ours
    if hub:
        everything.pop("HF_HUB_CACHE", None)  # it comes before HF_HOME
    return everything


def _own(runtime: Runtime, secrets: Mapping[str, str]) -> dict[str, str]:
    """The job's own variables. As in a pod, those of `env` win over what `envFrom` brings, and one whose source is
    optional and missing is not set."""
    given = {variable.name: variable.value for variable in runtime.env if variable.value_from is None}
    return {**secrets, **given}


def ignored(runtime: Runtime) -> tuple[str, ...]:
    """Return the runtime settings that have no meaning here: a worker is a process of this machine, not a pod."""
    asked = {
        "image": runtime.image,
        "envFrom": [source for source in runtime.env_from if not (source.get("secretRef") or {}).get("name")],
        "volumes": runtime.volumes,
        "serviceAccountName": runtime.service_account_name,
    }
    return tuple(name for name, value in asked.items() if value)


def checkpoint_folder(state: StateFolder, spec: JobSpec, uid: str) -> str:
    """The job's own folder under its checkpoint address, or under the state folder's where it names none."""
    return str(job_folder(spec.checkpoint.uri or str(state.checkpoints), uid))


def cache_folder(state: StateFolder, job: TrainingJob) -> Path:
    """Return the cache of prepared data, shared by the jobs of one project, which may read one another's data."""
    return state.cache / _project_of(job)


def _hub_home(inherited: Mapping[str, str]) -> Path:
    """Return the folder of the Hugging Face libraries of this machine's user."""
    return Path(inherited.get("HF_HOME") or Path.home() / ".cache" / "huggingface")


def _hub_variables(inherited: Mapping[str, str], cache: Path) -> dict[str, str]:
    """Return the variables by which a program's libraries find their downloads.

    They download models and convert data below HF_HOME. This machine's own is shared by all projects, so that a worker
    may only read it. A program gets one of its project, which outlives its attempts, with links to what this machine's
    holds. The token is still read from where `hf auth login` has put it.
    """
    home = _hub_home(inherited)
    return {
        "HF_HOME": str(cache / "huggingface"),
        "HF_TOKEN_PATH": str(home / "token"),
        Env.HUB_CACHE: inherited.get("HF_HUB_CACHE") or str(home / "hub"),
    }


def _project_of(job: TrainingJob) -> str:
    return job.metadata.labels.get(Label.PROJECT) or DEFAULT_PROJECT


def _sandbox(
    state: StateFolder, job: TrainingJob, key: WorkerKey, inherited: Mapping[str, str], start: WorkerStart
) -> Sandbox:
    """Return the worker's access. `inherited` are its variables from our own environment, whose paths we may grant."""
    spec, uid = job.spec, job.metadata.uid
    home = Path.home()
    # AWS libraries find credentials there, and a store is reached with them, as with the AWS_* variables.
    shared = (str(_hub_home(inherited)), str(home / ".aws"))
    given = (value.split(":") for name, value in inherited.items() if not name.startswith(_NO_PATHS))
    named = (origin.uri for origin in spec.input_commits().values() if origin.uri)
    commits = [address.local for address in map(parse_address, named) if address.scheme == "file"]
    ours = parse_address(checkpoint_folder(state, spec, uid))
    temporary = state.jobs / uid / "tmp"
    write = [key.folder(state), temporary, cache_folder(state, job)]
    write += [ours.local] if ours.scheme == "file" else []
    write += [folder / READERS for folder in commits if folder.is_dir()]  # whoever reads a commit leaves a mark there
    project = _project_of(job)
    files = uploaded(spec, state, project)
    return Sandbox(
        state=str(state.root),
        read=(*named_paths(spec), *start.readable, *shared, *(path for path in chain(*given) if os.path.isabs(path))),
        own_read=tuple(map(str, (state.jobs / uid, state.notices, *commits, *files))),
        own_write=tuple(map(str, write)),
        refused="; ".join(map(str, state_problems(spec, state, project))),
        memory_bytes=int(quantity(spec.gang.resources.memory)) or None,
    )
