"""One seed, one world: the production runner driven by hand through bad weather, then healed and asked for progress."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from muster.operator.core.audit import AuditFailed
from muster.operator.core.codes import Code
from muster.operator.core.decision import Action, JobDecision
from muster.operator.core.observed import ObservedJob, WorkerState
from muster.operator.runner import JobRunner, RunnerListener
from muster.operator.world import FLEET
from muster.words.status import STATUS_VERSION, Phase
from tests.sim.checkers import Violation
from tests.sim.faults import draw, heal
from tests.sim.months import lift_later
from tests.sim.people import Mischief, settle_jobs, settle_nodes, submit
from tests.sim.view import View
from tests.sim.world import SimWorld

RESYNC_SECONDS = 120.0
# From fair weather until every job is where it should be. Clocks may have gone back by two hours before.
HEALED_SECONDS_MAX = 9_000.0
OBEYED_SECONDS_MAX = 900.0  # within which a cancelled or deleted job has ended
RETRIED_SECONDS_MAX = 60.0  # from when a failed pass is due again until it is made; less than RESYNC_SECONDS
PASSES_MAX = 60_000  # an operator that spins is broken too
# A job that waits for one of these can wait for ever: nothing in this world will change it.
HOPELESS = frozenset({Code.GANG_TOO_LARGE, Code.NODE_TOO_SMALL, Code.TOPOLOGY_UNSATISFIABLE, Code.EXCEEDS_LIMIT})


@dataclass(frozen=True)
class RunResult:
    """failure: the broken promise, or empty. history: what happened, if it was traced."""

    seed: int
    failure: str
    history: tuple[str, ...]
    passes: int
    counts: dict[str, int]


class _Recorder(RunnerListener):
    """An audit that fails is our mistake; any other error is the world's weather, and the pass is made again."""

    def __init__(self, world: SimWorld, who: str) -> None:
        self.world, self.who = world, who
        self.deaf = False  # its operator is dead
        self._tries = Counter[str]()

    def decided(self, seen: ObservedJob, decision: JobDecision) -> None:
        self._tries[seen.uid] += 1

    def failed(self, key: str, error: Exception, retry_seconds: float) -> None:
        self._tries[key] += 1
        # Where calls take seconds, the single-handed operator of this world may have others to see to for that long.
        if key != FLEET and self.world.weather.latency < 1.0:
            tries = self._tries[key]
            self.world.after(retry_seconds + RETRIED_SECONDS_MAX, lambda: self._tried_again(key, tries))
        self.world.log(lambda: f"{self.who}: {key or 'admission'} failed: {error}; again in {retry_seconds:.2f} s")
        if isinstance(error, AuditFailed):
            raise Violation(f"every decision passes audit: {error}")
        if type(error).__name__ != "ApiError":
            raise error

    def _tried_again(self, uid: str, tries: int) -> None:
        if not self.deaf and self._tries[uid] == tries and not self.world.jobs[uid].removed:
            raise Violation(f"a failed pass is made again: {self.who} forgot {uid} for {RETRIED_SECONDS_MAX:.0f} s")


