"""The simulated things: nodes, worker processes, gangs that train, jobs and their stored history."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel

from muster.operator.core.observed import ObservedWorker, Rejection, WorkerState
from muster.recipe.document import JobSpec
from muster.words.names import FIRST_INCARNATION, WorkerId
from muster.words.program import Program
from muster.words.signals import (
    Cause,
    Heartbeat,
    Signal,
    SlowRank,
    StepRecord,
    TrainerPhase,
    TrainerSeconds,
    WorkerExit,
)
from muster.words.status import JobStatus

M = TypeVar("M", bound=BaseModel)


def fast(model: type[M], defaults: M | None = None, **values: Any) -> M:
    """A pydantic model without validation, as fast as Python allows: heartbeats are made by the million here."""
    made = model.__new__(model)
    fields = {**defaults.__dict__, **values} if defaults is not None else values
    object.__setattr__(made, "__dict__", fields)
    object.__setattr__(made, "__pydantic_fields_set__", set(values))
    object.__setattr__(made, "__pydantic_extra__", {})
    object.__setattr__(made, "__pydantic_private__", None)
    return made


_NO_SECONDS = TrainerSeconds()
_NO_STEP = StepRecord(
    attempt=0,
    step=0,
    at=0,
    loss=1,
    grad_norm=1,
    lr=1,
    tokens=1,
    tokens_per_second=1,
    step_seconds=1,
    data_wait_seconds=0,
    memory_bytes=1,
)
_ON_THE_SAME_DISK = 1_000  # the number of a second rank of a worker, where that matters
_NO_BEAT = Heartbeat(attempt=0, rank=0, pid=1, phase=TrainerPhase.INIT, step=0, at=0, progressed_at=0, started_at=0)


@dataclass
class SimNode:
    """up: it runs. reachable: its kubelet answers. draining: nothing new may go there. gone: taken away for good."""

    name: str
    pool: str
    capacity: str
    gpus: int
    labels: dict[str, str]
    up: bool = True
    reachable: bool = True
    draining: bool = False
    gone: bool = False
    down_since: float = 0.0

    @property
    def ready(self) -> bool:
        return self.up and self.reachable and not self.draining and not self.gone


@dataclass
class Process:
    """One life of one worker: the object that the operator sees, and the process behind it. visible: the object
    exists."""

    uid: str
    attempt: int
    index: int
    node: str
    wanted: int
    resume_step: int
    created_at: float  # world time, as are all times here
    state: WorkerState = WorkerState.STARTING
    since: float = 0.0
    visible: bool = True
    alive: bool = False  # a process runs
    died_at: float = float("inf")  # from when on nothing more is heard of it
    joined: bool = False  # it has passed the fence and is at the rendezvous
    removing: bool = False
    kill_at: float | None = None
    told_to_stop: bool = False
    exit: WorkerExit | None = None
    reason: str = ""
    ghost: bool = False  # its object was forced away from a node that does not answer
    muffled: tuple[float, float] = (0.0, 0.0)  # between these, no heartbeat of its gets out
    held: tuple[float, float] = (0.0, 0.0)  # between these, job control holds it
    cut_off_at: float = float("inf")  # nothing of its is heard from here on, until its node is back
    rejection: Rejection | None = None  # it is not there: the API server refuses to let it exist
    refusal: str = ""  # why its node can't start it, whatever is tried
    incarnation: int = FIRST_INCARNATION

    @property
    def id(self) -> WorkerId:
        return WorkerId(self.attempt, self.index, self.incarnation)


@dataclass
class Training:
    """A gang whose ranks have met. Its step follows from the time, so no step costs an event."""

    uid: str
    attempt: int
    members: tuple[Process, ...]
    met_at: float
    load_seconds: float
    resume_step: int
    steps: int
    step_seconds: float
    broken_at: float | None = None  # nobody moves from here on
    hang: str = ""  # and how that shows: everybody beats, all are silent, one is stopped, one is mute, one is behind
    suspect: Process | None = None  # the one that it is about
    slow: Process | None = None  # a straggler, until …
    slow_until: float = 0.0
    drain_at: float | None = None
    committed_step: int = 0
    over: bool = False

    @property
    def speaker(self) -> Process:
        """The worker whose rank 0 publishes the gang's commits."""
        return next(process for process in self.members if process.index == 0)

    def stepped(self, now: float) -> int:
        """Steps finished by `now`."""
        until = now if self.broken_at is None else min(now, self.broken_at)
        return min(
            self.steps, self.resume_step + max(0, int((until - self.met_at - self.load_seconds) / self.step_seconds))
        )

    def trained_seconds(self, now: float) -> float:
        return (self.stepped(now) - self.resume_step) * self.step_seconds

    def finishes_at(self) -> float:
        return self.met_at + self.load_seconds + (self.steps - self.resume_step) * self.step_seconds

    def progressed_at(self, now: float) -> float:
        step = self.stepped(now)
        loaded = self.met_at + self.load_seconds
        if step > self.resume_step:
            return loaded + (step - self.resume_step) * self.step_seconds
        return self.met_at if now < loaded or (self.broken_at is not None and self.broken_at < loaded) else loaded


