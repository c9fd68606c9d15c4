"""Names that more than one module must spell alike: environment, labels, workers, exit codes, files of a worker."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum

GROUP = "muster.dev"
VERSION = "v1alpha1"
KIND = "TrainingJob"
FINALIZER = (
    f"{GROUP}/gang"  # on a TrainingJob until its gang is gone; set by whoever makes the job, else by the operator
)

# A job's name becomes part of pod and host names (`<job>-<attempt>-<worker>`), which end at 63 characters.
JOB_NAME = re.compile(r"[a-z]([-a-z0-9]{0,46}[a-z0-9])?")
# Of people and service accounts: a label's value, and ASCII only, so that no two names look alike.
PERSON_NAME = r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?"
DEFAULT_PROJECT = "default"  # of jobs whose project nobody names; always there
FILE_ID = re.compile(r"file-[0-9a-z]{24}")  # of an uploaded file, which a job may name where it takes an address
FIRST_PERSON = "admin"  # whose the first token is, and the jobs that nobody else owns
FIRST_INCARNATION = 1  # of a worker in an attempt; also of whatever names an attempt and a worker and no incarnation


@dataclass(frozen=True, slots=True, order=True)
class WorkerId:
    """Identity of one life of one worker of a job. A worker that is replaced keeps its attempt and its number, and gets
    the next incarnation (docs/decisions/0077)."""

    attempt: int
    worker: int
    """Number of the worker in its gang, from 0."""
    incarnation: int = FIRST_INCARNATION
    """Numbered from 1 in each attempt."""

    def __str__(self) -> str:
        later = f", incarnation {self.incarnation}" if self.incarnation != FIRST_INCARNATION else ""
        return f"worker {self.worker} of attempt {self.attempt}{later}"


class Rendezvous:
    """torchrun's own variables, set in every worker: how the ranks of a gang meet."""

    NODES = "PET_NNODES"
    RANKS_PER_NODE = "PET_NPROC_PER_NODE"
    NODE_RANK = "PET_NODE_RANK"  # the worker's number
    HOST = "PET_MASTER_ADDR"
    PORT = "PET_MASTER_PORT"


class Env:
    """Set in every worker."""

    JOB = "MUSTER_JOB"
    JOB_UID = "MUSTER_JOB_UID"
    ATTEMPT = "MUSTER_ATTEMPT"
    WORKER = "MUSTER_WORKER"
    INCARNATION = "MUSTER_INCARNATION"  # the worker's life within the attempt, from 1; unset: 1
    RESUME_STEP = "MUSTER_RESUME_STEP"  # 0: from the start; else the commit to load
    CHECKPOINT_URI = "MUSTER_CHECKPOINT_URI"  # <spec.checkpoint.uri>/<job uid>
    S3_KMS_KEY = "MUSTER_S3_KMS_KEY_ID"  # the KMS key of what is written to S3 (storage/settings.py)
    CONFIG = "MUSTER_CONFIG"  # JSON of WorkerConfig
    WORKER_DIR = "MUSTER_WORKER_DIR"  # heartbeats, exit record and dumps of this worker
    CACHE_DIR = "MUSTER_CACHE_DIR"  # prepared token stores, shared by the jobs of a node
    # `cuda` for a job that asks for GPUs, `cpu` for one that does not; unset: cuda where torch sees any.
    DEVICE = "MUSTER_DEVICE"
    PRETEND_GPUS = "MUSTER_PRETEND_GPUS"  # of `muster up`: give away GPUs that are not there; their jobs use the CPU
    SANDBOX = "MUSTER_SANDBOX"  # JSON of local.sandbox.Sandbox: all that a worker of this machine may reach
    OWN_PREFIX = "MUSTER_OWN_"  # of a worker of this machine: before the name of each variable that is the job's own
    # Of the ranks of a program of the user's own (docs/programs.md).
    CHECKPOINT_DIR = "MUSTER_CHECKPOINT_DIR"  # folder where the program may write its checkpoints
    RESUME_DIR = "MUSTER_RESUME_DIR"  # folder with the checkpoint to resume from; not set for a fresh start
    SOURCE_DIR = "MUSTER_SOURCE_DIR"  # the program's source
    INPUTS_DIR = "MUSTER_INPUTS_DIR"  # the program's inputs, each a folder by its name
    STOP_FILE = "MUSTER_STOP_FILE"  # file that appears when the program is asked to stop
    RESULTS = "MUSTER_RESULTS"  # file of named numbers that an evaluation writes
    HUB_CACHE = "MUSTER_HUB_CACHE"  # the machine's own cache of the Hugging Face hub, which programs may only read
    FENCE = "MUSTER_FENCE"  # where the job's current attempt is written (see worker/fence.py)
    # Of a pod, by the operator of a cluster.
    FENCE_TOKEN_FILE = "MUSTER_FENCE_TOKEN_FILE"  # noqa: S105 - a file's name: whose token the fence is asked with
    FENCE_CA_FILE = "MUSTER_FENCE_CA_FILE"
    REPORT_PORT = "MUSTER_REPORT_PORT"  # where the launcher answers with heartbeats and metrics
    TERMINATION_LOG = "MUSTER_TERMINATION_LOG"  # where the launcher leaves the exit record for the kubelet
    LAUNCHER_DIR = "MUSTER_LAUNCHER_DIR"  # where the launcher of programs is put for an image that has none
    POD_IP = "MUSTER_POD_IP"
    HOST_IP = "MUSTER_HOST_IP"
    PREFLIGHT = "MUSTER_PREFLIGHT"  # what follows a failed check


