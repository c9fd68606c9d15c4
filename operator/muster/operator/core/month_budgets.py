"""Monthly budgets (UTC) of projects and people, their usage, and the jobs that wait or stop for them.

The API counts what was used, and says up to when; what ran since is added here from the jobs' own attempts, so that a
budget holds while the API is down. Then a job that was deleted meanwhile is missing, and nothing else. A new month
begins with nothing used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from muster.operator.core.codes import Code
from muster.operator.core.fleet import Fleet, JobSummary
from muster.operator.core.observed import QueueWait
from muster.words.months import month_of, month_range
from muster.words.prices import rate
from muster.words.quotas import MonthSpent, ProjectQuota, Quota, Spent
from muster.words.status import Phase
from muster.words.times import rfc3339

# A gang begins only where what is left pays for it, and for what runs, for so long: at half of it a large gang would
# stop before it has trained much, at twice of it so much of a budget's end would idle.
RUNWAY_SECONDS = 900.0
STALE_SECONDS = 600.0  # the API counts every minute; older than this is said
LOOK_SECONDS_MIN = 1.0
_HOLDING = (Phase.STARTING, Phase.RUNNING, Phase.RESTARTING)


@dataclass(slots=True)
class _MonthBudget:
    """Monthly budget of one project or person in one unit, and its usage."""

    whose: str
    unit: str
    field: str
    limit: float
    used: float = 0.0
    per_hour: float = 0.0
    """Use of the running jobs."""

    @property
    def spent(self) -> bool:
        return self.used >= self.limit

    def lasts(self, more_per_hour: float) -> bool:
        """Return whether the budget lasts for the runway with that much more."""
        return self.used + (self.per_hour + more_per_hour) * RUNWAY_SECONDS / 3600.0 <= self.limit


@dataclass(slots=True)
class _BudgetAccount:
    """The budgets that a job's use counts for."""

    gpu_hours: tuple[_MonthBudget, ...]
    money: tuple[_MonthBudget, ...]
    stale: str

    def __iter__(self) -> Iterator[_MonthBudget]:
        yield from (*self.gpu_hours, *self.money)


