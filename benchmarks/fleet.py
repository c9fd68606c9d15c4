"""16,384 GPUs for 54 days, with the failures that the Llama 3 paper reports: what is left for training?

    python benchmarks/fleet.py [--days 54] [--seed 1] [--json FILE]

The first run is steered by Muster's production core and runner, gang, reservations and all; the second by what is
usual: a fixed checkpoint interval, the collectives' ten-minute time-out as the only detector, and a requeue. Both are
compared with the closed formula. ETTR is time spent on steps that were not trained again, over wall clock.

Sources. Failures: Llama 3 (arXiv 2407.21783, section 3.3.4, table 5): 419 unexpected interruptions by kind, 47
planned ones, 54 days, 16,384 GPUs. Checkpoint: ByteCheckpoint (arXiv 2407.20143, table 8), 405B on 8,960 GPUs: blocks
0.59 s, saves in 51.06 s, loads in 129.49 s; every rank's share, and so its time, shrinks with the number of ranks.
Formula: Meta (arXiv 2410.21680), with the time to commit added to the half interval, because an asynchronous save
counts only when it has landed. Interval: availability-optimal (arXiv 2410.18124). Requeue: 5 to 20 minutes (Meta, the
same paper). The other constants are assumptions and say so.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # to be run as a file

from benchmarks.ettr import best_interval, formula

from muster.operator.core.decision import Action, CreateWorker, RemoveWorker
from muster.operator.core.fleet import Fleet, FleetNode, JobSummary
from muster.operator.core.observed import CommittedSteps, NodeReservation, ObservedJob, ObservedWorker, WorkerState
from muster.operator.runner import JobRunner, RunnerListener
from muster.operator.world import ReservationSet
from muster.recipe.document import JobSpec, parse_job
from muster.words.signals import Heartbeat, Signal, SignalKind, StepRecord, TrainerPhase, TrainerSeconds, WorkerExit
from muster.words.status import JobStatus, Phase

DAY = 86_400.0


@dataclass(frozen=True)
class Site:
    """A gang, where it runs, and how long things take there; by default 16,384 GPUs. Times in seconds.

    start: a container starts from an image that is on the node (assumption). meet: 2,048 launchers meet, communicators
    are made (assumption). step: 16M tokens at 400 TFLOP/s per GPU, 405B parameters. not_ready: Kubernetes marks a
    silent node after 40 to 50 s. stop: until a broken gang is gone. repair: a faulty node is away for so long
    (assumption); spares stand in.
    """

    nodes: int = 2_048
    spares: int = 64
    gpus: int = 8
    start: float = 30.0
    meet: float = 20.0
    load: float = 129.49 * 8_960 / (2_048 * 8)
    block: float = 0.59
    save: float = 51.06 * 8_960 / (2_048 * 8)
    step: float = 6.0
    not_ready: float = 45.0
    stop: float = 2.0
    repair: float = 4 * 3600.0

    @property
    def restart(self) -> float:
        return self.start + self.meet + self.load


LLAMA = Site()
USUAL_INTERVAL_SECONDS, TIME_OUT_SECONDS, REQUEUE_SECONDS = 1_800.0, 600.0, (300.0, 1_200.0)

# How each kind shows. crash: a process ends; hang: nothing ends; lost: the node is gone; told: announced.
MIX: dict[str, tuple[int, str]] = {
    "faulty GPU": (148, "crash"),
    "GPU HBM3 memory": (72, "crash"),
    "software bug": (54, "software"),
    "network switch or cable": (35, "hang"),
    "unplanned host maintenance": (32, "lost"),
    "GPU SRAM memory": (19, "crash"),
    "GPU system processor": (17, "crash"),
    "NIC": (7, "hang"),
    "NCCL watchdog": (7, "hang"),
    "silent data corruption": (6, "crash"),
    "GPU thermal interface and sensor": (6, "crash"),
    "SSD": (3, "lost"),
    "power supply": (3, "lost"),
    "server chassis": (2, "lost"),
    "IO expansion board": (2, "lost"),
    "dependency": (2, "software"),
    "CPU": (2, "lost"),
    "system memory": (2, "lost"),
    "planned": (47, "told"),
}
INTERRUPTIONS = sum(count for count, _ in MIX.values())


def interruptions(rng: random.Random, seconds: float) -> list[tuple[float, str, str]]:
    """(moment, kind, how it shows), as a Poisson process with the paper's rates."""
    kinds = [(name, shows) for name, (_, shows) in MIX.items()]
    weights = [count for count, _ in MIX.values()]
    t, found = 0.0, []
    while (t := t + rng.expovariate(INTERRUPTIONS / (54 * DAY))) < seconds:
        name, shows = rng.choices(kinds, weights)[0]
        found.append((t, name, shows))
    return found


