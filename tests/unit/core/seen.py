"""Builders for the core's tests: a job, its workers and its fleet, in few words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from muster.operator.core.decide import decide
from muster.operator.core.decision import JobDecision
from muster.operator.core.fleet import Fleet, FleetNode, JobSummary
from muster.operator.core.observed import CommittedSteps, NodeReservation, ObservedJob, ObservedWorker, WorkerState
from muster.recipe.document import JobSpec, parse_job
from muster.words.signals import Heartbeat, StepRecord, TrainerPhase, TrainerSeconds, WorkerExit
from muster.words.status import JobStatus, Phase

NOW = 1_700_000_000.0
UID = "uid-1"
NODES = ("a", "b")


def spec(**top: Any) -> JobSpec:
    """camelCase keys as a user writes them; `gang` defaults to two nodes with 8 GPUs each. None leaves a key out."""
    training = {
        "model": {"preset": "muster-1m"},
        "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 16},
        "batch": {"tokensPerStep": 16 * 8 * 720},
        "length": {"steps": 100},
    }
    document = {"training": training, "gang": {"nodes": 2, "gpusPerNode": 8}} | top
    document = {key: value for key, value in document.items() if value is not None}
    return parse_job({"metadata": {"name": "job"}, "spec": document}).spec


def observed(status: JobStatus | None = None, now: float = NOW, **changes: Any) -> ObservedJob:
    values: dict[str, Any] = {
        "uid": UID,
        "namespace": "team",
        "name": "job",
        "created_at": NOW - 100.0,
        "generation": 1,
        "deleting": False,
        "version": "1",
        "now": now,
        "fresh": True,
        "spec": spec(),
        "status": status or JobStatus(queued_at=NOW - 100.0, since=NOW - 100.0),
        "checkpoint_uri": "file:///ckpt/uid-1",
    }
    return ObservedJob(**values | changes)


def granted(number: int = 0, nodes: tuple[str, ...] = NODES) -> NodeReservation:
    return NodeReservation(UID, number, "team", nodes, "pool-a", "on-demand", 8)


def beat(
    attempt: int, step: int, at: float = NOW, phase: TrainerPhase = TrainerPhase.STEP, rank: int = 0, **changes: Any
) -> Heartbeat:
    last = StepRecord(
        attempt=attempt,
        step=step,
        steps=100,
        at=at,
        loss=2.0,
        grad_norm=1.0,
        lr=0.1,
        tokens=1,
        tokens_per_second=10.0,
        step_seconds=1.0,
        data_wait_seconds=0.0,
        memory_bytes=1,
    )
    values = {
        "progressed_at": at,
        "started_at": at - 60.0,
        "last_step": last if step else None,
        "seconds": TrainerSeconds(),
    }
    return Heartbeat(attempt=attempt, rank=rank, pid=1, phase=phase, step=step, at=at, **values | changes)


def worker(index: int, attempt: int = 1, state: str = "running", **changes: Any) -> ObservedWorker:
    beats = (beat(attempt, 0, phase=TrainerPhase.INIT, rank=index),) if state == "running" else ()
    values: dict[str, Any] = {"created_at": NOW - 50.0, "since": NOW - 50.0, "heartbeats": beats}
    return ObservedWorker(index, attempt, NODES[index], WorkerState(state), **values | changes)


def exited(index: int, code: int, attempt: int = 1, at: float = NOW - 1.0, **changes: Any) -> ObservedWorker:
    values = {"message": "", "rank": index} | {k: changes.pop(k) for k in ("message", "signal") if k in changes}
    return worker(index, attempt, "exited", exit=WorkerExit(exit_code=code, at=at, **values), **changes)


def crew(attempt: int = 1, step: int = 5, now: float = NOW) -> tuple[ObservedWorker, ...]:
    """Both workers train and are at `step`."""
    return tuple(worker(i, attempt, heartbeats=(beat(attempt, step, now, rank=i),)) for i in range(2))


def settled(seen: ObservedJob, passes: int = 10) -> ObservedJob:
    """The state after the status writes that follow from it (no action is carried out)."""
    for _ in range(passes):
        decision = decide(seen)
        if decision.status == seen.status:
            return seen
        seen = with_status(seen, decision.status)
    raise AssertionError(f"decide does not come to rest: {seen.status}")


def with_status(seen: ObservedJob, status: JobStatus, **changes: Any) -> ObservedJob:
    return replace(seen, status=status, **changes)


def starting(**changes: Any) -> ObservedJob:
    """Attempt 1 was started on nodes a and b; nobody is there yet."""
    seen = observed(reservations=(granted(),), **changes)
    started = decide(seen)
    assert started.status.phase is Phase.STARTING
    return with_status(seen, started.status)


def running(step: int = 5, **changes: Any) -> ObservedJob:
    """Attempt 1 trains and is at `step`."""
    seen = starting(**changes)
    seen = with_status(seen, seen.status, workers=crew(step=step))
    seen = settled(seen)
    assert seen.status.phase is Phase.RUNNING
    return seen


def committed(step: int, at: float = NOW - 5.0) -> CommittedSteps:
    return CommittedSteps(step, at)


def gone(seen: ObservedJob) -> ObservedJob:
    """The same with no worker left."""
    return with_status(seen, seen.status, workers=())


def write(seen: ObservedJob, decision: JobDecision | None = None, **changes: Any) -> ObservedJob:
    """The state after one decision was written."""
    return with_status(seen, (decision or decide(seen)).status, **changes)


def node(name: str, gpus: int = 8, pool: str = "pool-a", **changes: Any) -> FleetNode:
    return FleetNode(name, pool, gpus=gpus, cpus=64.0, memory_bytes=2**40, **changes)


def summary(
    uid: str, spec_: JobSpec | None = None, age: float = 0.0, status: JobStatus | None = None, **changes: Any
) -> JobSummary:
    values = {"namespace": "team", "name": uid, "created_at": NOW - age, "deleting": False}
    waiting = JobStatus(queued_at=NOW - age, since=NOW - age)
    return JobSummary(uid=uid, spec=spec_ or spec(), status=status or waiting, **values | changes)


def fleet(nodes: list[FleetNode], jobs: list[JobSummary], **changes: Any) -> Fleet:
    return Fleet(**{"now": NOW, "fresh": True, "nodes": tuple(nodes), "jobs": tuple(jobs)} | changes)
