"""The status of a TrainingJob: the only truth about it. Written by the operator alone."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from muster.contract.base import Many, Record, Time
from muster.contract.signals import Cause

# 1 wrote times as numbers; 2 writes them as RFC 3339.
STATUS_VERSION = 2


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


class GangStatus(Record):
    """wanted: workers of this attempt. nodes[i]: where worker i is placed, held until the gang is seen gone."""

    wanted: int = 0
    ready: int = 0
    nodes: Many[str] = ()
    pool: str | None = None
    capacity: Literal["spot", "on-demand"] | None = None
    instance_type: str = ""  # of the nodes, where they are all of one


class Progress(Record):
    """at: when it was seen. evaluation_loss: of the last evaluation, which followed evaluation_step."""

    at: Time = 0.0
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    evaluation_loss: float | None = None
    evaluation_step: int | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    eta_seconds: float | None = None


class CheckpointStatus(Record):
    """The newest commit. uri: the job's checkpoint folder."""

    step: int
    committed_at: Time
    uri: str
    best_step: int | None = None


class Restart(Record):
    """One charge on a budget. Kept for the sliding window."""

    at: Time
    cause: Cause


class Restarts(Record):
    total: int = 0
    by_cause: dict[str, int] = {}
    recent: Many[Restart] = ()
    without_progress: int = 0  # attempts in a row that made no new commit


class Failure(Record):
    cause: Cause
    attempt: int
    at: Time
    message: str
    worker: int | None = None
    rank: int | None = None
    node: str | None = None
    step: int | None = None
    exit_code: int | None = None
    log_tail: str = ""


class NodeFault(Record):
    """A failure charged to a node; enough of them exclude it."""

    node: str
    at: Time
    why: str


class ExcludedNode(Record):
    node: str
    until: Time
    why: str


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
    """seconds: by GoodputState, over the closed past. since: the moment up to which it is closed."""

    seconds: dict[str, float] = {}
    since: Time = 0.0

    def shares(self) -> dict[str, float]:
        """The same as fractions that sum to 1 (empty before the first second)."""
        total = sum(self.seconds.values())
        return {state: value / total for state, value in self.seconds.items()} if total > 0 else {}


AttemptOutcome = Literal[
    "waiting", "running", "succeeded", "failed", "suspended", "cancelled", "preempted", "resized", "rejected"
]
LIVING = ("waiting", "running")


class Attempt(Record):
    """One life of the gang, for the history. lost_steps: trained after the last commit, to be trained again.

    outcome: `waiting` while another scheduler has not placed it; its life, and its cost, begin when it has.
    """

    number: int
    created_at: Time
    nodes: Many[str] = ()
    workers: int = 0
    gpus_per_worker: int = 0
    instance_type: str = ""  # of the nodes, where it is known
    capacity: Literal["spot", "on-demand"] | None = None
    world_size: int = 0
    resume_step: int = 0
    first_step_at: Time | None = None
    ended_at: Time | None = None
    last_step: int | None = None
    lost_steps: int = 0
    cause: Cause | None = None  # None while it lives, and when it ended well
    failed_step: int | None = None  # the last step of the rank that failed
    outcome: AttemptOutcome = "running"
    message: str = ""
    seconds: dict[str, float] = {}


class Suspicion(Record):
    """Something looks hung. Acted upon only if it still does a while later, so that a clock that jumps kills nobody.

    at: when it was first suspected. beat_at, progressed_at: of the newest heartbeat then. worker, rank, node: whom the
    others wait for, where that is known.
    """

    at: Time
    beat_at: Time = 0.0
    progressed_at: Time = 0.0
    why: str = ""
    worker: int | None = None
    rank: int | None = None
    node: str | None = None


class DataSkip(Record):
    """Data that no attempt trains on: what would have been the next `steps` steps after the commit of `after_step`.

    Chosen in the write that starts an attempt, and in force as long as attempts resume from that commit.
    """

    after_step: int
    steps: int


class Condition(Record):
    """metav1.Condition."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    last_transition_time: str = Field(default="", json_schema_extra={"format": "date-time"})
    observed_generation: int = 0


class JobStatus(Record):
    """code: the stable, machine-readable reason of the phase (`AwaitingCapacity`); because: the same in words.

    attempt: the current or last attempt, 0 before the first. resume_step: chosen in the write that started the attempt.
    """

    schema_version: int = STATUS_VERSION  # a higher one was written by a newer Muster: hands off
    observed_generation: int = 0
    phase: Phase = Phase.QUEUED
    code: str = "Created"
    because: str = "not looked at yet"
    since: Time = 0.0  # when phase last changed
    attempt: int = 0
    resume_step: int = 0
    gang: GangStatus = GangStatus()
    reservation: int = 0  # the number of the request for nodes that is open or in use; only ever grows (docs/decisions)
    progress: Progress | None = None
    checkpoint: CheckpointStatus | None = None
    restarts: Restarts = Restarts()
    retry_at: Time | None = None  # no attempt before this moment (backoff)
    last_failure: Failure | None = None
    suspicion: Suspicion | None = None
    data_skip: DataSkip | None = None
    node_faults: Many[NodeFault] = ()
    excluded_nodes: Many[ExcludedNode] = ()
    preemptions_in_a_row: int = 0
    queued_at: Time | None = None
    started_at: Time | None = None
    finished_at: Time | None = None
    ledger: GoodputAccount = GoodputAccount()
    attempts: Many[Attempt] = ()  # the newest 50
    conditions: Many[Condition] = ()
    ends_as: Phase | None = Field(default=None)  # while Stopping: what comes when the last worker is gone
