"""Snapshot of one job at one moment, frozen. A world makes it; the core only reads it.

Times are seconds since the epoch, by the world's clock (`now`), except in what workers wrote themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pydantic import ConfigDict, TypeAdapter

from muster.words.job import JobSpec
from muster.words.names import FIRST_INCARNATION, WorkerId
from muster.words.signals import Heartbeat, Signal, WorkerExit
from muster.words.status import JobStatus


class WorkerState(StrEnum):
    STARTING = "starting"  # asked for, no process yet (a Pending pod, an image being pulled)
    RUNNING = "running"
    EXITED = "exited"  # the process is known to have ended; the worker stays in sight until it is removed
    UNREACHABLE = "unreachable"  # its node does not answer, so nobody knows


class Rejection(StrEnum):
    """Refusal of the world to create a process for a worker that should exist."""

    PERMANENT = "permanent"  # of what the job asks for: nothing changes until its user changes something
    TEMPORARY = "temporary"  # a quota, or a part of the platform that is missing or does not answer


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """One life of one worker of one attempt, of this job's uid. A worker that is not listed is gone."""

    worker: int
    attempt: int
    node: str
    """The node that it is on, or is to be on."""
    state: WorkerState
    created_at: float
    exit: WorkerExit | None = None
    """Exit of the worker, once its state is EXITED."""
    heartbeats: tuple[Heartbeat, ...] = ()
    """The newest heartbeat of each of its ranks, in rank order. Of a very large gang rank 0's, and that of the rank
    that progressed last, are enough."""
    removing: bool = False
    """True once its removal has been requested."""
    reason: str = ""
    """The world's own word for its state (OOMKilled, Evicted, Preempted, NodeLost, ImagePullBackOff); empty for
    none."""
    since: float = 0.0
    """Time at which it came into this state."""
    waiting: str = ""
    """Reason why another scheduler, such as Kueue, has not placed it yet; empty once it has, or if Muster places it."""
    rejection: Rejection | None = None
    """Set where the world refuses to let it come to be, for `reason`, since `since`."""
    message: str = ""
    """The world's sentence about its end, in addition to the word: why a kubelet rejected it, or evicted it."""
    refusal: str = ""
    """Reason why its node can't start it until its user changes the job or what it names, and what to do; empty if it
    can, or if that may pass by itself."""
    node_blameless: bool = False
    """True if its end does not count against its node, because somebody on the machine ended it."""
    warning: str = ""
    """Problem around it while it runs: a container that others put into its pod has failed."""
    incarnation: int = FIRST_INCARNATION

    @property
    def id(self) -> WorkerId:
        return WorkerId(self.attempt, self.worker, self.incarnation)

    def wrote(self, beat: Heartbeat) -> bool:
        """Return whether a heartbeat is this very life's own."""
        return beat.attempt == self.attempt and beat.incarnation == self.incarnation


@dataclass(frozen=True, slots=True)
class CommittedSteps:
    """The newest commit in the job's checkpoint folder, and the newest one marked best."""

    step: int
    at: float
    best_step: int | None = None


@dataclass(frozen=True, slots=True)
class NodeReservation:
    """Nodes that are held for one job: worker i goes to nodes[i]."""

    uid: str
    number: int
    """The job's request that it answers: JobStatus.reservation, or the one after it for a running job that may grow."""
    namespace: str
    nodes: tuple[str, ...]
    pool: str
    capacity: str
    """`spot` or `on-demand`."""
    gpus: int = 0
    """Held on each of the nodes, as cpus and memory_bytes are."""
    cpus: float = 0.0
    memory_bytes: int = 0
    at: float = 0.0
    """Time at which it was made."""
    instance_type: str = ""
    """Instance type of the nodes, if all are of one type."""
    yields_to: str = ""
    """The uid of the job that it makes room for: it is asked to commit and to stop. Empty for nobody."""
    yields_because: str = ""
    """The gang that it makes room for and why, in words."""
    nominated: bool = False
    """The nodes are not held, but kept for the job while others make room for it."""


@dataclass(frozen=True, slots=True)
class QueueWait:
    """Reason why admission gave a queued job no nodes."""

    code: str
    because: str


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """A snapshot of one job."""

    uid: str
    namespace: str
    name: str
    created_at: float
    generation: int
    deleting: bool
    version: str
    """The version of the object, for compare-and-swap."""
    now: float
    fresh: bool
    """Everything, workers and commits included, was read from its source for this observation. Else any part may lag
    behind, each by a time of its own."""
    spec: JobSpec
    status: JobStatus
    workers: tuple[ObservedWorker, ...] = ()
    committed: CommittedSteps | None = None
    """Newest commit; None when no commit exists, or when nothing is known of commits: then `commits_unreadable` says
    why."""
    commits_unreadable: str = ""
    checkpoint_uri: str = ""
    """The job's own folder: <spec.checkpoint.uri>/<uid>."""
    signals: tuple[Signal, ...] = ()
    nodes_unfit: tuple[str, ...] = ()
    """Nodes of status.gang.nodes that are gone, not ready or being drained."""
    reservations: tuple[NodeReservation, ...] = ()
    """The reservations of this job."""
    wait: QueueWait | None = None
    """Result of the last pass of admission, if it gave the job nothing."""
    budget: QueueWait | None = None
    """Result of the last pass of admission on its month's budget: MonthLimit, stop; AwaitingAdmission, continue."""
    notes: tuple[str, ...] = ()
    """Notes for the next attempt's message, in addition to its nodes."""
    trouble: str = ""
    """Reason why the decision can't be carried out; empty if it can."""

    def reservation(self, number: int) -> NodeReservation | None:
        """The nodes that were given to the job's request of that number."""
        return next((entry for entry in self.reservations if entry.number == number), None)


OBSERVED = TypeAdapter(ObservedJob)
_JSON = TypeAdapter(dict[str, object], config=ConfigDict(ser_json_inf_nan="constants"))


def to_json(seen: ObservedJob) -> bytes:
    """An Observed as a JSON document, for `muster-operator replay`. A loss may be NaN and then says so."""
    document = OBSERVED.dump_python(seen, mode="json", by_alias=True, exclude_none=True)
    return _JSON.dump_json(document, indent=1)


def from_json(document: bytes | str) -> ObservedJob:
    """The reverse of to_json. Raises pydantic's ValidationError, which is a ValueError."""
    return OBSERVED.validate_json(document)