# The seconds of training from one save to the next, chosen as an attempt begins: of the job's status, at a moment.
Interval = Callable[[JobStatus, float], float]


# --- Muster: the production core over a world that is just detailed enough ---


@dataclass
class Gang:
    """One attempt: made, up, met, loaded, broken; its step and its commits follow from the time."""

    attempt: int
    resume_step: int
    made_at: float
    nodes: tuple[str, ...]
    site: Site
    stopped_at: float | None = None
    exits: dict[int, WorkerExit] = field(default_factory=dict)
    lost: int | None = None
    removing_at: float | None = None
    final_commit: int | None = None
    interval: float = 0.0

    @property
    def up_at(self) -> float:
        return self.made_at + self.site.start

    @property
    def trains_at(self) -> float:
        return self.up_at + self.site.meet + self.site.load

    def trained_seconds(self, t: float) -> float:
        """Time spent on steps; of each interval the save blocks a moment."""
        until = t if self.stopped_at is None else min(t, self.stopped_at)
        return max(0.0, until - self.trains_at) * self.interval / (self.interval + self.site.block)

    def step(self, t: float) -> int:
        return self.resume_step + int(self.trained_seconds(t) / self.site.step)

    def committed(self, t: float) -> int:
        """The newest step whose save has landed."""
        if self.final_commit is not None:
            return self.final_commit
        until = t if self.stopped_at is None else min(t, self.stopped_at)
        saves = int(max(0.0, until - self.site.save - self.trains_at) / (self.interval + self.site.block))
        return self.resume_step + int(saves * self.interval / self.site.step)


