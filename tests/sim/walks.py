"""Random fleets whose jobs all want in: whatever admission decides happens, until it decides nothing more. Gangs begin
at once; of those that make room some are gone at the next pass, others later.

Nobody submits, nobody ends, time stands still (so no gang is spared for having just begun, and whoever is in its first
minutes stays there): if preemption could go round in a circle, it would here, for ever. Every state on the way is
checked.

    python tests/sim/walks.py --states 1000000 [--first 0] [--processes 2]
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from muster.operator.core.admit import AdmissionPlan, admit
from muster.operator.core.codes import Code
from muster.operator.core.decide import decide
from muster.operator.core.fleet import Fleet, FleetNode, JobSummary
from muster.operator.core.observed import NodeReservation, ObservedJob, ObservedWorker, WorkerState
from muster.recipe.document import JobSpec
from muster.words.quotas import ProjectQuota
from muster.words.signals import WorkerExit
from muster.words.status import Attempt, CheckpointStatus, GangStatus, GoodputAccount, JobStatus, Phase
from tests.sim.people import make_spec

NOW = 1_700_000_000.0
GPUS = 4
PASSES_MAX = 200  # a fleet of 12 nodes and 14 jobs is at rest after a dozen
TYPES = ("old", "new")
PROJECTS = ("vision", "speech", "text")


@dataclass(frozen=True)
class Walk:
    """How many states were seen, how many gangs were put out, and what was wrong; empty if nothing was."""

    states: int
    evictions: int
    fault: str


def draw(dice: random.Random) -> Fleet:
    """A fleet whose jobs are all in the queue; some begin to ask only once others run (see `walk`)."""
    nodes = tuple(
        FleetNode(f"n{i:02d}", f"pool-{i % dice.choice((1, 1, 2))}", gpus=GPUS, cpus=64.0, memory_bytes=2**40)
        for i in range(dice.randint(2, 12))
    )
    shared = dice.random() < 0.7
    quotas = {
        project: ProjectQuota(
            weight=dice.choice((None, 0.5, 1, 1, 2, 5)) if shared else None,
            guaranteed_gpus=dice.choice((None, None, 4, 8, 40)) if shared else None,
            preempts=dice.random() < 0.9,
        )
        for project in PROJECTS
    }
    jobs = []
    for index in range(dice.randint(2, 14)):
        low = dice.choice((1, 1, 1, 2, 2, 3, 4))
        high = low if dice.random() < 0.7 else low + dice.choice((1, 2))
        spec = make_spec(
            low, high, dice.choice((2, 4, 4, 4)), "any", "", dice.choice((0, 0, 0, 1, 5)), "default", None, None
        )
        committed = CheckpointStatus(step=1, committed_at=NOW - dice.choice((10.0, 300.0, 9000.0)), uri="s3://c")
        status = JobStatus(queued_at=NOW - index, since=NOW - 10_000, checkpoint=dice.choice((None, committed)))
        uid = f"job{index:02d}"
        jobs.append(JobSummary(uid, "team", uid, NOW - dice.randint(0, 5), False, spec, status, dice.choice(PROJECTS)))
    served = [GoodputAccount(seconds={"productive": dice.choice((0.0, 300.0, 9000.0))}, since=NOW) for _ in jobs]
    jobs = [replace(j, status=j.status.model_copy(update={"ledger": s})) for j, s in zip(jobs, served, strict=True)]
    # Some ask for one type: what is freed for one gang is then no use to every other.
    nodes = tuple(replace(node, instance_type=dice.choice(TYPES)) for node in nodes)
    jobs = [replace(job, spec=_of_type(job.spec, dice.choice(TYPES))) if dice.random() < 0.3 else job for job in jobs]
    return Fleet(NOW, True, nodes, tuple(jobs), quotas=quotas)


def _of_type(spec: JobSpec, instance_type: str) -> JobSpec:
    return spec.model_copy(update={"gang": spec.gang.model_copy(update={"instance_types": (instance_type,)})})


def walk(seed: int) -> Walk:
    """First half of the jobs, until nothing changes; then all of them."""
    dice = random.Random(seed)
    whole = draw(dice)
    states = evictions = 0
    entries: tuple[NodeReservation, ...] = ()
    fleet = replace(whole, jobs=whole.jobs[: len(whole.jobs) // 2])
    for jobs in (fleet.jobs, whole.jobs[len(whole.jobs) // 2 :]):
        fleet = replace(fleet, jobs=fleet.jobs if jobs is fleet.jobs else (*fleet.jobs, *jobs))
        for _ in range(PASSES_MAX):
            plan = admit(fleet, entries)
            states += 1
            if fault := _fault(fleet, plan.reservations) or _taken_away(fleet, entries, plan):
                return Walk(states, evictions, f"seed {seed}: {fault}")
            if fault := _betrayed(fleet, plan):
                return Walk(states, evictions, f"seed {seed}: {fault}")
            for preemption in plan.preemptions:
                evictions += len(preemption.evictions)
                put_out = sum(eviction.gpus for eviction in preemption.evictions)
                gang = preemption.job.spec.gang
                priorities = {eviction.job.spec.priority for eviction in preemption.evictions}
                most = 2 if preemption.job.spec.priority in priorities else 4
                if put_out > most * gang.nodes.min * gang.gpus_per_node:
                    return Walk(states, evictions, f"seed {seed}: {put_out} GPUs are put out for {preemption.job.uid}")
            if plan.entries == entries and not any(entry.yields_to for entry in entries):
                if hoping := [uid for uid, wait in plan.waits.items() if wait.code == Code.AWAITING_PREEMPTION]:
                    return Walk(states, evictions, f"seed {seed}: nobody makes room for {hoping}")
                break
            if fault := _outlived(fleet, plan.reservations):
                return Walk(states, evictions, f"seed {seed}: {fault}")
            fleet, entries = _happen(fleet, plan, dice), plan.entries
        else:
            return Walk(states, evictions, f"seed {seed}: still preempting after {PASSES_MAX} passes")
    return Walk(states, evictions, "")


def _fault(fleet: Fleet, entries: tuple[NodeReservation, ...]) -> str:
    room = {node.name: node.gpus for node in fleet.nodes}
    held = {(entry.uid, name): entry.gpus for entry in entries for name in entry.nodes}
    used = Counter[str]()
    for (_, name), gpus in held.items():
        used[name] += gpus
    over = [name for name, gpus in used.items() if gpus > room[name]]
    if over:
        return f"{over} hold more than they have"
    return next((f"{entry.uid} yields to {entry.yields_to}" for entry in entries if not _may_yield(fleet, entry)), "")


def _taken_away(fleet: Fleet, before: tuple[NodeReservation, ...], plan: AdmissionPlan) -> str:
    """Nodes that were kept for a gang while others made room for it are kept until it begins: none of its priority or a
    lower one is given them, and it has no more put out, unless one of a higher priority took some of them.
    """
    priority = {job.uid: job.spec.priority for job in fleet.jobs}
    had = {(entry.uid, name) for entry in before if not entry.nominated for name in entry.nodes}
    new = {(entry.uid, name) for entry in plan.entries for name in entry.nodes} - had
    more = {made.job.uid for made in plan.preemptions if made.evictions}
    for entry in before:
        if not entry.nominated or entry.uid not in plan.waits:
            continue
        others = {uid for uid, name in new if name in entry.nodes} - {entry.uid}
        if (others or entry.uid in more) and not any(priority[uid] > priority[entry.uid] for uid in others):
            return f"{entry.nodes}, kept for {entry.uid}, went to {others}; more put out: {entry.uid in more}"
    return ""


def _betrayed(fleet: Fleet, plan: AdmissionPlan) -> str:
    """What is told of a job, and read by whoever may read it, names no job of another project."""
    jobs = {job.uid: job for job in fleet.jobs}
    told = [(uid, wait.because) for uid, wait in plan.waits.items()]
    told += [(entry.uid, entry.yields_because) for entry in plan.entries]
    told += [(made.job.uid, reason) for made in plan.preemptions for reason in made.reasons]
    for uid, words in told:
        hidden = (job for job in fleet.jobs if job.project != jobs[uid].project)
        if named := [job.uid for job in hidden if job.full_name in words or f"project {job.project}" in words]:
            return f"{uid} of {jobs[uid].project} is told of {named}: {words}"
    return ""


def _outlived(fleet: Fleet, entries: tuple[NodeReservation, ...]) -> str:
    """If a gang that was offered other nodes ended well at this very moment, it would leave nothing behind."""
    for offer in entries:
        job = next(job for job in fleet.jobs if job.uid == offer.uid)
        nodes, status = job.status.gang.nodes, job.status
        if not nodes or offer.number <= status.reservation:
            continue
        first = Attempt(number=1, created_at=NOW - 10_000)
        status = status.model_copy(update={"attempt": 1, "attempts": (first,)})
        workers = tuple(
            ObservedWorker(i, 1, name, WorkerState.EXITED, NOW - 10_000, WorkerExit(exit_code=0, at=NOW))
            for i, name in enumerate(nodes)
        )
        seen = ObservedJob(
            job.uid, "team", job.name, job.created_at, 1, False, "1", NOW, True, job.spec, status, workers,
            reservations=tuple(entry for entry in entries if entry.uid == job.uid),
        )  # fmt: skip
        ended = replace(job, status=decide(seen).status)
        assert ended.status.phase is Phase.SUCCEEDED
        others = tuple(other for other in fleet.jobs if other.uid != job.uid)
        if any(e.uid == job.uid for e in admit(replace(fleet, jobs=(*others, ended)), entries).entries):
            return f"what was held for {job.uid} outlives it"
    return ""


def _may_yield(fleet: Fleet, entry: NodeReservation) -> bool:
    jobs = {job.uid: job for job in fleet.jobs}
    if not entry.yields_to:
        return True
    job, victim = jobs[entry.yields_to], jobs[entry.uid]
    if not fleet.quotas[job.project].preempts or job.spec.priority < victim.spec.priority:
        return False
    if job.spec.priority > victim.spec.priority:
        return True
    if job.project == victim.project:
        return _is_new(job) and not _is_new(victim)
    shared = any(quota.weight is not None or quota.guaranteed_gpus is not None for quota in fleet.quotas.values())
    return shared and not _is_new(victim)


def _is_new(job: JobSummary) -> bool:
    """It has had nodes for less than ten minutes."""
    return job.status.ledger.seconds["productive"] < 600.0


def _happen(fleet: Fleet, plan: AdmissionPlan, dice: random.Random) -> Fleet:
    """Whoever was given nodes runs; whoever yields is gone from its nodes, now or later, and is in the queue or goes on
    smaller.
    """
    jobs = []
    for job in fleet.jobs:
        mine = [entry for entry in plan.reservations if entry.uid == job.uid]
        status = job.status
        number = status.reservation + (any(entry.yields_to for entry in mine) and dice.random() < 0.7)
        granted = next((entry for entry in mine if entry.number == number), None)
        if granted is None:
            status = JobStatus(
                reservation=number,
                queued_at=status.queued_at,
                since=status.since,
                checkpoint=status.checkpoint,
                ledger=status.ledger,
            )
        elif status.gang.nodes != granted.nodes or status.reservation != number:
            gang = GangStatus(wanted=len(granted.nodes), nodes=granted.nodes, pool=granted.pool, capacity="on-demand")
            status = status.model_copy(
                update={"phase": Phase.RUNNING, "code": "Running", "gang": gang, "reservation": number}
            )
        jobs.append(replace(job, status=status))
    return replace(fleet, jobs=tuple(jobs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    began, total, faults = time.monotonic(), Walk(0, 0, ""), 0
    with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:
        for seen in pool.imap_unordered(
            walk, range(arguments.first, arguments.first + arguments.states), chunksize=100
        ):
            total = Walk(total.states + seen.states, total.evictions + seen.evictions, "")
            if seen.fault:
                faults += 1
                print(seen.fault, flush=True)
            if total.states >= arguments.states or faults >= 5:
                break
        pool.terminate()
    print(f"{total.states} states, {total.evictions} gangs put out, {faults} faults, {time.monotonic() - began:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