class MonthBudgets:
    """Every month's budget of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._month = month_of(max(0.0, fleet.now))
        self._begins, self._ends = month_range(self._month)
        self._limited = {name: quota for name, quota in fleet.quotas.items() if quota.has_month_budget}
        self._budgets: dict[tuple[str, str], _BudgetAccount] = {}
        self._wholes: dict[str, _BudgetAccount] = {}
        for job in fleet.jobs if self._limited else ():
            if job.project in self._limited:
                self._count(job)

    def wait(self, job: JobSummary) -> QueueWait | None:
        """Return the exhausted budget that keeps the job out; None if there is none."""
        account = self._account(job)
        if account is None:
            return None
        for budget in account:
            uses = job.spec.gang.gpus_per_node > 0 or budget in account.money
            if budget.spent and (uses or budget.limit <= 0):
                return QueueWait(Code.MONTH_LIMIT, self._text(budget, account.stale))
        return None

    def short(self, job: JobSummary, nodes: int, instance_type: str, capacity: str) -> QueueWait | None:
        """Return why that many (more) nodes of the kind exceed what is left; None if they don't."""
        account = self._account(job)
        if account is None:
            return None
        gpus = job.spec.gang.gpus_per_node
        for budget in account.gpu_hours:
            if gpus and not budget.lasts(nodes * gpus):
                return QueueWait(Code.MONTH_LIMIT, self._short_text(budget, account.stale))
        cost = rate(instance_type, capacity, gpus, self._fleet.prices).cost
        for budget in account.money:
            if cost is None:
                kind = f"{capacity} nodes of type {instance_type or '(unknown)'}"
                remedy = f"and the price of {kind} is not known: add it to the table of prices"
                return QueueWait(Code.MONTH_LIMIT, f"{budget.whose} has a budget in money, {remedy}")
            if not budget.lasts(nodes * cost):
                return QueueWait(Code.MONTH_LIMIT, self._short_text(budget, account.stale))
        return None

    def hold(self, job: JobSummary, nodes: int, instance_type: str, capacity: str) -> None:
        """Record that the job is given so many more nodes."""
        self._use(job, nodes, job.spec.gang.gpus_per_node, instance_type, capacity)

    def waits(self) -> dict[str, QueueWait]:
        """Return the waits of running jobs that must stop because their budget is used up, and of those that stopped
        for it and may continue because there is a budget again."""
        waits = {}
        for job in self._fleet.jobs:
            status = job.status
            if status.phase in _HOLDING and (spent := self.wait(job)) is not None:
                waits[job.uid] = spent
            elif status.phase is Phase.SUSPENDED and status.code == Code.MONTH_LIMIT and self._may_go_on(job):
                waits[job.uid] = QueueWait(Code.AWAITING_ADMISSION, "there is a budget for it again; asking for nodes")
        return waits

    def look_after(self) -> float | None:
        """Seconds until the first budget is used up, or the month ends; None where there is no budget."""
        accounts = [*self._budgets.values(), *self._wholes.values()]
        left = [
            (budget.limit - budget.used) / budget.per_hour * 3600.0
            for account in accounts
            for budget in account
            if budget.per_hour > 0 and not budget.spent
        ]
        return max(LOOK_SECONDS_MIN, min([*left, self._ends - self._fleet.now])) if accounts else None

    def _may_go_on(self, job: JobSummary) -> bool:
        if self.wait(job) is not None:
            return False
        account, least = self._account(job), job.spec.gang.nodes.min
        return account is None or all(b.lasts(least * job.spec.gang.gpus_per_node) for b in account.gpu_hours)

    def _count(self, job: JobSummary) -> None:
        """Return the usage of its attempts since the API counted, and its current usage."""
        since = self._since(self._limited[job.project].spent)
        gpus = job.spec.gang.gpus_per_node
        account = self._account(job)
        assert account is not None
        for attempt in reversed(job.status.attempts):
            if attempt.ended_at is not None and attempt.ended_at <= since:
                break
            if attempt.outcome == "waiting":
                continue
            capacity, kind = attempt.capacity or "on-demand", attempt.instance_type
            end = self._fleet.now if attempt.ended_at is None else attempt.ended_at
            hours = max(0.0, end - max(since, attempt.created_at)) / 3600.0 * attempt.workers
            cost = rate(kind, capacity, attempt.gpus_per_worker, self._fleet.prices).cost
            for budget in account.gpu_hours:
                budget.used += hours * attempt.gpus_per_worker
            for budget in account.money:
                budget.used += hours * (cost or 0.0)
            if attempt.ended_at is None and not job.status.phase.terminal:
                self._use(job, attempt.workers, gpus, kind, capacity)

    def _use(self, job: JobSummary, nodes: int, gpus: int, instance_type: str, capacity: str) -> None:
        account = self._account(job)
        if account is None:
            return
        cost = rate(instance_type, capacity, gpus, self._fleet.prices).cost or 0.0
        for budget in account.gpu_hours:
            budget.per_hour += nodes * gpus
        for budget in account.money:
            budget.per_hour += nodes * cost

    def _account(self, job: JobSummary) -> _BudgetAccount | None:
        """The person's budgets first. None where the project has none."""
        quota = self._limited.get(job.project)
        if quota is None:
            return None
        key = (job.project, job.owner)
        if key not in self._budgets:
            whole = self._whole(job.project, quota)
            spent = self._spent(quota.spent)
            used = spent.people.get(job.owner, Spent()) if spent else Spent()
            whose = f"{job.owner or 'jobs without an owner'} in project {job.project}"
            mine = self._made(whose, quota.person, used, "quota.person.")
            self._budgets[key] = _BudgetAccount(
                (*mine.gpu_hours, *whole.gpu_hours), (*mine.money, *whole.money), whole.stale
            )
        return self._budgets[key]

    def _whole(self, project: str, quota: ProjectQuota) -> _BudgetAccount:
        if project not in self._wholes:
            spent = self._spent(quota.spent)
            made = self._made(f"project {project}", quota, spent.total if spent else Spent(), "quota.")
            if self._fleet.now - self._since(quota.spent) > STALE_SECONDS:
                at = rfc3339(self._since(quota.spent)).partition(".")[0]
                made.stale = f"; the API last counted at {at}Z, what ran since is added from the jobs that are there"
            self._wholes[project] = made
        return self._wholes[project]

    def _made(self, whose: str, quota: Quota, used: Spent, path: str) -> _BudgetAccount:
        hours, money = quota.gpu_hours_per_month, quota.money_per_month
        currency = self._fleet.prices.currency
        of_hours = _MonthBudget(whose, "GPU-hours", f"{path}gpuHoursPerMonth", hours or 0.0, used.gpu_hours)
        of_money = _MonthBudget(whose, currency, f"{path}moneyPerMonth", money or 0.0, used.money)
        return _BudgetAccount(
            () if hours is None else (of_hours,),
            () if money is None else (of_money,),
            "",
        )

    def _spent(self, spent: MonthSpent | None) -> MonthSpent | None:
        """Return the API's count, if it is of this month."""
        return spent if spent is not None and spent.month == self._month else None

    def _since(self, spent: MonthSpent | None) -> float:
        """Return the time from which usage is not counted yet."""
        spending = self._spent(spent)
        return self._begins if spending is None else max(self._begins, spending.as_of)

    def _text(self, budget: _MonthBudget, stale: str) -> str:
        what = f"{budget.limit:g} {budget.unit} that it may use in {self._month}"
        return f"{budget.whose} has used the {what}{self._next(budget)}{stale}"

    def _short_text(self, budget: _MonthBudget, stale: str) -> str:
        return (
            f"what is left of the {budget.limit:g} {budget.unit} that {budget.whose} may use in {self._month} is less "
            f"than this gang and what runs use in {RUNWAY_SECONDS / 60:g} minutes{self._next(budget)}{stale}"
        )

    def _next(self, budget: _MonthBudget) -> str:
        return f": it goes on when {budget.field} is raised, or from {rfc3339(self._ends)[:10]} (UTC)"
