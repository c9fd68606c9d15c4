"""Who lives in a world: its nodes, its jobs, and the users who change their minds."""

from __future__ import annotations

import functools
import random
from typing import Any

from muster.recipe.document import JobSpec, parse_job
from muster.words.gang import CapacityPreference, Gang, Nodes, Topology
from muster.words.job import Recovery
from muster.words.program import Hang, Program
from muster.words.quotas import ProjectQuota, Quota
from muster.words.signals import Cause, Signal, SignalKind
from muster.words.status import STATUS_VERSION, JobStatus, Phase
from tests.sim.faults import Weather
from tests.sim.months import settle_months
from tests.sim.physics import SimJob, SimNode
from tests.sim.world import SimWorld

RACK = "example.com/rack"
PROJECTS = ("vision", "speech")
PEOPLE = ("ada", "ben", "")

_BASE = parse_job(
    {
        "metadata": {"name": "base"},
        "spec": {
            "training": {
                "model": {"preset": "muster-1m"},
                "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 16},
                "batch": {"tokensPerStep": 16 * 8 * 12},
                "length": {"steps": 100},
            }
        },
    }
).spec


# Programs of the user's own: one whose steps are counted, and one of which nothing is known but that it runs.
_PROGRAMS = {
    "counted": Program(command=("train.py",), hang=Hang(step_seconds=60)),
    "unwatched": Program(command=("./run",), launcher="none", hang=Hang(off=True)),
}
_PROGRAMS_SHARE = 0.25  # of the worlds


@functools.lru_cache(maxsize=4096)
def make_spec(
    low: int,
    high: int,
    gpus: int,
    prefer: str,
    topology: str,
    priority: int,
    recovery: str,
    deadline: int | None,
    ttl: int | None,
    program: str = "",
) -> JobSpec:
    """A validated spec; the same arguments give the same object."""
    gang = Gang(
        nodes=Nodes(min=low, max=high),
        gpus_per_node=gpus,
        capacity=CapacityPreference(prefer=prefer, fall_back_after_preemptions=2),  # type: ignore[arg-type]
        topology=Topology(
            required=RACK if topology == "required" else None, preferred=RACK if topology == "preferred" else None
        ),
    )
    policies = {
        "default": Recovery(),
        "strict": Recovery(
            budgets={"infrastructure": 2, "unknown": 1, "hang": 1}, backoff_seconds=2.0, exclude_node_after=1
        ),
        "patient": Recovery(
            budgets={"infrastructure": 50, "unknown": 50, "user_error": 1},
            backoff_seconds=0.0,
            stop_after_no_progress=50,
        ),
        "short": Recovery(budgets={"infrastructure": 0}, stop_after_no_progress=2, window_hours=1, exclude_hours=1),
    }
    work = {"training": None, "program": _PROGRAMS[program]} if program else {}
    return _BASE.model_copy(
        update=work
        | {
            "gang": gang,
            "priority": priority,
            "recovery": policies[recovery],
            "active_deadline_seconds": deadline,
            "ttl_seconds_after_finished": ttl,
        }
    )


def settle_nodes(world: SimWorld) -> None:
    rng = world.rng
    for pool in range(rng.randint(1, 2)):
        capacity, gpus = rng.choice(("spot", "on-demand")), rng.choice((4, 8))
        for index in range(rng.randint(2, 5)):
            name = f"n{pool}{index}"
            world.nodes[name] = SimNode(name, f"pool-{pool}", capacity, gpus, {RACK: f"r{pool}{index // 2}"})
    world.fleet_changed()
    world.grow_after_seconds = rng.choice((30.0, 30.0, 600.0))
    if rng.random() < 0.2:
        world.limits["team-a"] = rng.choice((8, 16))
    _settle_quotas(world)
    settle_months(world, PROJECTS)


