"""Signals: observations about one attempt or one worker of it, such as heartbeats, steps, ends and alerts. Never
commands.

What is about one worker names its incarnation. One that names none is about the first.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from muster.words.base import Many, Record
from muster.words.names import FIRST_INCARNATION


class Cause(StrEnum):
    """Cause of an attempt's end; each has its own restart budget."""

    USER_ERROR = "user_error"
    OUT_OF_MEMORY = "out_of_memory"
    NUMERIC = "numeric"
    HANG = "hang"
    INFRASTRUCTURE = "infrastructure"
    PREEMPTION = "preemption"
    EVICTION = "eviction"
    STORAGE = "storage"
    UNKNOWN = "unknown"


class TrainerPhase(StrEnum):
    """Activity of a rank; each has a deadline of its own."""

    INIT = "init"
    DATA = "data"  # preparing the token store
    LOAD = "load"  # reading a commit
    STEP = "step"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    DRAIN = "drain"
    DONE = "done"


class TrainerSeconds(Record):
    """Time account of a rank since its process started; the rest of that time is not yet attributed."""

    init: float = 0.0
    data: float = 0.0
    load: float = 0.0
    productive: float = 0.0
    data_wait: float = 0.0
    checkpoint: float = 0.0  # training blocked by a save
    evaluation: float = 0.0
    drain: float = 0.0


RANKS_TOLD_MAX = 8  # by number in a StepRecord, which has some 400 bytes and is written at every step


class StepRecord(Record):
    """One optimizer step, as rank 0 logs it. Times in seconds since the epoch or seconds; memory in bytes."""

    type: Literal["step"] = "step"
    attempt: int
    step: int
    steps: int | None = None
    at: float
    loss: float
    grad_norm: float
    lr: float
    tokens: int  # trained in this step, padding not counted
    tokens_per_second: float
    step_seconds: float
    data_wait_seconds: float
    mfu: float | None = None  # None where the device's peak is unknown (CPU)
    memory_bytes: int
    evaluation_loss: float | None = None  # when this step was followed by an evaluation
    values: dict[str, float] = {}  # what the objective reports by name, as means over the step's samples
    evaluation_values: dict[str, float] = {}  # the same of the evaluation that followed
    # Each rank's own work in the step before, without its waits for the others: of up to RANKS_TOLD_MAX ranks by their
    # numbers, of more `fastest`, `median` and `slowest`. In the time of a whole step all ranks are equal.
    rank_seconds: dict[str, float] = {}
    # Use of the hardware by rank 0, now and then: cpuCores, processMemoryBytes, networkReceivedBytes and
    # networkSentBytes (a second), and of its GPU gpuUse (0 to 1), gpuMemoryBytes and gpuWatts.
    hardware: dict[str, float] = {}
    skipped: str = ""  # why nothing was learnt from this batch; a loss that is no number is then the last good one


class SlowRank(Record):
    """A rank that takes longer for its own share of a step than the others do."""

    rank: int
    ratio: float  # of the rank's own work in a step to the median of the other ranks', over the last few steps
    since_step: int


class Heartbeat(Record):
    """One rank's sign of life, rewritten at every step and phase change and at least once a second.

    Times are in seconds since the epoch. A rank that hangs keeps writing `at`, so only `progressed_at` shows a stall.
    """

    attempt: int
    rank: int
    pid: int
    phase: TrainerPhase
    step: int
    at: float  # when it was written
    progressed_at: float  # when step or phase last changed
    started_at: float
    metrics_port: int | None = None
    seconds: TrainerSeconds = TrainerSeconds()
    productive_since_commit: float = 0.0  # seconds of step time after the last commit
    last_commit_step: int | None = None
    last_commit_at: float | None = None
    best_step: int | None = None
    last_step: StepRecord | None = None
    first_step_at: float | None = None  # when this process had done a step
    last_evaluation: StepRecord | None = None  # the last step that was followed by an evaluation
    doing: str = ""  # what the main thread does within the step
    moves: int = 0  # how often `doing` has changed in this step: the rank that others wait for has made fewer moves
    limit_seconds: float | None = None  # the longest this phase may take without progress; None until the run shows it
    stands: str = ""  # the main thread's innermost frames, once a quarter of the limit has passed without progress
    slow_ranks: Many[SlowRank] = ()  # by rank 0, for the whole gang
    data_wait_share: float | None = None  # of the last minute of training, by rank 0; None until one has passed
    commit_seconds: float | None = None  # by rank 0: the longest time between two commits that its policy would choose
    save_waits: str = ""  # why a save that is due waits
    memory: str = ""  # what this rank needs and has, and what to change should that be too little
    skipped_steps: int = 0  # of this job, as far as this attempt's commits and steps know
    skipped_samples: int = 0  # the samples of those steps
    last_skipped: StepRecord | None = None
    tracking_fault: str = ""  # by rank 0: which experiment trackers are left out, and why
    # False where nothing is known of a program's progress (no step was counted, and no `hang` bounds its silence): such
    # a rank is never taken for hung.
    watched: bool = True
    stopped: bool = (
        False  # by SIGSTOP, while its launcher goes on; told by who reads the file, for the rank can't write
    )
    incarnation: int = FIRST_INCARNATION  # of its worker


class RankFailure(Record):
    """Failure record of a rank, written by itself before it exits with `exit_code`."""

    rank: int
    step: int
    exit_code: int
    message: str
    traceback: str = ""
    at: float


class WorkerExit(Record):
    """End of a worker: the first rank that failed, not the time-outs of the others."""

    exit_code: int  # as a shell would show it: 128 + signal for a killed rank
    at: float
    rank: int | None = None  # that failed first, where it is known
    signal: int | None = None
    step: int | None = None
    message: str = ""
    log_tail: str = ""
    oom_killed: bool = False  # by its launcher, for its memory: what a kubelet calls OOMKilled
    unexplained: bool = False  # by a signal that neither Muster nor the kernel, for want of memory, has sent
    results: dict[str, float] = {}  # that a program left at $MUSTER_RESULTS
    results_fault: str = ""  # why they are left out


class SignalKind(StrEnum):
    STALL = "stall"
    COLLECTIVE_HANG = "collective_hang"
    STRAGGLER = "straggler"
    NUMERIC = "numeric"
    GPU_FAULT = "gpu_fault"
    NODE_DOWN = "node_down"
    NODE_DRAIN = "node_drain"
    SPOT_NOTICE = "spot_notice"
    REBALANCE = "rebalance"
    ALERT = "alert"


class Signal(Record):
    """An observation about one attempt, or about one life of one worker of it. A signal of another attempt, or of
    another incarnation of that worker, changes nothing."""

    kind: SignalKind
    attempt: int
    at: float
    worker: int | None = None
    rank: int | None = None
    node: str | None = None
    message: str = ""
    source: str = ""
    in_place: bool = False  # a GPU fault that cost processes only: the node may be used again at once
    incarnation: int = FIRST_INCARNATION  # of `worker`, where one is named
