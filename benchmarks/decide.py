"""How fast the operator's core thinks, and how that grows with the fleet.

    python benchmarks/decide.py [--quick] [--json FILE]

decide: one decision over a job in each phase, for gangs of 2 to 5,000 workers. admission: one pass over a full queue
of 200 projects with quotas and shares, a fifth of it urgent jobs that may preempt, from 50 nodes and 10 jobs to 5,000
nodes and 10,000 jobs. restart: everything that the operator computes (observing and API calls excluded) to bring a gang
from its failure to its next running attempt.

Limits: decide p99 <= 2 ms; 1,000 queued jobs at 5,000 nodes <= 1 s; a 5,000-worker gang's restart <= 10 s.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from muster.operator.core.admit import admit
from muster.operator.core.audit import audit
from muster.operator.core.decide import decide
from muster.operator.core.decision import CreateWorker, JobDecision, RemoveWorker
from muster.operator.core.fleet import Fleet, FleetNode, JobSummary
from muster.operator.core.observed import CommittedSteps, NodeReservation, ObservedJob, ObservedWorker, WorkerState
from muster.recipe.document import JobSpec, parse_job
from muster.words.quotas import ProjectQuota, Quota
from muster.words.signals import Heartbeat, StepRecord, TrainerPhase, TrainerSeconds, WorkerExit
from muster.words.status import CheckpointStatus, GangStatus, JobStatus, Phase

NOW = 1_700_000_000.0
DECIDE_P99_SECONDS, ADMISSION_SECONDS, RESTART_SECONDS = 0.002, 1.0, 10.0
RANKS = 8
PROJECTS = 200  # each with a quota, and one for each of its people


def spec(nodes: int, gpus: int = RANKS) -> JobSpec:
    training = {
        "model": {"preset": "llama-8b"},
        "data": {"train": [{"source": "s3://data"}], "sequenceLength": 16},
        "batch": {"tokensPerStep": 16 * nodes * max(1, gpus)},
        "length": {"steps": 1000},
    }
    document = {"training": training, "gang": {"nodes": nodes, "gpusPerNode": gpus}, "recovery": {"backoffSeconds": 0}}
    return parse_job({"metadata": {"name": "job"}, "spec": document}).spec


def heartbeat(attempt: int, worker: int) -> Heartbeat:
    step = StepRecord(
        attempt=attempt,
        step=50,
        steps=1000,
        at=NOW,
        loss=2.0,
        grad_norm=1.0,
        lr=1e-4,
        tokens=1,
        tokens_per_second=1.0,
        step_seconds=5.0,
        data_wait_seconds=0.0,
        memory_bytes=1,
    )
    return Heartbeat(
        attempt=attempt,
        rank=worker * RANKS,
        pid=1,
        phase=TrainerPhase.STEP,
        step=50,
        at=NOW,
        progressed_at=NOW,
        started_at=NOW - 60,
        seconds=TrainerSeconds(productive=50.0),
        last_step=step if worker == 0 else None,
    )


def observed(size: int) -> ObservedJob:
    """A queued job whose nodes are reserved."""
    names = tuple(f"node-{i:05d}" for i in range(size))
    return ObservedJob(
        uid="uid",
        namespace="team",
        name="job",
        created_at=NOW - 100,
        generation=1,
        deleting=False,
        version="1",
        now=NOW,
        fresh=True,
        spec=spec(size),
        status=JobStatus(queued_at=NOW - 100, since=NOW - 100),
        committed=CommittedSteps(40, NOW - 30),
        reservations=(NodeReservation("uid", 0, "team", names, "pool", "on-demand", RANKS),),
    )


def crew(seen: ObservedJob, beats: bool) -> tuple[ObservedWorker, ...]:
    """Every worker runs; for a large gang the world gives rank 0's heartbeat and a few more (see Observed)."""
    shown = range(min(len(seen.status.gang.nodes), 64)) if beats else ()
    heard = {i: (heartbeat(seen.status.attempt, i),) for i in shown}
    return tuple(
        ObservedWorker(i, seen.status.attempt, node, WorkerState.RUNNING, NOW - 60, heartbeats=heard.get(i, ()))
        for i, node in enumerate(seen.status.gang.nodes)
    )