class Datacenter:
    """Implements muster.operator.world.World."""

    def __init__(self, site: Site, spec: JobSpec, interval: Interval, rng: random.Random) -> None:
        self.t, self.site, self.rng, self.interval = 0.0, site, rng, interval
        self.spec, self.status, self.version = spec, JobStatus(queued_at=0.0, since=0.0), 1
        self.down_until: dict[str, float] = {}
        self.names = tuple(f"node-{i:04d}" for i in range(site.nodes + site.spares))
        self.gang: Gang | None = None
        self.done_step = 0
        self.signals: list[Signal] = []
        self.held: tuple[NodeReservation, ...] = ()
        self.held_version = 1
        self.trained = 0.0
        # Caches, as a real world's watch has them.
        self.crew: tuple[Any, tuple[ObservedWorker, ...]] = (None, ())
        self.machines: tuple[Any, tuple[FleetNode, ...]] = (None, ())

    # what happens

    def interrupt(self, shows: str) -> None:
        gang = self.gang
        if gang is None or gang.stopped_at is not None or self.t < gang.trains_at:
            return  # there was nothing to interrupt; the paper counts interruptions of training
        victim = self.rng.randrange(self.site.nodes)
        node = gang.nodes[victim]
        if shows == "told":
            self.signals = [
                Signal(kind=SignalKind.NODE_DRAIN, attempt=gang.attempt, at=self.t, node=node, message="maintenance")
            ]
            self.down_until[node] = self.t + self.site.repair
            return
        gang.stopped_at = self.t
        code = {"crash": 134, "software": 1}.get(shows)
        if code is not None:
            gang.exits[victim] = WorkerExit(
                exit_code=code, at=self.t, rank=victim * self.site.gpus, signal=6 if code > 128 else None
            )
        if shows == "lost":
            gang.lost = victim
        if shows != "software":
            self.down_until[node] = self.t + self.site.repair

    def ready(self, name: str) -> bool:
        return self.down_until.get(name, -1.0) <= self.t

    # the protocol

    def now(self) -> float:
        return self.t

    def watch(self) -> AsyncIterator[str]:
        raise NotImplementedError

    async def jobs(self) -> tuple[str, ...]:
        return ("job",)

    async def observe(self, uid: str, fresh: bool = False) -> ObservedJob | None:
        gang = self.gang
        return ObservedJob(
            uid="job",
            namespace="team",
            name="llama",
            created_at=0.0,
            generation=1,
            deleting=False,
            version=str(self.version),
            now=self.t,
            fresh=True,
            spec=self.spec,
            status=self.status,
            workers=self._workers(gang) if gang else (),
            committed=CommittedSteps(self.commit(), self.t) if self.commit() else None,
            signals=tuple(self.signals),
            nodes_unfit=tuple(n for n in self.down_until if not self.ready(n) and n in self.status.gang.nodes),
            reservations=self.held,
        )

    def commit(self) -> int:
        return max(self.done_step, self.gang.committed(self.t) if self.gang else 0)

    def _workers(self, gang: Gang) -> tuple[ObservedWorker, ...]:
        state = WorkerState.RUNNING if self.t >= gang.up_at else WorkerState.STARTING
        key = (gang.attempt, state, gang.removing_at is not None)
        if self.crew[0] != key:
            made = (
                ObservedWorker(i, gang.attempt, node, state, gang.made_at, removing=key[2])
                for i, node in enumerate(gang.nodes)
            )
            self.crew = (key, tuple(made))
        plain = list(self.crew[1])
        plain[0] = replace(plain[0], heartbeats=(self._beat(gang),)) if self.t >= gang.up_at else plain[0]
        for index, end in gang.exits.items():
            plain[index] = replace(plain[index], state=WorkerState.EXITED, exit=end)
        if gang.lost is not None and gang.stopped_at is not None and self.t >= gang.stopped_at + self.site.not_ready:
            since = gang.stopped_at + self.site.not_ready
            plain[gang.lost] = replace(plain[gang.lost], state=WorkerState.UNREACHABLE, since=since)
        return tuple(plain)

    def _beat(self, gang: Gang) -> Heartbeat:
        met, step, seconds = gang.up_at + self.site.meet, gang.step(self.t), gang.trained_seconds(self.t)
        moved = self.t if gang.stopped_at is None else gang.stopped_at
        phase = (
            TrainerPhase.INIT if self.t < met else TrainerPhase.LOAD if self.t < gang.trains_at else TrainerPhase.STEP
        )
        blocked = max(0.0, moved - gang.trains_at) - seconds
        account = TrainerSeconds(
            init=min(self.t, met) - gang.up_at,
            load=max(0.0, min(self.t, gang.trains_at) - met),
            productive=(step - gang.resume_step) * self.site.step,
            checkpoint=max(0.0, blocked),
        )
        last = StepRecord(
            attempt=gang.attempt,
            step=step,
            at=moved,
            loss=2.0,
            grad_norm=1.0,
            lr=1e-4,
            tokens=16_000_000,
            tokens_per_second=16e6 / self.site.step,
            step_seconds=self.site.step,
            data_wait_seconds=0.0,
            memory_bytes=1,
        )
        return Heartbeat(
            attempt=gang.attempt,
            rank=0,
            pid=1,
            phase=phase,
            step=step,
            at=self.t,
            progressed_at=moved,
            started_at=gang.up_at,
            seconds=account,
            last_step=last if step > gang.resume_step else None,
        )

    async def write_status(self, uid: str, status: JobStatus, version: str) -> None:
        assert version == str(self.version)
        self.status, self.version = status, self.version + 1

    async def apply(self, uid: str, action: Action) -> None:
        if isinstance(action, CreateWorker):
            if self.gang is None:
                self.gang = Gang(
                    action.id.attempt,
                    action.resume_step,
                    self.t,
                    action.nodes,
                    self.site,
                    interval=self.interval(self.status, self.t),
                )
        elif isinstance(action, RemoveWorker) and self.gang is not None and self.gang.removing_at is None:
            self.gang.removing_at = self.t
            told = self.gang.stopped_at is None and action.grace_seconds > 10
            self.gang.removing_at += self.site.save + self.site.step if told else self.site.stop

    def clear(self) -> bool:
        """Whether the gang that was told to go is gone now: news, as from a watch."""
        gang = self.gang
        if gang is None or gang.removing_at is None or self.t < gang.removing_at:
            return False
        if gang.stopped_at is None:  # it was told in time: it saved its last step, then ended
            gang.stopped_at = self.t - self.site.save
            gang.final_commit = gang.step(self.t)
        self.done_step = max(self.done_step, gang.committed(self.t))
        self.trained += (gang.step(self.t) - gang.resume_step) * self.site.step
        self.gang = None
        return True

    async def fleet(self, fresh: bool = False) -> Fleet:
        down = frozenset(name for name in self.down_until if not self.ready(name))
        if self.machines[0] != down:
            made = (
                FleetNode(n, "h100", gpus=self.site.gpus, cpus=96.0, memory_bytes=2**41, ready=n not in down)
                for n in self.names
            )
            self.machines = (down, tuple(made))
        summary = JobSummary("job", "team", "llama", 0.0, False, self.spec, self.status)
        return Fleet(self.t, True, self.machines[1], (summary,))

    async def reservations(self) -> ReservationSet:
        return ReservationSet(self.held, str(self.held_version))

    async def write_reservations(self, entries: tuple[NodeReservation, ...], version: str) -> None:
        self.held, self.held_version = entries, self.held_version + 1