class Label:
    JOB = "muster.dev/job"
    JOB_UID = "muster.dev/job-uid"
    ATTEMPT = "muster.dev/attempt"
    WORKER = "muster.dev/worker"
    INCARNATION = "muster.dev/incarnation"  # of a pod; one without it is of the first
    PROJECT = "muster.dev/project"  # of a TrainingJob: the project that owns it
    OWNER = "muster.dev/owner"  # of a TrainingJob: who submitted it
    SWEEP = "muster.dev/sweep"  # of a TrainingJob that is a trial: its sweep's id
    TRIAL = "muster.dev/trial"  # and its number
    EVALUATION = "muster.dev/evaluation"  # of a TrainingJob that evaluates a checkpoint: the evaluation's id
    EVALUATED_STEP = "muster.dev/evaluated-step"  # and the checkpoint's step
    JOB_ID = "muster.dev/job-id"  # of a TrainingJob that the API made: its id there, and its checkpoint folder's name


class ExitCode(IntEnum):
    """Exit codes of a worker. Any other code is judged from signals, logs and the node's state."""

    DONE = 0
    USER_ERROR = 80
    OUT_OF_MEMORY = 81
    NUMERIC = 82
    STORAGE = 83
    PREFLIGHT_FAILED = 84
    PREEMPTED_COMMITTED = 85
    PREEMPTED_NO_COMMIT = 86
    STALE_ATTEMPT = 87
    PEER_LOST = 88  # a collective failed because another rank is gone: the cause lies there
    HUNG = 89  # its ranks did not move any more when they were told to stop, and were killed
    PREFLIGHT_EXCLUDE = 90  # preflight failed in a way that another try will not mend: leave this node


# What a worker in a cluster tells the operator: at its report port while it runs, and in its termination message.
HEARTBEATS_PATH = "/heartbeats"  # answers with the heartbeats of its ranks
LAST_HEARTBEAT = "lastHeartbeat"  # a key beside those of WorkerExit

# Files in MUSTER_WORKER_DIR, each replaced whole (written beside, then renamed).
EXIT_RECORD = "exit.json"  # WorkerExit, by the launcher, last of all
HEARTBEAT = "rank-{rank}.json"  # Heartbeat, by each rank
RANK_FAILURE = "rank-{rank}.failure.json"  # RankFailure, by a rank that knows why it ends
PROGRESS = "rank-{rank}.progress.json"  # of a program: steps, by the hook or muster.run in each rank
SAVER = "rank-{rank}.saver.json"  # {"pid"} of the process that writes a rank's checkpoints, of run.save
SAVE_REQUEST = "checkpoint-{step}.request.json"  # of a program: {"step", "folder"}, by muster.run
PREPARED = "prepared.json"  # of a program: what was fetched for it before its start, by trainer/programs/prepare.py
KEEPER_STATE = "keeper.json"  # of a program: what was committed of it, by trainer/programs/keeper.py
RANKS_ENDED = "ranks-ended.json"  # of a program: {"ranks": [{"rank", "exitCode"}]}, by the launcher
STOP = "stop.json"  # of a program: it is asked to stop, by the launcher; $MUSTER_STOP_FILE
STEP_LOG = "steps.jsonl"  # StepRecord lines, by rank 0 (also on standard output)
LOG = "log"  # standard output and error of the whole worker, by whoever starts it


def rank_mark(rank: int) -> str:
    """Return the prefix of this rank's lines in its worker's log, unless it is the worker's first rank."""
    return f"[rank {rank}] "


def heartbeat_rank(name: str) -> int | None:
    """The rank whose heartbeat the file of that name is; None for any other file."""
    rank = name.removeprefix("rank-").removesuffix(".json")
    return int(rank) if name == HEARTBEAT.format(rank=rank) and rank.isdecimal() else None


def worker_name(job: str, worker: WorkerId) -> str:
    """Return the name of a worker's pod. That of the first incarnation is also the host name of every later one, so
    that its peers find it at the same address. The letter keeps a later one's name apart from those of another job,
    whose name ends in a number."""
    first = f"{job}-{worker.attempt}-{worker.worker}"
    return first if worker.incarnation == FIRST_INCARNATION else f"{first}-i{worker.incarnation}"


API_VERSION = f"{GROUP}/{VERSION}"


class Phase(StrEnum):
    QUEUED = "Queued"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    STOPPING = "Stopping"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"

    @property
    def terminal(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED)
