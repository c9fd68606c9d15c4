"""Accounting of each project's usage this month, counted once a minute for its budgets, which the operator enforces,
and for metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from sqlalchemy import select

from muster.api.core.database.db import Database
from muster.api.core.database.tables import ProjectRow
from muster.api.core.observability import ApiMetrics
from muster.api.core.projects import quota_of
from muster.api.tenants.usage import repository
from muster.plan.usage import Amounts, HeldNodes, Usage, usage
from muster.words.months import month_of, month_range
from muster.words.prices import Prices
from muster.words.quotas import MonthSpent, ProjectQuota, Quota, Spent

ACCOUNTING_SECONDS = 60.0


@dataclass(frozen=True)
class CountedUsage:
    """Usage of a project in the month so far."""

    usage: Usage
    spent: MonthSpent


class UsageAccounting:
    """`current` says whether the rows are up to date with the cluster: else nothing new is counted, and what ran since
    is the operator's to add. `counted` is None before the first count; `listeners` are called with each.
    """

    def __init__(self, database: Database, prices: Prices, metrics: ApiMetrics, current: Callable[[], bool]) -> None:
        self._database, self._prices, self._metrics, self._current = database, prices, metrics, current
        self.counted: dict[str, CountedUsage] | None = None
        self.listeners: list[Callable[[Mapping[str, ProjectQuota], Mapping[str, CountedUsage]], Awaitable[None]]] = []

    async def step(self) -> bool:
        """Count anew; False: there is no more to do."""
        if not self._current():
            return False
        now = time.time()
        begins, ends = month_range(month_of(now))
        async with self._database.read() as session:
            quotas = {row.name: quota_of(row) for row in await session.scalars(select(ProjectRow))}
            by_project = await repository.held_by_project(session, begins, ends)
        everybody = {name: by_project.get(name, []) for name in quotas.keys() | by_project.keys()}
        counted = await asyncio.to_thread(_count, everybody, self._prices, begins, ends, now)
        self.counted = counted
        self._metrics.show_usage({name: one.usage.total for name, one in counted.items()}, ratios(quotas, counted))
        for listener in self.listeners:
            await listener(quotas, counted)
        return False


def _count(
    by_project: dict[str, list[HeldNodes]], prices: Prices, begins: float, ends: float, now: float
) -> dict[str, CountedUsage]:
    counted = {}
    for project, mine in by_project.items():
        made = usage(mine, prices, begins, ends, now)
        people = {person.person: _spent(person) for person in made.people}
        spent = MonthSpent(month=month_of(now), as_of=now, total=_spent(made.total), people=people)
        counted[project] = CountedUsage(made, spent)
    return counted


def _spent(amounts: Amounts) -> Spent:
    return Spent(gpu_hours=round(amounts.gpu_hours, 6), money=round(amounts.cost, 6))


def ratios(quotas: dict[str, ProjectQuota], counted: dict[str, CountedUsage]) -> dict[tuple[str, str, str], float]:
    """Return the used share of each budget, by project, by whose budget it is (`project` or `person`) and by unit. Of a
    budget per person, it is the share of the person who used most.

    A budget of zero has no share.
    """
    shares: dict[tuple[str, str, str], float] = {}
    for project, quota in quotas.items():
        spent = counted[project].spent
        for whose, limits, used in (
            ("project", quota, [spent.total]),
            ("person", quota.person, list(spent.people.values())),
        ):
            for unit, ratio in _of(limits, used):
                shares[project, whose, unit] = ratio
    return shares


def _of(limits: Quota, used: list[Spent]) -> list[tuple[str, float]]:
    pairs = (
        ("gpu_hours", limits.gpu_hours_per_month, [each.gpu_hours for each in used]),
        ("money", limits.money_per_month, [each.money for each in used]),
    )
    return [(unit, max(values, default=0.0) / limit) for unit, limit, values in pairs if limit]


def spent_of(counted: Mapping[str, CountedUsage] | None) -> dict[str, MonthSpent] | None:
    return None if counted is None else {project: one.spent for project, one in counted.items()}
