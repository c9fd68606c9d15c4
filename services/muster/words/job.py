"""The TrainingJob as its carriers see it: gang, checkpoints, recovery and environment of any training or program."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from muster.words.base import Many, Record, Spec, Time
from muster.words.environment import EnvVar
from muster.words.fields import Count, FolderAddress, KmsKey, Positive, Text
from muster.words.gang import Gang
from muster.words.model_sources import FromCommit
from muster.words.names import API_VERSION, KIND, Env
from muster.words.pods import PodMarks
from muster.words.program import Program, RelativeFolder
from muster.words.rules import DocumentRule, RuledSpec
from muster.words.signals import Cause
from muster.words.status import DataSkip, JobStatus
from muster.words.tracking import WANDB_KEY, Tracking

# Bounded, so that what is made of them stays a number of 64 bits; only the digits 0 to 9, as Kubernetes has it.
DURATION = r"[0-9]{1,9}(s|m|h)"
REASON_LENGTH_MAX = 1_000


def duration_seconds(duration: str) -> int:
    """Parse `90s`, `10m` or `2h` into seconds. Raises ValueError for anything else."""
    if not re.fullmatch(DURATION, duration):
        raise ValueError(f"must be a number with a unit s, m or h (`10m`), not {duration!r}"[:200])
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def _every(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"must be auto, a number of steps (200) or a time (10m), not {value!r}"[:200])
    if isinstance(value, int) and not 0 < value <= 10**15:
        raise ValueError(f"must be at least 1 step and at most 10^15, not {value}")
    if isinstance(value, str) and value != "auto" and duration_seconds(value) <= 0:
        raise ValueError("must be longer than nothing")
    return value


Every = Annotated[int | str, BeforeValidator(_every)]


class Keep(Spec):
    """Retention of checkpoints. The newest verified one and pinned ones are always kept."""

    last: Positive = 3
    """Number of the newest checkpoints that are kept."""
    best: Count = 1
    """Number of the checkpoints with the best evaluation.metric (the lowest loss, unless said otherwise) that are
    kept."""
    every: Positive | None = None
    """Each checkpoint whose step is a multiple of this is kept."""


class CheckpointSpec(Spec):
    """Address, interval and retention of checkpoints."""

    uri: FolderAddress | None = None
    """The file:// or s3:// folder under which the job's own folder is made; left out, the platform's default."""
    every: Every = "auto"
    """Interval between checkpoints: a number of steps, a time (`10m`), or `auto`, the interval that loses the least
    time to failures."""
    keep: Keep = Keep()
    folder: RelativeFolder | None = None
    """The folder below a program's working directory where it writes its checkpoints; left out, only what it writes
    below $MUSTER_CHECKPOINT_DIR counts. Only with `program`."""
    kms_key_id: KmsKey | None = None
    """The KMS key by which S3 encrypts what the job commits; left out, its project's, else the platform's."""

    @property
    def variables(self) -> dict[str, str]:
        """Return the settings of this that the workers' environment overrides."""
        return {Env.S3_KMS_KEY: self.kms_key_id} if self.kms_key_id else {}


# Preemption and eviction cost the user nothing, so they have no budget; the rest are spent per sliding window.
DEFAULT_BUDGETS: dict[Cause, int] = {
    Cause.INFRASTRUCTURE: 20,
    Cause.STORAGE: 20,
    Cause.UNKNOWN: 10,
    Cause.HANG: 5,
    Cause.NUMERIC: 2,
    Cause.OUT_OF_MEMORY: 0,
    Cause.USER_ERROR: 0,
}


# What each preflight looks at before a gang meets, and what follows when it fails (trainer/launch/preflight.py).
PreflightCheck = Literal["gpus", "disk", "efa", "network", "collective"]


PreflightAnswer = Literal["warn", "retry", "exclude", "stop"]