def _settle_quotas(world: SimWorld) -> None:
    """By dice of their own, so that worlds without them are what they were before there were any. Some are lowered and
    raised again while gangs run."""
    dice, shares = random.Random(repr(world.weather) + "quotas"), _shares(world)
    ranks = random.Random(repr(world.weather) + "processes")
    if dice.random() < 0.7:
        world.quotas = {project: ProjectQuota(**share) for project, share in shares.items()}
        return

    def choose() -> None:
        limits = {
            project: dice.choice(
                (
                    ProjectQuota(gpus=dice.choice((0, 4, 8, 16))),
                    ProjectQuota(gangs=dice.choice((0, 1, 1, 2))),
                    ProjectQuota(person=Quota(gpus=dice.choice((4, 8)))),
                    ProjectQuota(person=Quota(gangs=1)),
                    ProjectQuota(gpus=16, gangs=3, person=Quota(gpus=8, gangs=2)),
                )
            )
            for project in dice.sample(PROJECTS, dice.randint(1, len(PROJECTS)))
        }
        if ranks.random() < 0.3:  # by dice of their own too
            project = ranks.choice(sorted(limits))
            limits[project] = limits[project].model_copy(update={"processes": ranks.choice((0, 2, 4, 8, 16))})
        world.quotas = {
            project: limits.get(project, ProjectQuota()).model_copy(update=shares.get(project, {}))
            for project in sorted(limits.keys() | shares.keys())
        }
        world.quotas_changed_at = world.t
        world.log(lambda: f"quotas: {world.quotas}")

    choose()
    for _ in range(dice.choice((0, 0, 2))):
        world.at(dice.uniform(0.0, world.weather.seconds), choose)


def _shares(world: SimWorld) -> dict[str, dict[str, Any]]:
    """Weights and guarantees, and who may preempt, by project: in a third of all worlds."""
    dice = random.Random(repr(world.weather) + "shares")
    if dice.random() < 0.67:
        return {}
    weighted = dice.random() < 0.7
    return {
        project: {
            "weight": dice.choice((None, 0.5, 1.0, 1.0, 3.0)) if weighted else None,
            "guaranteed_gpus": dice.choice((None, None, 4, 8)) if weighted else None,
            "preempts": dice.random() < 0.8,
        }
        for project in (*PROJECTS, "default")
    }


def settle_jobs(world: SimWorld) -> None:
    rng = world.rng
    for index in range(rng.randint(1, 4)):
        at = 0.0 if rng.random() < 0.5 else rng.uniform(0.0, world.weather.seconds / 2)
        world.at(at, functools.partial(submit, world, f"job{index}"))
    if any(quota.preempts for quota in world.quotas.values()):  # rare where few contend
        for index in range(rng.randint(2, 6)):
            world.at(rng.uniform(0.0, world.weather.seconds), functools.partial(submit, world, f"rival{index}"))
        if has_long_jobs(world):  # which others of their project want to follow
            for index in range(rng.randint(2, 5)):
                at = world.weather.seconds + rng.uniform(0.0, 900.0)
                world.at(at, functools.partial(submit, world, f"late{index}"))


def has_long_jobs(world: SimWorld) -> bool:
    """Those that come first run for longer than the minutes in which no equal puts them out; the last are of the same
    project.
    """
    may = any(quota.preempts for quota in world.quotas.values())
    return may and random.Random(repr(world.weather) + "long").random() < 0.5


def submit(world: SimWorld, name: str, kind: str = "") -> SimJob:
    """kind `small`: one of a stream that fills every hole, with a part of a node. `large`: all of the largest pool."""
    rng = world.rng
    largest = max(
        len([n for n in world.nodes.values() if n.pool == pool]) for pool in {n.pool for n in world.nodes.values()}
    )
    low = min(rng.choice((1, 1, 2, 2, 3, 4)), largest + (rng.random() < 0.05))
    high = low if rng.random() < 0.6 else min(low + rng.randint(1, 3), max(largest, low))
    uid = f"{name}-{len(world.jobs)}"
    dice = random.Random(f"{uid} program {world.weather!r}")  # its own, so that worlds without programs stay the same
    has_programs = not kind and random.Random(f"programs {world.weather!r}").random() < _PROGRAMS_SHARE
    program = dice.choice(("", *_PROGRAMS)) if has_programs else ""
    spec = make_spec(
        low,
        high,
        rng.choice((0, 2, 4, 4)),
        rng.choice(("any", "any", "spot", "on-demand")),
        rng.choice(("", "", "", "required", "preferred")),
        rng.choice((0, 0, 0, 5)),
        rng.choice(("default", "default", "strict", "patient", "short")),
        rng.choice((None, None, None, None, 300)),
        rng.choice((None, None, None, 60)),
        program,
    )
    if kind == "small":
        low = high = 1
        spec = make_spec(1, 1, rng.choice((2, 4)), "any", "", -9, "default", None, None)
    elif kind == "large":
        low = high = max(
            size for size in range(1, largest + 1) if _BASE.training_config.samples_per_step() % (4 * size) == 0
        )
        spec = make_spec(low, high, 4, "any", "", -9, "default", None, None)
    namespace = rng.choice(("team-a", "team-b"))
    job = SimJob(
        uid,
        namespace,
        name,
        world.wall,
        spec,
        JobStatus(queued_at=world.wall, since=world.wall),
        steps=rng.choice((5, 20, 40)) if high == low else rng.choice((20, 40, 100)),
        step_seconds=rng.choice((1.0, 4.0, 10.0)),
        commit_every=rng.choice((5, 10, 20)),
        load_seconds=rng.uniform(0.5, 10.0),
    )
    dice = random.Random(uid + repr(world.weather))
    job.project, job.owner = dice.choice((*PROJECTS, PROJECTS[0], "default")), dice.choice(PEOPLE)
    if not kind and has_long_jobs(world) and name.startswith(("job", "late")):
        job.project = PROJECTS[0]
        job.steps *= 3 if name.startswith("job") else 1
    elif not kind and world.quotas.get(job.project, ProjectQuota()).has_month_budget:
        job.steps *= 4  # long enough to run into it
    if kind and any(quota.preempts for quota in world.quotas.values()):  # of two projects that contend
        job.project = PROJECTS[kind == "small"]
        if kind == "large":  # a guarantee of others would rightly keep a part of the fleet from it
            world.quotas = {
                name: quota.model_copy(update={"guaranteed_gpus": None}) for name, quota in world.quotas.items()
            }
    elif kind and world.quotas:  # as much as the large gang needs, and the small ones want it too
        job.project = PROJECTS[0]
        if kind == "large":
            world.quotas = {job.project: ProjectQuota(gpus=low * spec.gang.gpus_per_node)}
            world.quotas_changed_at = world.t
            world.log(lambda: f"quotas: {world.quotas}")
    if world.chance(world.weather.bug):
        job.bug_step = rng.randint(1, job.steps)
    job.misnamed = world.chance(world.weather.misnamed) and not kind
    job.mistyped = world.chance(world.weather.mistyped) and not kind
    world.create_job(job)
    return job