@dataclass
class SimJob:
    """A stored TrainingJob: its versions, its processes, its commits, and what was done to it (for the checkers)."""

    uid: str
    namespace: str
    name: str
    created_at: float  # wall clock
    spec: JobSpec
    status: JobStatus
    steps: int
    step_seconds: float
    commit_every: int
    load_seconds: float
    project: str = "default"
    owner: str = ""
    generation: int = 1
    deleting: bool = False
    version: int = 1
    removed: bool = False
    processes: dict[WorkerId, Process] = field(default_factory=dict)
    trainings: dict[int, Training] = field(default_factory=dict)
    commits: list[tuple[int, int, float, float]] = field(default_factory=list)  # step, attempt, world time, wall clock
    signals: list[Signal] = field(default_factory=list)
    # snapshots for cached reads, oldest first
    versions: list[tuple[int, JobSpec, JobStatus, int, bool]] = field(default_factory=list)
    crews: list[tuple[ObservedWorker, ...]] = field(default_factory=list)
    # what happened in truth
    allowed: dict[int, set[Cause]] = field(default_factory=dict)  # attempt -> causes that would be a true explanation
    created: set[WorkerId] = field(default_factory=set)
    deaths: dict[WorkerId, int] = field(default_factory=dict)  # exit code of each life that ended by itself
    minted_at: dict[int, float] = field(default_factory=dict)
    closed: list[tuple[float, int, Cause]] = field(default_factory=list)  # wall clock, attempt, cause charged
    finished_training: bool = False
    trained_seconds: float = 0.0
    muffled: bool = False  # its heartbeats were, for a while
    slow_nodes: set[str] = field(default_factory=set)  # that had a straggler
    misnamed: bool = False  # it names what is not there, so none of its workers can ever exist
    mistyped: bool = False  # its image does not exist, so none of its workers can ever start
    rejected: set[int] = field(default_factory=set)  # attempts of which a worker was refused for a while
    bug_step: int | None = None  # whoever trains this step fails, every time
    requested: set[str] = field(default_factory=set)

    def allow(self, attempt: int, *causes: Cause) -> None:
        self.allowed.setdefault(attempt, set()).update(causes)

    def live(self) -> list[Process]:
        return [process for process in self.processes.values() if process.alive]

    def newest_commit(self) -> int:
        return max((commit[0] for commit in self.commits), default=0)


def seen_worker(job: SimJob, process: Process, now: float, offset: float) -> ObservedWorker:
    """What the API says of a worker; times by the wall clock, which is `offset` off the world's."""
    beats: tuple[Heartbeat, ...] = ()
    if process.joined:
        heard = min(now, process.died_at, process.cut_off_at)
        if process.muffled[0] <= heard < process.muffled[1]:
            heard = process.muffled[0]
        training = job.trainings.get(process.attempt)
        beat = _beat(job, process, heard, offset)
        held = training is not None and training.hang == "stopped" and training.suspect is process
        if now < process.cut_off_at and training is not None and (held or process.held[0] <= now < process.held[1]):
            # Not in the file that a rank writes: whoever reads it asks the machine, which must answer for that.
            beat = fast(Heartbeat, beat, stopped=True)
        beats = (beat,)
        if training is not None and training.suspect is process and training.hang == "mute":
            at = min(now, process.cut_off_at) + offset
            beats += (fast(Heartbeat, beat, rank=_ON_THE_SAME_DISK + process.index, at=at),)
    return ObservedWorker(
        process.index,
        process.attempt,
        process.node,
        process.state,
        process.created_at + offset,
        process.exit,
        beats,
        process.removing,
        process.reason,
        process.since + offset,
        rejection=process.rejection,
        refusal=process.refusal,
        incarnation=process.incarnation,
    )