class Recovery(Spec):
    """Recovery from failures of the gang, and its budgets."""

    budgets: dict[Text, Count] = {}
    """Restarts per cause within windowHours, by default `infrastructure` 20, `storage` 20, `unknown` 10, `hang` 5,
    `numeric` 2, `out_of_memory` 0 and `user_error` 0; a cause that is left out keeps its default."""
    window_hours: Positive = 24
    """The hours within which restarts count against their budget."""
    exclude_node_after: Positive = 2
    """Failures charged to one node after which the job avoids it."""
    exclude_hours: Positive = 24
    """The hours for which such a node is avoided."""
    stop_after_no_progress: Positive = 5
    """Attempts in a row without a new checkpoint after which the job ends as a crash loop."""
    dry_run: bool = False
    """Whether hangs, alerts and notices are only reported: a gang then restarts only when it has ended by itself."""
    backoff_seconds: Annotated[float, Field(ge=0, le=86_400)] = 1.0
    """The pause after an attempt that made no new checkpoint; it doubles with each such attempt in a row."""
    backoff_seconds_max: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    """The longest such pause."""
    preflight: dict[PreflightCheck, PreflightAnswer] = {}
    """Action when a check (`gpus`, `disk`, `efa`, `network`, `collective`) fails before the workers connect: `warn`
    continues, `retry` tries again, `exclude` leaves the node, `stop` ends the job. A check that is left out keeps its
    default.
    """

    @model_validator(mode="after")
    def _budgets_are_for_causes(self) -> Self:
        for cause in self.budgets:
            if cause in (Cause.PREEMPTION, Cause.EVICTION):
                raise ValueError(f"budgets.{cause}: has no budget: {cause}s cost you nothing and are always retried")
            if cause not in set(DEFAULT_BUDGETS):
                raise ValueError(f"budgets.{cause}: unknown cause; there are {', '.join(DEFAULT_BUDGETS)}")
        return self

    def budget(self, cause: Cause) -> int | None:
        """The number of restarts that are allowed per window; None if it is unlimited."""
        return self.budgets.get(cause, DEFAULT_BUDGETS.get(cause))


class Runtime(PodMarks):
    """Environment that the workers run in."""

    image: Text | None = None
    """The trainer's image; left out, the platform's default."""
    env: Many[EnvVar] = ()
    """Variables of the workers' environment."""
    env_from: Many[dict[str, Any]] = ()
    """Secrets and ConfigMaps whose entries become variables, as in a pod's spec."""
    volumes: Many[dict[str, Any]] = ()
    """Volumes of the pods, as in a pod's spec; each is mounted at its `mountPath`, else at /mnt/<name>."""
    service_account_name: Text | None = None
    """The pods' service account; left out, the platform's default."""


class Metadata(Record):
    """The part of Kubernetes' ObjectMeta that Muster reads."""

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 1
    resource_version: str = ""
    creation_timestamp: Time = 0.0
    deletion_timestamp: Time | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class EarlierAttempts(Record):
    """Facts about the job's earlier attempts."""

    failures: int = 0
    seconds: float = 0.0  # in which there was a gang that could fail


def past_of(status: JobStatus) -> EarlierAttempts | None:
    """Return the facts about the ended attempts that the status remembers; None while there are none."""
    over = [attempt for attempt in status.attempts if attempt.ended_at is not None]
    if not over:
        return None
    return EarlierAttempts(
        failures=sum(attempt.cause is not None for attempt in over),
        seconds=sum(max(0.0, (attempt.ended_at or 0.0) - attempt.created_at) for attempt in over),
    )


ONE_KIND_OF_WORK = "give exactly one of training (Muster's own trainer) and program (a program of your own)"


def _needs_token(it: JobSpec) -> str | None:
    """Refuse a tracker without its token, but only if it is certain that there is none: a variable may come from
    `envFrom`, too."""
    wandb, runtime = it.tracking.wandb, it.runtime
    named = {variable.name for variable in runtime.env}
    if wandb is None or wandb.mode != "online" or runtime.env_from or WANDB_KEY in named:
        return None
    return (
        f"tracking.wandb needs its token in {WANDB_KEY}: keep it by `muster secrets set wandb`, and give "
        f"runtime.env: [{{name: {WANDB_KEY}, valueFrom: {{secretKeyRef: {{name: wandb, key: value}}}}}}]; or "
        "set tracking.wandb.mode to offline"
    )