class Mischief:
    """Whatever goes wrong by itself, at the rates of the weather."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        weather: Weather = world.weather
        self._kinds = {
            "node_death": self._node_death,
            "node_flap": self._node_flap,
            "partition": self._partition,
            "drain": self._drain,
            "spot": self._spot,
            "crash": lambda: self._crash((1, 139, 134, 137, 2), ""),
            "user_error": lambda: self._crash((80, 80, 82, 83), ""),
            "out_of_memory": lambda: self._crash((137, 81), "OOMKilled"),
            "hang": self._hang,
            "disk_pause": self._disk_pause,
            "hold": self._hold,
            "straggle": self._straggle,
            "pod_deleted": self._pod_deleted,
            "signals": self._signal,
            "user": self._user,
            "newer": self._newer,
            "clock_jump": self._clock_jump,
            "outage": self._outage,
            "quota": self._quota,
            "replaced": self._replace,
        }
        for name in self._kinds:
            if getattr(weather, name) > 0:
                self._schedule(name)

    def _schedule(self, name: str) -> None:
        seconds = self.world.rng.expovariate(getattr(self.world.weather, name))
        if self.world.t + seconds < self.world.weather.seconds:
            self.world.after(seconds, lambda: self._strike(name))

    def _strike(self, name: str) -> None:
        self._kinds[name]()
        self._schedule(name)

    def _node(self) -> SimNode:
        return self.world.rng.choice(list(self.world.nodes.values()))

    def _job(self) -> SimJob | None:
        jobs = [job for job in self.world.jobs.values() if not job.removed]
        return self.world.rng.choice(jobs) if jobs else None

    def _quota(self) -> None:
        namespace, seconds = self.world.rng.choice(("team-a", "team-b")), self.world.rng.uniform(20.0, 300.0)
        self.world.quota_until[namespace] = self.world.t + seconds
        self.world.log(lambda: f"the quota of {namespace} is used up for {seconds:.0f} s")

    def _node_death(self) -> None:
        node = self._node()
        self.world.node_down(node)
        self.world.after(self.world.rng.uniform(30.0, 600.0), lambda: self.world.node_up(node))

    def _node_flap(self) -> None:
        node = self._node()
        for index in range(self.world.rng.randint(1, 4)):
            self.world.after(index * 20.0, lambda: self.world.partition(node, self.world.rng.uniform(1.0, 15.0)))

    def _partition(self) -> None:
        self.world.partition(self._node(), self.world.rng.uniform(10.0, 300.0))

    def _drain(self) -> None:
        self.world.drain_node(self._node(), SignalKind.NODE_DRAIN, self.world.rng.uniform(100.0, 400.0))

    def _spot(self) -> None:
        spot = [node for node in self.world.nodes.values() if node.capacity == "spot"]
        if spot:
            self.world.drain_node(self.world.rng.choice(spot), SignalKind.SPOT_NOTICE, 120.0)

    def _crash(self, codes: tuple[int, ...], reason: str) -> None:
        alive = [p for job in self.world.jobs.values() for p in job.live() if self.world.nodes[p.node].reachable]
        if alive:
            process, code = self.world.rng.choice(alive), self.world.rng.choice(codes)
            self.world.end(process, code, reason, code - 128 if code > 128 else None)

    def _hang(self) -> None:
        live = [
            t for job in self.world.jobs.values() for t in job.trainings.values() if t.broken_at is None and not t.over
        ]
        if live:
            training = self.world.rng.choice(live)
            training.hang = self.world.rng.choice(("silent", "beating", "behind", "stopped", "mute"))
            training.suspect = self.world.rng.choice(training.members)
            job = self.world.jobs[training.uid]
            if (program := job.spec.program) is not None:
                # Nobody would ever notice: its user wants it so, or none of its steps has been counted yet.
                if program.hang.off or training.stepped(self.world.t) == training.resume_step:
                    training.hang, training.suspect = "", None
                    return
                # A launcher tells of all its ranks at once, and nothing of what they do within a step.
                training.hang = "beating" if training.hang in ("behind", "mute") else training.hang
            self.world.log(
                lambda: f"gang {job.name}-{training.attempt} hangs ({training.hang}, {training.suspect.index})"
            )
            self.world.break_gang(job, training.attempt, peers_notice=False)

    def _disk_pause(self) -> None:
        """No heartbeat of a node gets out, for less than what is called a hang; training goes on."""
        node, world = self._node(), self.world
        until = world.t + world.rng.uniform(5.0, 80.0)
        world.log(lambda: f"the disk of {node.name} pauses until {until:.0f}")
        for job, process in world.on(node):
            if process.muffled[1] < world.t:
                process.muffled = (world.t, until)
                job.muffled = True

    def _straggle(self) -> None:
        """Of one gang, somebody becomes slower than the others for a while. That ends no attempt."""
        live = [t for job in self.world.jobs.values() for t in job.trainings.values() if not t.over]
        if live:
            training = self.world.rng.choice(live)
            training.slow = self.world.rng.choice(training.members)
            training.slow_until = self.world.t + self.world.rng.uniform(5.0, 100.0)
            self.world.jobs[training.uid].slow_nodes.add(training.slow.node)

    def _hold(self) -> None:
        alive = [p for job in self.world.jobs.values() for p in job.live()]
        if alive:
            process = self.world.rng.choice(alive)
            process.held = (self.world.t, self.world.t + self.world.rng.uniform(0.2, 1.9))
            self.world.log(lambda: f"{process.uid}-{process.attempt}-{process.index} is held for a moment")
            self.world.news(process.uid)

    def _pod_deleted(self) -> None:
        """Somebody with kubectl: the worker is ended, and its object with it."""
        alive = [
            (job, p)
            for job in self.world.jobs.values()
            for p in job.live()
            if p.visible and self.world.nodes[p.node].reachable
        ]
        if alive:
            job, process = self.world.rng.choice(alive)
            self.world.log(lambda: f"somebody deletes {job.name}-{process.attempt}-{process.index}")
            job.allow(process.attempt, Cause.INFRASTRUCTURE, Cause.PREEMPTION, Cause.EVICTION)
            process.removing = process.told_to_stop = True
            self.world.end(process, 143, signal=15)
            self.world.forget(job, process)

    def _signal(self) -> None:
        """About the current attempt or an old one; the old ones must change nothing."""
        job = self._job()
        if job is None or job.status.attempt == 0:
            return
        world, rng = self.world, self.world.rng
        attempt = max(1, job.status.attempt - rng.choice((0, 1, 1, 2)))
        kind = rng.choice(
            (
                SignalKind.ALERT,
                SignalKind.STRAGGLER,
                SignalKind.REBALANCE,
                SignalKind.GPU_FAULT,
                SignalKind.COLLECTIVE_HANG,
            )
        )
        causes = {SignalKind.GPU_FAULT: Cause.INFRASTRUCTURE, SignalKind.COLLECTIVE_HANG: Cause.HANG}
        nodes = job.status.gang.nodes
        node = rng.choice(nodes) if nodes and attempt == job.status.attempt else None
        signal = Signal.model_construct(
            kind=kind,
            attempt=attempt,
            at=world.wall,
            worker=None,
            rank=None,
            node=node,
            message=f"{kind}",
            source="prometheus",
        )
        if kind in causes:
            job.allow(attempt, causes[kind])
        world.signal(job, signal)
        if world.chance(world.weather.late_signal):
            world.after(rng.uniform(5.0, 200.0), lambda: world.signal(job, signal))

    def _replace(self) -> None:
        """Somebody edits a status, so that one worker is to be replaced by its next life. A gang that starts waits for
        it; one that runs has lost a worker, which ends its attempt. What is said of the life before changes nothing.
        Ranks of a program that starts may have met already, and nobody would notice that they wait for the old life.
        """
        world, rng = self.world, self.world.rng
        jobs = [
            job
            for job in world.jobs.values()
            if job.status.schema_version == STATUS_VERSION
            and (job.status.phase is Phase.RUNNING or (job.status.phase is Phase.STARTING and not job.spec.program))
        ]
        if not jobs:
            return
        job = rng.choice(jobs)
        gang, attempt = job.status.gang, job.status.attempt
        before = job.status.current(rng.randrange(gang.wanted))
        lives = tuple(gang.incarnation(index) + (index == before.worker) for index in range(gang.wanted))
        job.status = job.status.model_copy(update={"gang": gang.model_copy(update={"incarnations": lives})})
        job.version += 1
        job.allow(attempt, Cause.INFRASTRUCTURE)  # also where the new life comes too late
        world.log(lambda: f"somebody replaces {before} of {job.name}")
        world.stored(job)
        late = Signal.model_construct(
            kind=SignalKind.NUMERIC,
            attempt=attempt,
            at=world.wall,
            worker=before.worker,
            incarnation=before.incarnation,
            rank=None,
            node=None,
            message="of a life that is over",
            source="prometheus",
        )
        world.after(rng.uniform(0.1, 60.0), lambda: world.signal(job, late))

    def _user(self) -> None:
        job = self._job()
        if job is None:
            return
        match self.world.rng.choice(
            ("suspend", "suspend", "resume", "resume", "cancel", "delete", "priority", "budget", "deadline")
        ):
            case "suspend":
                self.world.edit(job.uid, suspend=True)
            case "resume":
                self.world.edit(job.uid, suspend=False)
            case "cancel":
                self.world.edit(job.uid, cancel=True)
            case "delete":
                self.world.edit(job.uid, deleting=True)
                if self.world.rng.random() < 0.5:
                    name = job.name  # a second job of the same name, as soon as the first is gone
                    self.world.after(1.0, lambda: self._resubmit(job, name))
            case "priority":
                self.world.edit(job.uid, priority=self.world.rng.randint(-3, 9))
            case "budget":
                budget = self.world.rng.choice((0, 1, 30))
                self.world.edit(
                    job.uid, recovery=job.spec.recovery.model_copy(update={"budgets": {"infrastructure": budget}})
                )
            case "deadline":
                self.world.edit(job.uid, active_deadline_seconds=self.world.rng.choice((None, 200, 5000)))

    def _resubmit(self, old: SimJob, name: str) -> None:
        if old.removed:
            submit(self.world, name)
        elif self.world.t < self.world.weather.seconds:
            self.world.after(5.0, lambda: self._resubmit(old, name))

    def _newer(self) -> None:
        """A newer operator was here, and will take its mark away later: then the status is of an earlier release."""
        job = self._job()
        if job is None or job.status.phase.terminal or job.status.schema_version > STATUS_VERSION:
            return
        self._mark(job, STATUS_VERSION + 1)
        self.world.after(self.world.rng.uniform(10.0, 60.0), lambda: self._mark(job, STATUS_VERSION - 1))

    def _mark(self, job: SimJob, version: int) -> None:
        if not job.removed:
            job.status = job.status.model_copy(update={"schema_version": version})
            job.version += 1
            self.world.log(lambda: f"the status of {job.name} gets schema version {version}")
            self.world.stored(job)

    def _clock_jump(self) -> None:
        world = self.world
        seconds = world.rng.choice((-7200.0, -600.0, -30.0, 30.0, 400.0, 3600.0, 90_000.0))
        world.offset += seconds
        world.check.jumped = True
        world.set_back += max(0.0, -seconds)
        world.log(lambda: f"the clock jumps by {seconds:.0f} s")
        for job in world.jobs.values():
            # Between the jump and the next step a gang looks stalled; two jumps in a row can make it look so for long.
            job.allow(job.status.attempt, Cause.INFRASTRUCTURE)

    def _outage(self) -> None:
        self.world.outage_until = self.world.t + self.world.rng.uniform(2.0, 60.0)
        self.world.log(lambda: f"the API does not answer until {self.world.outage_until:.0f}")
