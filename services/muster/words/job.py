"""Parts of the job document that every job has, whatever it computes: checkpoints, recovery, environment, metadata."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from muster.words.base import Many, Record, Spec, Time
from muster.words.environment import EnvVar
from muster.words.fields import Count, FolderAddress, KmsKey, Positive, Text
from muster.words.names import Env
from muster.words.pods import PodMarks
from muster.words.program import RelativeFolder
from muster.words.signals import Cause
from muster.words.status import JobStatus

# Bounded, so that what is made of them stays a number of 64 bits; only the digits 0 to 9, as Kubernetes has it.
DURATION = r"[0-9]{1,9}(s|m|h)"


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


class Past(Record):
    """Facts about the job's earlier attempts."""

    failures: int = 0
    seconds: float = 0.0  # in which there was a gang that could fail


def past_of(status: JobStatus) -> Past | None:
    """Return the facts about the ended attempts that the status remembers; None while there are none."""
    over = [attempt for attempt in status.attempts if attempt.ended_at is not None]
    if not over:
        return None
    return Past(
        failures=sum(attempt.cause is not None for attempt in over),
        seconds=sum(max(0.0, (attempt.ended_at or 0.0) - attempt.created_at) for attempt in over),
    )
