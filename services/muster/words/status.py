"""The status of a TrainingJob: the only truth about it. Written by the operator alone."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from muster.words.base import Many, Record, Time
from muster.words.names import FIRST_INCARNATION, WorkerId
from muster.words.names import Phase as Phase
from muster.words.signals import Cause

# 1 wrote times as numbers; 2 writes them as RFC 3339.
STATUS_VERSION = 2


class GangStatus(Record):
    """The gang of the current attempt."""

    wanted: int = 0
    """Workers of this attempt."""
    ready: int = 0
    """Workers that run."""
    nodes: Many[str] = ()
    """The node of each worker, in the order of the workers; held until the gang is seen gone."""
    pool: str | None = None
    """The pool that the nodes belong to."""
    capacity: Literal["spot", "on-demand"] | None = None
    """Kind of the nodes' capacity, if known."""
    instance_type: str = ""
    """The instance type of the nodes, where they are all of one."""
    incarnations: Many[int] = ()
    """The current incarnation of each worker, in the order of the workers; after an attempt's end its last. One that is
    not listed has its first."""

    def incarnation(self, worker: int) -> int:
        """Return the current incarnation of that worker."""
        return self.incarnations[worker] if 0 <= worker < len(self.incarnations) else FIRST_INCARNATION


class Progress(Record):
    """Progress of the training."""

    at: Time = 0.0
    """Time at which this was seen."""
    step: int = 0
    """The last step that was done."""
    steps: int | None = None
    """The steps of the whole job, once they are known."""
    loss: float | None = None
    """The training loss of the last step."""
    evaluation_loss: float | None = None
    """The loss of the last evaluation."""
    evaluation_step: int | None = None
    """The step that the last evaluation followed."""
    values: dict[str, float] = {}
    """Values that the objective reports of the last step by name, such as rewards/margins."""
    evaluation_values: dict[str, float] = {}
    """All other metrics of the last evaluation by name, such as perplexity or code/loss."""
    tokens_per_second: float | None = None
    """Tokens per second of the whole gang."""
    mfu: float | None = None
    """The share of the devices' peak that the model's arithmetic takes, where the peak is known."""
    eta_seconds: float | None = None
    """Seconds that are left at the present speed."""


class CheckpointStatus(Record):
    """The newest checkpoint."""

    step: int
    """The step of the newest checkpoint."""
    committed_at: Time
    """Time at which it was published."""
    uri: str
    """The job's checkpoint folder."""
    best_step: int | None = None
    """The step of the checkpoint with the best evaluation.metric."""


class Restart(Record):
    """One charge on a budget, kept for the sliding window."""

    at: Time
    """Time at which the attempt failed."""
    cause: Cause
    """Cause to which it is charged."""


class Restarts(Record):
    """Number of restarts of the gang."""

    total: int = 0
    """Restarts since the job was created."""
    by_cause: dict[str, int] = {}
    """The same by cause."""
    recent: Many[Restart] = ()
    """Restarts within the window of the budgets."""
    without_progress: int = 0
    """Attempts in a row that made no new checkpoint."""


class Failure(Record):
    """Failure of an attempt."""

    cause: Cause
    """The kind of failure, which has a budget of its own."""
    attempt: int
    """The attempt that failed."""
    at: Time
    """Time at which it failed."""
    message: str
    """Description of the failure."""
    worker: int | None = None
    """The worker that failed first, where it is known."""
    incarnation: int = FIRST_INCARNATION
    """The incarnation of that worker."""
    rank: int | None = None
    """The rank that failed first, where it is known."""
    node: str | None = None
    """The node on which it failed."""
    step: int | None = None
    """The last step of that rank."""
    exit_code: int | None = None
    """The exit code of that rank, as a shell would show it."""
    log_tail: str = ""
    """The last lines that it wrote."""


class NodeFault(Record):
    """A failure charged to a node; enough of them exclude it."""

    node: str
    """The node."""
    at: Time
    """Time at which it was charged."""
    why: str
    """Description of what happened there."""


class ExcludedNode(Record):
    """A node that the job avoids for a while."""

    node: str
    """The node."""
    until: Time
    """Time at which it may be used again."""
    why: str
    """Reason why it is avoided."""


class GoodputState(StrEnum):
    """Every second from creation to the end is in exactly one of these."""

    QUEUE = "queue"
    SUSPENDED = "suspended"
    STARTING = "starting"  # workers are made, processes start, ranks meet
    LOADING = "loading"  # data preparation, reading a commit
    PRODUCTIVE = "productive"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    DATA_WAIT = "data_wait"
    STALLED = "stalled"
    LOST = "lost"  # steps after the last commit, trained again
    DRAINING = "draining"  # from the end of training until the gang is gone


class GoodputAccount(Record):
    """Time account of the job: every second since its creation is in exactly one state."""

    seconds: dict[str, float] = {}
    """Seconds by state, up to `since`."""
    since: Time = 0.0
    """The moment up to which the seconds are accounted for."""

    def shares(self) -> dict[str, float]:
        """The same as fractions that sum to 1 (empty before the first second)."""
        total = sum(self.seconds.values())
        return {state: value / total for state, value in self.seconds.items()} if total > 0 else {}


AttemptOutcome = Literal[
    "waiting", "running", "succeeded", "failed", "suspended", "cancelled", "preempted", "resized", "rejected"
]
LIVING = ("waiting", "running")