class Loud(RunnerListener):
    """Nothing may fail here."""

    def failed(self, key: str, error: Exception, retry_seconds: float) -> None:
        raise error


def drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the world never waits")


def muster(
    site: Site, spec: JobSpec, interval: Interval, rng: random.Random, pending: list[tuple[float, str, str]], end: float
) -> dict[str, Any]:
    """The production runner, from submission to the last moment. pending: the interruptions, in order."""
    world = Datacenter(site, spec, interval, rng)
    runner = JobRunner(world, Loud())
    drive(runner.resync(0.0))
    busy, passes = 0.0, 0
    while world.t < end:
        began = time.perf_counter()
        while drive(runner.turn(world.t)):
            passes += 1
        busy += time.perf_counter() - began
        world.t = min(end, _next_moment(world, runner, pending))
        if pending and pending[0][0] <= world.t:
            world.interrupt(pending.pop(0)[2])
        if world.clear():
            runner.enqueue("job", world.t)
    if world.gang is not None:
        world.trained += (world.gang.step(end) - world.gang.resume_step) * site.step
        world.done_step = max(world.done_step, world.gang.step(end))
    seconds = world.status.ledger.seconds
    return {
        "ettr": world.done_step * site.step / end,
        "ettr_by_account": seconds.get("productive", 0.0) / world.status.ledger.since,
        "attempts": world.status.attempt,
        "interruptions": {str(cause): count for cause, count in sorted(world.status.restarts.by_cause.items())},
        "goodput": {str(state): round(value / world.status.ledger.since, 4) for state, value in seconds.items()},
        "phase": str(world.status.phase),
        "operator_seconds": round(busy, 1),
        "operator_seconds_per_restart": round(busy / max(1, world.status.attempt), 3),
        "passes": passes,
    }


def _next_moment(world: Datacenter, runner: JobRunner, pending: list[tuple[float, str, str]]) -> float:
    """The next thing that happens. A healthy gang is looked at every ten minutes here instead of every five seconds, to
    save time; when something breaks it, the operator looks at once, as on the news of a watch.
    """
    due = runner.queue.next_at()
    moments = [moment for moment in (pending[0][0] if pending else None, due) if moment is not None]
    gang = world.gang
    told = any(signal.attempt == world.status.attempt for signal in world.signals)
    healthy = gang is not None and gang.stopped_at is None and world.status.phase is Phase.RUNNING and not told
    if healthy:
        moments = [moments[0] if pending else math.inf, world.t + 600.0]
    if gang is not None and gang.removing_at is not None:
        moments.append(gang.removing_at)
    return max(world.t + 1e-3, min(moments))


