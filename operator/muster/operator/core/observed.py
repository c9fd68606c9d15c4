"""What the operator sees of one job at one moment, frozen. A world makes it; the core only reads it.

Times are seconds since the epoch, by the world's clock (`now`), except in what workers wrote themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pydantic import ConfigDict, TypeAdapter

from muster.contract.signals import Heartbeat, Signal, WorkerExit
from muster.contract.spec import JobSpec
from muster.contract.status import JobStatus


class WorkerState(StrEnum):
    STARTING = "starting"  # asked for, no process yet (a Pending pod, an image being pulled)
    RUNNING = "running"
    EXITED = "exited"  # the process is known to have ended; the worker stays in sight until it is removed
    UNREACHABLE = "unreachable"  # its node does not answer, so nobody knows


class Rejection(StrEnum):
    """Why the world lets no process come to be for a worker that should exist."""

    PERMANENT = "permanent"  # of what the job asks for: nothing changes until its user changes something
    TEMPORARY = "temporary"  # a quota, or a part of the platform that is missing or does not answer


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker of one attempt, of this job's uid. A worker that is not listed is gone.

    node: where it is (or is to be). exit: how it ended, once EXITED. heartbeats: the newest of each of its ranks, in
    rank order (for a very large gang it is enough to give rank 0's and the one that progressed last). removing: its
    removal has been asked for. reason: the world's own word for its state (OOMKilled, Evicted, Preempted, NodeLost,
    ImagePullBackOff); empty if there is none. since: when it came into this state. waiting: why another scheduler, such
    as Kueue, has not placed it yet; empty once it has, or where Muster places it. rejection: the world refuses to
    let it come to be, for `reason`, since `since`.
    """

    worker: int
    attempt: int
    node: str
    state: WorkerState
    created_at: float
    exit: WorkerExit | None = None
    heartbeats: tuple[Heartbeat, ...] = ()
    removing: bool = False
    reason: str = ""
    since: float = 0.0
    waiting: str = ""
    rejection: Rejection | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """The newest commit in the job's checkpoint folder, and the newest one marked best."""

    step: int
    at: float
    best_step: int | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes that are held for one job: worker i goes to nodes[i].

    number: which of the job's requests it answers: JobStatus.reservation, or for a running job that may grow, the one
    after it. gpus, cpus, memory_bytes: held on each of the nodes. at: when it was made.
    """

    uid: str
    number: int
    namespace: str
    nodes: tuple[str, ...]
    pool: str
    capacity: str  # spot | on-demand
    gpus: int = 0
    cpus: float = 0.0
    memory_bytes: int = 0
    at: float = 0.0
    instance_type: str = ""  # of the nodes, where they are all of one


@dataclass(frozen=True, slots=True)
class Wait:
    """Why admission did not give a queued job its nodes."""

    code: str
    because: str


@dataclass(frozen=True, slots=True)
class Observed:
    """A snapshot of one job.

    version: of the object, for compare-and-swap. fresh: read from the source for this observation, workers and
    commits included; else any part may lag behind, each by its own time. committed: None when no commit exists,
    or when nothing is known of them: then commits_unreadable says why. trouble: why what was decided can't be
    carried out; empty if it can. nodes_unfit: those of status.gang.nodes that are gone, not ready or
    being drained. reservations: this job's. wait: what the last admission pass said, if it gave
    nothing. notes: what the next attempt's words should say beside its nodes.
    """

    uid: str
    namespace: str
    name: str
    created_at: float
    generation: int
    deleting: bool
    version: str
    now: float
    fresh: bool
    spec: JobSpec
    status: JobStatus
    workers: tuple[Worker, ...] = ()
    committed: Committed | None = None
    commits_unreadable: str = ""
    checkpoint_uri: str = ""  # the job's own folder: <spec.checkpoint.uri>/<uid>
    signals: tuple[Signal, ...] = ()
    nodes_unfit: tuple[str, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    wait: Wait | None = None
    notes: tuple[str, ...] = ()
    trouble: str = ""

    def reservation(self, number: int) -> Reservation | None:
        """The nodes that were given to the job's request of that number."""
        return next((entry for entry in self.reservations if entry.number == number), None)


OBSERVED = TypeAdapter(Observed)
_JSON = TypeAdapter(dict[str, object], config=ConfigDict(ser_json_inf_nan="constants"))


def to_json(seen: Observed) -> bytes:
    """An Observed as a JSON document, for `muster-operator replay`. A loss may be NaN and then says so."""
    document = OBSERVED.dump_python(seen, mode="json", by_alias=True, exclude_none=True)
    return _JSON.dump_json(document, indent=1)


def from_json(document: bytes | str) -> Observed:
    """The reverse of to_json. Raises pydantic's ValidationError, which is a ValueError."""
    return OBSERVED.validate_json(document)