class Attempt(Record):
    """One life of the gang, for the history."""

    number: int
    """Attempts are numbered from 1."""
    created_at: Time
    """Time at which the attempt was started."""
    nodes: Many[str] = ()
    """The node of each worker."""
    workers: int = 0
    """Number of its workers."""
    gpus_per_worker: int = 0
    """GPUs of each worker."""
    instance_type: str = ""
    """The instance type of the nodes, where it is known."""
    capacity: Literal["spot", "on-demand"] | None = None
    """Kind of the nodes' capacity, if known."""
    world_size: int = 0
    """Ranks of the gang."""
    resume_step: int = 0
    """The step of the checkpoint that it started from; 0 starts from the beginning."""
    first_step_at: Time | None = None
    """Time at which it had done its first step."""
    ended_at: Time | None = None
    """Time at which its last worker was gone."""
    last_step: int | None = None
    """The last step that it did."""
    lost_steps: int = 0
    """Steps after its last checkpoint, which are trained again."""
    cause: Cause | None = None
    """Cause of its failure; none while it lives and when it ended well."""
    failed_step: int | None = None
    """The last step of the rank that failed."""
    outcome: AttemptOutcome = "running"
    """Outcome of the attempt. An attempt that another scheduler has not placed is `waiting`, and costs nothing yet."""
    message: str = ""
    """Description of its end."""
    seconds: dict[str, float] = {}
    """Seconds of the attempt by goodput state."""


class Suspicion(Record):
    """Suspicion that something hangs. It is acted upon only if it persists for a while, so that a clock that jumps
    kills nobody."""

    at: Time
    """Time at which it was first suspected."""
    beat_at: Time = 0.0
    """Time at which the newest heartbeat of that moment was written."""
    progressed_at: Time = 0.0
    """Time at which the rank of that heartbeat last made progress."""
    why: str = ""
    """Description of what looks hung."""
    worker: int | None = None
    """The worker that the others wait for, where it is known."""
    incarnation: int = FIRST_INCARNATION
    """The incarnation of that worker."""
    rank: int | None = None
    """The rank that the others wait for, where it is known."""
    node: str | None = None
    """The node of that rank."""


class DataSkip(Record):
    """Data that no attempt trains on: what would have been the next `steps` steps after the checkpoint of `after_step`.

    Chosen in the write that starts an attempt, and in force as long as attempts resume from that checkpoint.
    """

    after_step: int
    """The step of the checkpoint after which data is left out."""
    steps: int
    """Number of steps whose data is left out."""


class Condition(Record):
    """A condition as Kubernetes' own objects have them (metav1.Condition)."""

    type: str
    """Name of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Whether it is so."""
    reason: str
    """Reason, for programs."""
    message: str = ""
    """Reason, in words."""
    last_transition_time: str = Field(default="", json_schema_extra={"format": "date-time"})
    """Time at which `status` last changed."""
    observed_generation: int = 0
    """The generation of the spec that this speaks of."""


class JobStatus(Record):
    """Observed state of the job, as the operator last wrote it."""

    schema_version: int = STATUS_VERSION
    """The version of this status. One that a newer Muster wrote is left alone by an older operator."""
    observed_generation: int = 0
    """The generation of the spec that this speaks of."""
    phase: Phase = Phase.QUEUED
    """Phase of the job."""
    code: str = "Created"
    """The reason of the phase for programs, such as `AwaitingCapacity`; it stays the same over versions."""
    because: str = "not looked at yet"
    """The reason of the phase in words."""
    since: Time = 0.0
    """Time at which the phase last changed."""
    attempt: int = 0
    """The number of the current or last attempt; 0 before the first."""
    resume_step: int = 0
    """The step of the checkpoint that this attempt starts from, chosen in the write that started it."""
    gang: GangStatus = GangStatus()
    reservation: int = 0
    """The number of the request for nodes that is open or in use; it only ever grows."""
    progress: Progress | None = None
    checkpoint: CheckpointStatus | None = None
    restarts: Restarts = Restarts()
    retry_at: Time | None = None
    """The moment before which no attempt is started (backoff)."""
    last_failure: Failure | None = None
    suspicion: Suspicion | None = None
    data_skip: DataSkip | None = None
    node_faults: Many[NodeFault] = ()
    """Failures that are charged to nodes."""
    excluded_nodes: Many[ExcludedNode] = ()
    """Nodes that the job avoids."""
    preemptions_in_a_row: int = 0
    """Number of the last failures in a row that were preemptions."""
    queued_at: Time | None = None
    """Time at which the job began to wait for nodes."""
    started_at: Time | None = None
    """Time at which the first attempt was started."""
    finished_at: Time | None = None
    """Time at which the job ended."""
    ledger: GoodputAccount = GoodputAccount()
    attempts: Many[Attempt] = ()
    """The newest 50 attempts."""
    conditions: Many[Condition] = ()
    """Conditions for `kubectl wait`: Running, Complete, Failed, Suspended and others."""
    results: dict[str, float] = {}
    """Numbers that the program of worker 0 left at $MUSTER_RESULTS when the job succeeded, by their names."""
    results_fault: str = ""
    """Reason for which the file at $MUSTER_RESULTS was left out."""
    ends_as: Phase | None = Field(default=None)
    """While Stopping: the phase that follows when the last worker is gone."""

    def current(self, worker: int) -> WorkerId:
        """Return the life of that worker which belongs to the gang now."""
        return WorkerId(self.attempt, worker, self.gang.incarnation(worker))