def usual(seed: int, days: float) -> dict[str, Any]:
    """What is usual: nothing notices but the collectives' time-out, and the job goes back into the queue."""
    rng, end = random.Random(seed), days * DAY
    t, useful, count = 0.0, 0.0, 0
    restart = LLAMA.restart
    for moment, _, shows in interruptions(rng, end):
        if moment < t:
            continue
        count += 1
        # Saves block for as long as an asynchronous one would: only the interval is the usual one.
        trained = (moment - t) * USUAL_INTERVAL_SECONDS / (USUAL_INTERVAL_SECONDS + LLAMA.block)
        landed = max(0.0, trained - LLAMA.save) // USUAL_INTERVAL_SECONDS * USUAL_INTERVAL_SECONDS
        useful += landed
        noticed = 0.0 if shows == "told" else TIME_OUT_SECONDS
        t = moment + noticed + rng.uniform(*REQUEUE_SECONDS) + restart
    useful += max(0.0, end - t)
    return {"ettr": useful / end, "interruptions": count}


def _spec() -> JobSpec:
    document = {
        "training": {
            "model": {"preset": "llama-8b"},
            "data": {"train": [{"source": "s3://data"}], "sequenceLength": 1024},
            "batch": {"tokensPerStep": 1024 * LLAMA.nodes * LLAMA.gpus},
            "length": {"steps": 10_000_000},
        },
        "gang": {"nodes": LLAMA.nodes, "gpusPerNode": LLAMA.gpus},
        "recovery": {"budgets": {"hang": 20, "infrastructure": 60, "unknown": 30}},
    }
    return parse_job({"metadata": {"name": "llama"}, "spec": document}).spec


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=54.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    mtbf, restart = 54 * DAY / INTERRUPTIONS, LLAMA.restart
    interval = best_interval(mtbf, restart, LLAMA.block)
    rng, end = random.Random(arguments.seed), arguments.days * DAY
    ours = muster(LLAMA, _spec(), lambda status, now: interval, rng, interruptions(rng, end), end)
    theirs = usual(arguments.seed, arguments.days)
    share = {
        shows: sum(c for c, s in MIX.values() if s == shows) / INTERRUPTIONS
        for shows in ("crash", "software", "hang", "lost", "told")
    }
    # From the failure to a gang that is gone, by the operator's own constants; announced ones lose no step.
    detection = (
        share["lost"] * (LLAMA.not_ready + 12.5)
        + share["hang"] * (120 + 60 + 2.5)
        + (share["crash"] + share["software"]) * 2.5
    )
    ours_formula = formula(mtbf, restart + detection + 5.0, interval, LLAMA.block, LLAMA.save)
    queue = sum(REQUEUE_SECONDS) / 2
    theirs_formula = formula(mtbf, restart + queue + TIME_OUT_SECONDS, USUAL_INTERVAL_SECONDS, LLAMA.block, LLAMA.save)
    print(
        f"{LLAMA.nodes * LLAMA.gpus} GPUs, {arguments.days:g} days, {INTERRUPTIONS} interruptions per 54 days, "
        f"one in {mtbf / 3600:.2f} h"
    )
    print(
        f"restart {restart:.0f} s, commit {LLAMA.save:.0f} s, block {LLAMA.block} s; Muster's interval {interval:.0f} s"
    )
    print(f"{'':24}{'ETTR':>9}{'formula':>9}{'attempts':>10}")
    print(f"{'with Muster':24}{ours['ettr']:9.2%}{ours_formula:9.2%}{ours['attempts']:10d}")
    print(f"{'with what is usual':24}{theirs['ettr']:9.2%}{theirs_formula:9.2%}{theirs['interruptions'] + 1:10d}")
    print(f"Muster's own account says {ours['ettr_by_account']:.2%}: {ours['goodput']}")
    print(
        f"restarts by cause: {ours['interruptions']}; {ours['passes']} passes, "
        f"{ours['operator_seconds_per_restart']} s of operator time per restart"
    )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"muster": ours, "usual": theirs, "formula": [ours_formula, theirs_formula]}, indent=1)
        )
    off = max(abs(ours["ettr"] - ours_formula), abs(theirs["ettr"] - theirs_formula))
    good = ours["ettr"] >= 0.97 and off <= 0.03
    agrees = abs(ours["ettr"] - ours["ettr_by_account"]) < 0.003
    print("holds: ETTR >= 97 %, formula within 3 points, account agrees" if good and agrees else "DOES NOT HOLD")
    return 0 if good and agrees else 1


if __name__ == "__main__":
    sys.exit(main())