class Operator:
    """An operator process: a Runner, its one coroutine in flight, and the chance to die between any two awaits."""

    def __init__(self, world: SimWorld, who: str) -> None:
        self.world, self.who = world, who
        self.passes = 0
        self._life = 0
        self._wake_at: float | None = None
        self.start()
        world.listeners.append(self._hear)

    def start(self) -> None:
        self._life += 1
        self.view = View(self.world, self.who)
        self.recorder = _Recorder(self.world, self.who)
        self.runner = JobRunner(self.view, self.recorder)
        self._task: Coroutine[Any, Any, Any] | None = None
        self._wake_at = None
        self.world.log(lambda: f"{self.who} starts")
        self._resync(self._life)

    def crash(self) -> None:
        """Die here and now. A call that was on its way may still arrive."""
        self.world.log(lambda: f"{self.who} crashes")
        if self._task is not None:
            for uid, action in self.view.in_flight:
                if self.world.rng.random() < 0.5:
                    self.world.after(self.world.rng.uniform(0.1, 90.0), functools.partial(self._late, uid, action))
            self._task.close()
        self._task = None
        self.recorder.deaf = True
        self._life += 1
        life = self._life
        self.world.after(self.world.rng.uniform(0.5, 40.0), lambda: self.start() if self._life == life else None)

    def _late(self, uid: str, action: Action) -> None:
        job = self.world.jobs.get(uid)
        if job is not None and not job.removed:
            self.world.act(uid, action, f"{self.who} (late)")

    def _resync(self, life: int) -> None:
        if life != self._life:
            return
        for uid, job in self.world.jobs.items():
            if not job.removed:
                self.runner.enqueue(uid, self.world.t)
        self.runner.enqueue(FLEET, self.world.t)
        self._poke()
        self.world.after(RESYNC_SECONDS, lambda: self._resync(life))

    def _hear(self, key: str) -> None:
        if self.world.chance(self.world.weather.lost_news):
            return
        life = self._life
        self.world.after(self.world.rng.uniform(0.0, 2.0 * self.world.weather.latency), lambda: self._notice(key, life))

    def _notice(self, key: str, life: int) -> None:
        if life == self._life:
            self.runner.enqueue(key, self.world.t)
            self._poke()

    def _poke(self) -> None:
        """Take up work as soon as something is due."""
        if self._task is not None:
            return
        due = self.runner.queue.next_at()
        if due is None or (self._wake_at is not None and self._wake_at <= max(due, self.world.t)):
            return
        self._wake_at, life = max(due, self.world.t), self._life
        self.world.at(self._wake_at, lambda: self._work(life))

    def _work(self, life: int) -> None:
        if life != self._life or self._task is not None:
            return
        self._wake_at = None
        self._task = self.runner.turn(self.world.t)
        self.passes += 1
        if self.passes > PASSES_MAX:
            raise Violation(f"an operator does not spin: {self.passes} passes")
        self._advance(life)

    def _advance(self, life: int) -> None:
        if life != self._life or self._task is None:
            return
        try:
            self._task.send(None)
        except StopIteration:
            self._task = None
            self._poke()
            return
        latency = self.world.weather.latency
        self.world.after(self.world.rng.expovariate(1 / latency), lambda: self._advance(life))


def run_seed(seed: int, trace: bool = False) -> RunResult:
    rng = random.Random(seed)
    weather = draw(rng)
    world = SimWorld(rng, weather, trace)
    operators: list[Operator] = []
    failure = ""
    try:
        settle_nodes(world)
        settle_jobs(world)
        operators += [Operator(world, f"op{index}") for index in range(weather.operators)]
        Mischief(world)
        _schedule_crashes(world, operators)
        world.run_until(weather.seconds)
        _heal(world, operators)
        _demand_progress(world)
    except Violation as violation:
        failure = str(violation)
    except Exception as error:
        failure = f"an exception got out: {type(error).__name__}: {error}"
        if trace:
            raise
    finally:
        for operator in operators:
            if operator._task is not None:
                operator._task.close()
    counts = {phase.value: sum(job.status.phase is phase for job in world.jobs.values()) for phase in Phase}
    counts["attempts"] = sum(job.status.attempt for job in world.jobs.values())
    history = tuple(f"{t:9.2f}  {text}" for t, text in world.history)
    return RunResult(seed, failure, history, sum(operator.passes for operator in operators), counts)


def _schedule_crashes(world: SimWorld, operators: list[Operator]) -> None:
    def crash() -> None:
        world.rng.choice(operators).crash()
        again()

    def again() -> None:
        if world.weather.operator_crash > 0:
            world.after(world.rng.expovariate(world.weather.operator_crash), crash)

    again()