def life(size: int) -> dict[str, ObservedJob]:
    """The same job in every phase that concerns its gang."""
    queued = observed(size)
    starting = replace(queued, status=decide(queued).status)
    meeting = replace(starting, workers=crew(starting, beats=False))
    running = replace(starting, workers=crew(starting, beats=True))
    running = replace(running, status=decide(running).status)
    dead = replace(running.workers[1 % size], state=WorkerState.EXITED, exit=WorkerExit(exit_code=137, at=NOW))
    failing = replace(running, workers=(*running.workers[:1], dead, *running.workers[2:]) if size > 1 else (dead,))
    restarting = replace(failing, status=decide(failing).status)
    return {
        "queued": queued,
        "starting": starting,
        "meeting": meeting,
        "running": running,
        "failing": failing,
        "restarting": restarting,
        "gone": replace(restarting, workers=()),
    }


def percentiles(work: Callable[[], Any], times: int) -> tuple[float, float]:
    """Median and 99th percentile, in seconds of processor time: other processes on the machine don't count."""
    spent = []
    for _ in range(times):
        began = time.process_time_ns()
        work()
        spent.append((time.process_time_ns() - began) / 1e9)
    spent.sort()
    return spent[len(spent) // 2], spent[min(len(spent) - 1, int(len(spent) * 0.99))]


def decisions(sizes: tuple[int, ...], times: int) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for size in sizes:
        for phase, seen in life(size).items():
            median, p99 = percentiles(partial(decide, seen), times)
            rows[f"{size}/{phase}"] = {"median_ms": round(median * 1e3, 3), "p99_ms": round(p99 * 1e3, 3)}
    return rows


def fleet(nodes: int, jobs: int) -> tuple[Fleet, tuple[NodeReservation, ...]]:
    """Nine tenths of the fleet are held; gangs of 1 to 64 nodes wait, of six shapes and PROJECTS projects."""
    pools = max(1, nodes // 500)
    machines = tuple(
        FleetNode(f"node-{i:05d}", f"pool-{i % pools}", "on-demand" if i % 3 else "spot", RANKS, 96.0, 2**40)
        for i in range(nodes)
    )
    held = tuple(
        NodeReservation(f"held-{i}", 0, "team", (machines[i].name,), machines[i].pool, machines[i].capacity, RANKS)
        for i in range(int(nodes * 0.9))
    )
    shapes = [spec(n, g) for n, g in ((1, 8), (1, 4), (2, 8), (8, 8), (16, 8), (64, 8))]
    urgent = [shape.model_copy(update={"priority": 5}) for shape in shapes]
    waiting = [
        _summary(f"job-{i}", i, (urgent if i % 5 == 0 else shapes)[i % 6], JobStatus(queued_at=NOW - i), NOW - i)
        for i in range(jobs)
    ]
    there = [_summary(e.uid, i, shapes[0], _running(e, i), NOW) for i, e in enumerate(held)]
    quota = ProjectQuota(gpus=max(64, 4 * nodes * RANKS // PROJECTS), gangs=90, person=Quota(gpus=256, gangs=20))
    quotas = {
        f"project-{i}": quota.model_copy(update={"weight": 1.0 + i % 3, "guaranteed_gpus": 8, "preempts": True})
        for i in range(PROJECTS)
    }
    return Fleet(NOW, True, machines, (*there, *waiting), quotas=quotas), held


def _running(entry: NodeReservation, index: int) -> JobStatus:
    """It committed up to an hour ago."""
    gang = GangStatus(wanted=1, nodes=entry.nodes, pool=entry.pool, capacity="on-demand")
    commit = CheckpointStatus(step=1, committed_at=NOW - index % 3600, uri="s3://checkpoints")
    return JobStatus(phase=Phase.RUNNING, gang=gang, checkpoint=commit, since=NOW - 10_000)


def _summary(uid: str, index: int, spec: JobSpec, status: JobStatus, created_at: float) -> JobSummary:
    project, owner = f"project-{index % PROJECTS}", f"person-{index % 7}"
    return JobSummary(uid, "team", uid, created_at, False, spec, status, project, owner)


def admissions(sizes: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for nodes, jobs in sizes:
        seen, held = fleet(nodes, jobs)
        began = time.process_time()
        plan = admit(seen, held)
        seconds = time.process_time() - began
        rows[f"{nodes} nodes, {jobs} jobs"] = {
            "seconds": round(seconds, 4),
            "granted": len(plan.reservations) - len(held),
            "waiting": len(plan.waits),
            "preempting": len(plan.preemptions),
        }
        assert len(plan.reservations) - len(held) + len(plan.waits) == jobs
    return rows


def _obey(seen: ObservedJob, decision: JobDecision) -> tuple[ObservedWorker, ...]:
    gone = {a.id for a in decision.actions if isinstance(a, RemoveWorker)}
    made = [a for a in decision.actions if isinstance(a, CreateWorker)]
    left = tuple(worker for worker in seen.workers if worker.id not in gone)
    return left + tuple(ObservedWorker(a.id.worker, a.id.attempt, a.node, WorkerState.STARTING, NOW) for a in made)


def restart(size: int) -> float:
    """Processor seconds of decide and audit from a failure to the next running attempt, every pass counted."""
    seen = life(size)["failing"]
    spent, attempt = 0.0, seen.status.attempt
    for _ in range(200):
        began = time.process_time()
        decision = decide(seen)
        faults = audit(seen, decision)
        spent += time.process_time() - began
        assert not faults, faults
        if decision.status != seen.status:
            seen = replace(seen, status=decision.status)
        elif decision.status.phase is Phase.RUNNING and decision.status.attempt > attempt:
            return spent
        elif decision.actions:
            seen = replace(seen, workers=_obey(seen, decision))
        elif len(seen.workers) == size:
            seen = replace(seen, workers=crew(seen, beats=seen.workers[0].state is WorkerState.RUNNING))
    raise AssertionError(f"did not come back: {seen.status.phase} {seen.status.because}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the limits only, without the growth curves")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes = (5_000,) if arguments.quick else (2, 50, 500, 5_000)
    queues = (
        ((5_000, 1_000),) if arguments.quick else ((50, 10), (500, 100), (5_000, 10), (5_000, 1_000), (5_000, 10_000))
    )
    decided, admitted = decisions(sizes, 100 if arguments.quick else 300), admissions(queues)
    restarts = {size: round(restart(size), 3) for size in sizes}
    for name, row in decided.items():
        print(f"decide {name:20} median {row['median_ms']:8.3f} ms   p99 {row['p99_ms']:8.3f} ms")
    for name, row in admitted.items():
        print(
            f"admission {name:24} {row['seconds']:8.3f} s   {row['granted']} granted, {row['waiting']} told why not, "
            f"{row['preempting']} preempt"
        )
    for size, seconds in restarts.items():
        print(f"restart of a {size}-worker gang {seconds:8.3f} s of operator time")
    worst = max(row["p99_ms"] for row in decided.values()) / 1e3
    crowd = admitted["5000 nodes, 1000 jobs"]["seconds"]
    checks = {
        f"decide p99 {worst * 1e3:.2f} ms <= {DECIDE_P99_SECONDS * 1e3:.0f} ms": worst <= DECIDE_P99_SECONDS,
        f"1,000 jobs at 5,000 nodes {crowd:.2f} s <= {ADMISSION_SECONDS:.0f} s": crowd <= ADMISSION_SECONDS,
        f"restart of 5,000 workers {restarts[5_000]:.2f} s <= {RESTART_SECONDS:.0f} s": restarts[5_000]
        <= RESTART_SECONDS,
    }
    for words, holds in checks.items():
        print(f"{'holds' if holds else 'MISSED'}: {words}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"decide": decided, "admission": admitted, "restart": restarts}, indent=1))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