def _beat(job: SimJob, process: Process, now: float, offset: float) -> Heartbeat:
    beat = _trainers_beat(job, process, now, offset)
    return beat if job.spec.program is None else _launchers_beat(job, job.spec.program, beat, offset)


def _launchers_beat(job: SimJob, program: Program, beat: Heartbeat, offset: float) -> Heartbeat:
    """As a launcher tells of a rank whose steps it counts from outside: no phases, no loss, only a number. Nothing is
    known before the first step, or of a program that is not watched."""
    training = job.trainings.get(beat.attempt)
    stepped = training is not None and beat.step > training.resume_step
    counted = stepped and not program.hang.off
    first = training.met_at + training.load_seconds + training.step_seconds + offset if training is not None else None
    return fast(
        Heartbeat,
        beat,
        phase=TrainerPhase.STEP,
        last_step=None,
        moves=0,
        slow_ranks=(),
        watched=counted,
        first_step_at=first if counted else None,
        limit_seconds=float(program.hang.step_seconds or 0) if counted else None,
    )


def _trainers_beat(job: SimJob, process: Process, now: float, offset: float) -> Heartbeat:
    training = job.trainings.get(process.attempt)
    started = process.created_at + offset
    if training is None or process not in training.members:
        return fast(
            Heartbeat,
            _NO_BEAT,
            attempt=process.attempt,
            incarnation=process.incarnation,
            rank=process.index,
            at=now + offset,
            progressed_at=process.since + offset,
            started_at=started,
        )
    quiet = training.hang == "silent" or (training.hang in ("stopped", "mute") and training.suspect is process)
    at = now if training.broken_at is None or not quiet else min(now, training.broken_at)
    step, loaded_at = training.stepped(now), training.met_at + training.load_seconds
    until = at if training.broken_at is None else min(at, training.broken_at)
    phase = TrainerPhase.LOAD if until < loaded_at else TrainerPhase.STEP
    if step == training.steps:  # it waits for its last commit, which no limit is learnt for
        phase = TrainerPhase.DRAIN
    seconds = fast(
        TrainerSeconds,
        _NO_SECONDS,
        load=max(0.0, min(until, loaded_at) - training.met_at),
        productive=training.trained_seconds(now),
    )
    last = None
    if process.index == 0 and step > training.resume_step:
        last = fast(
            StepRecord,
            _NO_STEP,
            attempt=process.attempt,
            step=step,
            steps=training.steps,
            at=training.progressed_at(now) + offset,
            step_seconds=training.step_seconds,
        )
    return fast(
        Heartbeat,
        _NO_BEAT,
        attempt=process.attempt,
        incarnation=process.incarnation,
        rank=process.index,
        phase=phase,
        step=step,
        at=at + offset,
        progressed_at=training.progressed_at(now) + offset,
        started_at=started,
        seconds=seconds,
        last_step=last,
        moves=1 if training.hang == "behind" and training.suspect is process else 3,
        slow_ranks=_slow_ranks(job, training, now) if process.index == 0 and training.slow is not None else (),
        limit_seconds=max(15.0, 10.0 * training.step_seconds)
        if phase is TrainerPhase.STEP and step >= training.resume_step + 3
        else None,
    )


def _slow_ranks(job: SimJob, training: Training, now: float) -> tuple[SlowRank, ...]:
    if training.slow is None or now >= training.slow_until:
        return ()
    return (SlowRank(rank=training.slow.index * job.spec.gang.ranks_per_node, ratio=1.5, since_step=1),)
