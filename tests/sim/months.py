"""What projects and people may use in a month: who has budgets in a world, who counts, and what is promised of them.

What was used is counted here from what happened, jobs that were removed included.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from muster.operator.core.codes import Code
from muster.operator.core.month_budgets import RUNWAY_SECONDS
from muster.operator.core.observed import NodeReservation
from muster.words.months import month_of, month_range
from muster.words.quotas import MonthSpent, ProjectQuota, Quota, Spent
from muster.words.status import JobStatus, Phase
from tests.sim.preemption_checks import ALIVE, QUOTA_SEEN_SECONDS

if TYPE_CHECKING:
    from tests.sim.physics import SimJob
    from tests.sim.world import SimWorld

FAIR_SECONDS = 3_000.0  # from fair weather until a budget is raised
COUNT_SECONDS = 60.0  # how often the API counts
SEEN_SECONDS = 120.0  # how old what an operator reads may be
STOPPED_SECONDS_MAX = 400.0  # from when a budget is used up until nobody trains on it, an operator's crash included


def settle_months(world: SimWorld, projects: tuple[str, ...]) -> None:
    """In an eighth of all worlds one project has a budget, some from shortly before a month's end. By dice of their
    own, and before there are jobs."""
    dice = random.Random(repr(world.weather) + "months")
    if dice.random() > 0.125:
        return
    if dice.random() < 0.5:
        _, ends = month_range(month_of(world.wall))
        world.offset = ends - dice.uniform(0.1, 1.0) * FAIR_SECONDS
    project, hours = dice.choice(projects), dice.choice((0.0, 1.0, 1.0, 2.0, 4.0))
    limits = {"gpu_hours_per_month": hours} if dice.random() < 0.6 else {"person": Quota(gpu_hours_per_month=hours)}
    world.quotas[project] = world.quotas.get(project, ProjectQuota()).model_copy(update=limits)
    world.log(lambda: f"{project} has a month's budget: {world.quotas[project]}")
    if dice.random() < 0.5:
        _keep_counting(world, project, dice.choice((0.0, 0.02)), dice)


def lift_later(world: SimWorld) -> None:
    """Whoever pays gives more, some time after the weather has cleared: nobody has a budget any more, and all may go
    on. Until then gangs run into it."""

    def lift() -> None:
        for project, quota in world.quotas.items():
            person = quota.person.model_copy(update={"gpu_hours_per_month": None})
            world.quotas[project] = quota.model_copy(update={"gpu_hours_per_month": None, "person": person})
        world.quotas_changed_at = world.t
        world.fleet_changed()

    if any(quota.has_month_budget for quota in world.quotas.values()):
        world.after(FAIR_SECONDS, lift)


def _keep_counting(world: SimWorld, project: str, fails: float, dice: random.Random) -> None:
    """The API counts, but while it is down."""

    def count() -> None:
        quota = world.quotas.get(project)
        if quota is None or not quota.has_month_budget:
            return
        down = dice.random() < fails
        if not down:
            owners = {job.owner for job in world.jobs.values() if job.project == project}
            people = {owner: Spent(gpu_hours=used(world, project, owner, world.wall)) for owner in sorted(owners)}
            total = Spent(gpu_hours=sum(spent.gpu_hours for spent in people.values()))
            spent = MonthSpent(month=month_of(world.wall), as_of=world.wall, total=total, people=people)
            world.quotas[project] = quota.model_copy(update={"spent": spent})
        world.after(1_000.0 if down else COUNT_SECONDS, count)

    count()


def used(world: SimWorld, project: str, owner: str | None, until: float, with_removed: bool = True) -> float:
    """GPU-hours of the month that `until` (by the wall's clock) lies in, up to then."""
    begins, _ = month_range(month_of(until))
    return sum(
        max(0.0, min(until, until if attempt.ended_at is None else attempt.ended_at) - max(begins, attempt.created_at))
        / 3600.0
        * attempt.workers
        * attempt.gpus_per_worker
        for job in world.jobs.values()
        if job.project == project and owner in (None, job.owner) and (with_removed or not job.removed)
        for attempt in job.status.attempts
        if attempt.outcome != "waiting"
    )


class MonthChecks:
    def __init__(self, world: SimWorld, require: Callable[[bool, str, str], None]) -> None:
        """`require` raises a Violation unless what it is given holds; then come the promise and the details."""
        self._world, self._require = world, require

    def status_written(self, job: SimJob, before: JobStatus, after: JobStatus, what: str, exact: bool) -> None:
        """`exact`: whether the wall's clock never jumped."""
        if after.code == Code.MONTH_LIMIT and before.code != Code.MONTH_LIMIT and exact and self._settled():
            stops = before.phase in ALIVE
            short = self._is_short(job, SEEN_SECONDS if stops else SEEN_SECONDS + RUNWAY_SECONDS)
            self._require(short, "only a budget that is used up stops or holds up", what)
        stays = after.phase is Phase.RUNNING and before.phase is Phase.RUNNING
        if stays and exact and self._settled() and self._world.weather.outage == 0:
            self._require(not self._overdue(job, after), "who runs into a budget is stopped", what)

    def granted(self, before: tuple[NodeReservation, ...], after: tuple[NodeReservation, ...], exact: bool) -> None:
        """Whoever begins or grows has a budget left that pays for it for a while. Who restarts goes on until that is
        used up."""
        known = {(entry.uid, node) for entry in before for node in entry.nodes}
        fresh = [entry for entry in after if not {(entry.uid, node) for node in entry.nodes} <= known]
        for entry in fresh if exact and self._settled() else ():
            job = self._world.jobs[entry.uid]
            if job.status.phase is Phase.RESTARTING:
                continue
            for whose, limit, owner in self._limits(job):
                then = self._world.wall - SEEN_SECONDS
                least = used(self._world, job.project, owner, then, with_removed=False)
                new = sum(len(e.nodes) * e.gpus for e in fresh if e.uid == job.uid)
                if month_of(then) != month_of(self._world.wall):
                    least = 0.0
                needed = least + new * RUNWAY_SECONDS / 3600.0
                fits = not entry.gpus or needed <= limit + 1e-6
                self._require(fits, "who begins can be paid for", f"{job.name}: {whose} {needed} of {limit} GPU-hours")

    def _limits(self, job: SimJob) -> Iterator[tuple[str, float, str | None]]:
        quota = self._world.quotas.get(job.project, ProjectQuota())
        for whose, limit, owner in (
            ("project", quota.gpu_hours_per_month, None),
            ("person", quota.person.gpu_hours_per_month, job.owner),
        ):
            if limit is not None:
                yield whose, limit, owner

    def _is_short(self, job: SimJob, seconds: float) -> bool:
        """Some budget is too short for the gang and all that may run beside it for so long."""
        mates = [mate for mate in self._world.jobs.values() if mate.project == job.project]
        own = {mate.uid for mate in mates}
        held = sum(len(e.nodes) * e.gpus for e in self._world.reservations if e.uid in own and not e.nominated)
        asked = max(job.spec.gang.nodes.max * job.spec.gang.gpus_per_node, 1)
        soon = (held + asked) * seconds / 3600.0
        wall = self._world.wall
        return any(
            used(self._world, job.project, owner, at) + soon >= limit
            for _, limit, owner in self._limits(job)
            for at in (wall, wall - SEEN_SECONDS)  # the month may just have ended
        )

    def _overdue(self, job: SimJob, after: JobStatus) -> bool:
        then = self._world.wall - STOPPED_SECONDS_MAX
        runs = after.since is not None and after.since <= then and job.spec.gang.gpus_per_node > 0
        runs = runs and month_of(then) == month_of(self._world.wall)
        return runs and any(
            used(self._world, job.project, owner, then, with_removed=False) >= limit
            for _, limit, owner in self._limits(job)
        )

    def _settled(self) -> bool:
        return self._world.t >= self._world.quotas_changed_at + max(QUOTA_SEEN_SECONDS, STOPPED_SECONDS_MAX)