# What every job keeps, whatever it computes. Of a program some settings are refused that Muster's own trainer alone
# obeys.
WORK_RULES: Final[tuple[DocumentRule[JobSpec], ...]] = (
    DocumentRule(
        ONE_KIND_OF_WORK,
        lambda it: (it.training is None) == (it.program is None),
        "has(self.training) != has(self.program)",
    ),
    DocumentRule(
        "checkpoint.folder is where a program writes its checkpoints; leave it out with training",
        lambda it: it.program is None and it.checkpoint.folder is not None,
        "!has(self.checkpoint.folder) || has(self.program)",
    ),
    DocumentRule(
        "checkpoint.every: a program saves when it chooses to; leave it out",
        lambda it: it.program is not None and it.checkpoint.every != "auto",
    ),
    DocumentRule(
        "tracking: Muster's own trainer alone writes to trackers; let the program do so itself",
        lambda it: it.program is not None and it.tracking != Tracking(),
    ),
)
TRACKER_RULES: Final[tuple[DocumentRule[JobSpec], ...]] = (
    DocumentRule(f"tracking.wandb with mode online needs its token in {WANDB_KEY}", _needs_token),
)


class JobSpec(RuledSpec):
    """Desired state of a job: its training or its program, its gang, its checkpoints and its recovery.

    What a training computes is no concern of those who carry it, so that here it is whatever was written.
    `muster.recipe.document.JobSpec` understands it, and answers the two questions whose answer depends on it.
    """

    rules = (*WORK_RULES, *TRACKER_RULES)

    training: object = None
    """Configuration of Muster's own trainer, or None; exactly one of `training` and `program` is given."""
    program: Program | None = None
    """A program of your own; exactly one of `training` and `program` is given."""
    gang: Gang = Gang()
    checkpoint: CheckpointSpec = CheckpointSpec()
    recovery: Recovery = Recovery()
    tracking: Tracking = Tracking()
    runtime: Runtime = Runtime()
    suspend: bool = False
    """Whether the job is to commit, give its nodes back and wait."""
    cancel: bool = False
    """Whether the job is to end and keep its record; deleting the object removes both."""
    cancel_reason: Annotated[str, Field(max_length=REASON_LENGTH_MAX)] = ""
    """Reason of the cancellation where something other than its user asked for it, such as the sweep of a trial."""
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] = 0
    """Jobs of a higher priority get nodes first."""
    priority_class_name: Text | None = None
    """A PriorityClass of the cluster, whose value counts instead of `priority`."""
    active_deadline_seconds: Positive | None = None
    """Seconds after which a job that has not ended fails."""
    ttl_seconds_after_finished: Count | None = None
    """Seconds after its end when the job's object is deleted; left out, never."""

    def gang_sizes(self) -> tuple[int, ...]:
        """Return the node counts, ascending, from min to max, on which the job runs."""
        return tuple(n for n in range(self.gang.nodes.min, self.gang.nodes.max + 1) if self.runs_on(n))

    def runs_on(self, nodes: int) -> bool:
        """Return whether the job's work can be divided over so many nodes. A program decides that for itself."""
        return True

    def input_commits(self) -> dict[str, FromCommit]:
        """Return the checkpoints that the job reads, by the path below `spec` of the field that names each."""
        inputs = self.program.inputs if self.program is not None else {}
        commits = {f"program.inputs.{name}": each.commit for name, each in inputs.items()}
        return {path: origin for path, origin in commits.items() if origin is not None}


# What a running job may change; everything else decides what is computed or where, and is fixed at submission.
MUTABLE = frozenset(
    {
        "suspend",
        "cancel",
        "cancel_reason",
        "priority",
        "priority_class_name",
        "recovery",
        "active_deadline_seconds",
        "ttl_seconds_after_finished",
    }
)


class TrainingJob(Record):
    api_version: str = API_VERSION
    kind: str = KIND
    metadata: Metadata
    spec: JobSpec
    status: JobStatus = JobStatus()


class WorkerConfig(Record):
    """Configuration of a worker: the part of its job that it needs, as JSON in MUSTER_CONFIG."""

    training: object = None
    program: Program | None = None
    checkpoint: CheckpointSpec
    past: EarlierAttempts | None = None
    tracking: Tracking = Tracking()
    data_skip: DataSkip | None = None  # applies where training begins after that very commit


def worker_config(spec: JobSpec, status: JobStatus) -> WorkerConfig:
    """Return the document that the workers of the job's next attempt get."""
    return WorkerConfig(
        training=spec.training,
        program=spec.program,
        checkpoint=spec.checkpoint,
        past=past_of(status),
        tracking=spec.tracking,
        data_skip=status.data_skip,
    )