def _heal(world: SimWorld, operators: list[Operator]) -> None:
    """Fair weather: every machine is back, everything that was stuck moves, users want their jobs to run."""
    world.weather = heal(world.weather)
    world.outage_until = 0.0
    world.log(lambda: "--- the weather clears ---")
    for node in world.nodes.values():
        node.draining = node.gone = False
        world.node_up(node)
    for job in list(world.jobs.values()):
        if job.status.schema_version > STATUS_VERSION:
            job.status = job.status.model_copy(update={"schema_version": STATUS_VERSION})
            job.version += 1
        if job.spec.suspend:
            world.edit(job.uid, suspend=False)
        world.stored(job)
        for process in list(job.processes.values()):
            stuck = process.state is WorkerState.STARTING and process.visible and not process.removing
            if stuck and not process.reason:  # what can't be pulled stays so: the operator must give up on it
                world._start(job, process)
    lift_later(world)
    world.fleet_changed()
    world.check.preemption.weather_cleared()


def _demand_progress(world: SimWorld) -> None:
    """Liveness. A large gang must also get its turn while small jobs keep coming."""
    rng = world.rng
    waiting = {uid for uid, job in world.jobs.items() if _expected(world, uid)}
    if rng.random() < 0.1:
        waiting.add(submit(world, "large", "large").uid)
        _keep_coming(world, waiting)
    world.run_until(world.t + OBEYED_SECONDS_MAX, stop=lambda: not any(_expected(world, uid) for uid in waiting))
    for job in world.jobs.values():
        if _expected(world, job.uid) and (job.spec.cancel or job.deleting):
            raise Violation(
                f"the user is obeyed: {job.name} is {job.status.phase} ({job.status.code}) although unwanted"
            )
    patience = HEALED_SECONDS_MAX + world.set_back  # deadlines follow the wall clock, and so come later by as much
    world.run_until(world.t + patience, stop=lambda: not any(_expected(world, uid) for uid in waiting))
    # A job that begins late, such as after a month's limit was raised, is given the time to end.
    training = {uid for uid in waiting if _expected(world, uid) and world.jobs[uid].status.phase is Phase.RUNNING}
    if training:
        world.run_until(world.t + patience, stop=lambda: not any(_expected(world, uid) for uid in training))
    for job in (world.jobs[uid] for uid in waiting if _expected(world, uid)):
        raise Violation(
            f"in fair weather every job gets on: {job.name} is {job.status.phase} "
            f"({job.status.code}: {job.status.because}) after {patience:.0f} s"
        )
    _demand_order(world)


def _keep_coming(world: SimWorld, waiting: set[str]) -> None:
    """Small jobs, more than fit, for as long as somebody waits."""
    if any(_expected(world, uid) and world.jobs[uid].status.phase is Phase.QUEUED for uid in waiting):
        if sum(job.status.phase is Phase.QUEUED for job in world.jobs.values()) < 6:
            submit(world, f"small{len(world.jobs)}", "small")
        world.after(world.rng.uniform(1.0, 10.0), lambda: _keep_coming(world, waiting))


def _demand_order(world: SimWorld) -> None:
    """Nothing is left lying about by those who are through by now; others may still get their turn."""
    through = [job for job in world.jobs.values() if job.removed or job.status.phase.terminal]
    world.run_until(world.t + 120.0)
    for job in world.jobs.values():
        world.check.goodput_is_true(job)
        if job.deleting and not job.removed:
            raise Violation(f"a deleted job goes: {job.name} is {job.status.phase} ({job.status.code})")
    for job in through:
        if left := [str(p.id) for p in job.processes.values() if p.visible]:
            raise Violation(f"terminal jobs keep sweeping: {job.name} is {job.status.phase} and has {left}")
        if held := [e for e in world.reservations if e.uid == job.uid]:
            raise Violation(f"no reservation is left behind: {held}")


def _expected(world: SimWorld, uid: str) -> bool:
    """The job still has to get somewhere."""
    job = world.jobs[uid]
    return not (
        job.removed or job.status.phase.terminal or (job.status.phase is Phase.QUEUED and job.status.code in HOPELESS)
    )
