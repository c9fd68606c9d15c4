"""Usage of a project's jobs: hours and cost of their attempts, by month (UTC), person and job. Pure.

An attempt holds its workers' nodes from its beginning until its last worker is gone; a gang that changes its size does
so by a new attempt, so each has one number of workers. What the hours of a month come to is exact to the clocks of the
operator; the money is an estimate, for it takes the table of prices as it is now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from muster.words.base import Many, Record, Time
from muster.words.months import month_of, month_range
from muster.words.prices import Prices, no_price, rate
from muster.words.status import Attempt, GoodputState
from muster.words.text import plural

# What an attempt's time was for nothing: steps that had to be trained again, and waiting for what was dead.
LOST = (GoodputState.LOST, GoodputState.STALLED)


@dataclass(frozen=True, slots=True)
class HeldNodes:
    """Usage of one attempt of a job: its workers from `since` until `until`, which is None while it runs."""

    job: str
    name: str
    person: str
    since: float
    until: float | None
    workers: int
    gpus_per_worker: int = 0
    cpus_per_worker: float = 0.0
    """CPUs that the job requested; 0 if it named none."""
    instance_type: str = ""
    capacity: str = "on-demand"
    lost_seconds: float = 0.0


class Amounts(Record):
    """Hours of what was held, and their price in the currency of the report."""

    gpu_hours: float = 0.0
    """GPUs times hours."""
    cpu_hours: float = 0.0
    """Cores that were asked for, times hours: of gangs without GPUs."""
    node_hours: float = 0.0
    """Workers times hours, of all gangs."""
    cost: float = 0.0
    """Cost of the hours that have a price."""
    saved: float = 0.0
    """Additional cost of the spot nodes had they been on demand, where both prices are known."""
    unpriced_hours: float = 0.0
    """Node-hours that are not in the cost, because nobody knows their price."""
    lost_gpu_hours: float = 0.0
    """GPU-hours that were lost to failures: steps trained again, and ranks that stood still. An attempt's loss is taken
    as spread evenly over its time."""
    lost_cpu_hours: float = 0.0
    """The same of the CPU-hours."""
    lost_cost: float = 0.0
    """The same of the cost."""


class UsageLine(Amounts):
    """One job in one month."""

    month: str
    """Calendar month in UTC, such as 2026-11."""
    job: str
    """The job's id."""
    name: str
    person: str
    """Owner of the job."""


class PersonUsage(Amounts):
    person: str


class MonthUsage(Amounts):
    month: str


class Usage(Record):
    """Usage of a project within a range of time. Each total is the sum of the lines."""

    since: Time
    until: Time
    as_of: Time
    """Time until which attempts that still hold nodes are counted."""
    currency: str
    region: str
    """Region of the prices."""
    total: Amounts
    months: Many[MonthUsage] = ()
    people: Many[PersonUsage] = ()
    lines: Many[UsageLine] = ()
    notes: Many[str] = ()
    """Notes on the parts that are estimates or unknown, and why."""


AMOUNTS = tuple(Amounts.model_fields)
# Of a table with a row per line, by the keys of JSON.
COLUMNS = ("month", "project", "person", "job", "name", *(str(field.alias) for field in Amounts.model_fields.values()))


def held_of(attempt: Attempt, job: str, name: str, person: str, cpus_per_worker: float) -> HeldNodes | None:
    """Return what an attempt holds, or None if it holds nothing because another scheduler has not placed it."""
    if attempt.outcome == "waiting":
        return None
    return HeldNodes(
        job=job,
        name=name,
        person=person,
        since=attempt.created_at,
        until=attempt.ended_at,
        workers=attempt.workers,
        gpus_per_worker=attempt.gpus_per_worker,
        cpus_per_worker=0.0 if attempt.gpus_per_worker else cpus_per_worker,
        instance_type=attempt.instance_type,
        capacity=attempt.capacity or "on-demand",
        lost_seconds=sum(attempt.seconds.get(state, 0.0) for state in LOST),
    )


def usage(spans: Iterable[HeldNodes], prices: Prices, since: float, until: float, now: float) -> Usage:
    """Return the usage from `since` to `until`. Running attempts are counted until `now`."""
    lines: dict[tuple[str, str], _JobAmounts] = {}
    notes: dict[str, None] = {}
    living: set[str] = set()
    coreless: set[str] = set()
    for each in spans:
        end = min(until, now if each.until is None else each.until)
        for month, begins, ends in _months(max(since, each.since), end):
            key = (month, each.job)
            if key not in lines:
                lines[key] = _JobAmounts(each.name, each.person)
            lines[key].add(each, ends - begins, prices, now, notes)
            if each.until is None:
                living.add(each.job)
            if not each.gpus_per_worker and not each.cpus_per_worker:
                coreless.add(each.job)
    if living:
        notes[f"{plural(len(living), 'job')} held nodes at the time of this report, counted until then"] = None
    if coreless:
        notes[
            f"{plural(len(coreless), 'job')} without GPUs named no gang.resources.cpu: in node-hours, not in CPU-hours"
        ] = None
    if any(line.values["cost"] for line in lines.values()):
        notes[f"the cost is an estimate, by the table of prices as it is now{_region(prices)}"] = None
    made = tuple(line.made(month, job) for (month, job), line in sorted(lines.items()))
    return Usage(
        since=since,
        until=until,
        as_of=now,
        currency=prices.currency,
        region=prices.region,
        total=Amounts(**_sums(made)),
        months=tuple(MonthUsage(month=key, **sums) for key, sums in _grouped(made, lambda line: line.month)),
        people=tuple(PersonUsage(person=key, **sums) for key, sums in _grouped(made, lambda line: line.person)),
        lines=made,
        notes=tuple(notes),
    )


class _JobAmounts:
    """The amounts of one job in one month."""

    def __init__(self, name: str, person: str) -> None:
        self.name, self.person = name, person
        self.values = dict.fromkeys(AMOUNTS, 0.0)

    def add(self, span: HeldNodes, seconds: float, prices: Prices, now: float, notes: dict[str, None]) -> None:
        nodes = span.workers * seconds / 3600.0
        lost = span.lost_seconds / max(1e-9, (now if span.until is None else span.until) - span.since)
        lost = min(1.0, max(0.0, lost))
        added = {
            "node_hours": nodes,
            "gpu_hours": nodes * span.gpus_per_worker,
            "cpu_hours": nodes * span.cpus_per_worker,
            "lost_gpu_hours": nodes * span.gpus_per_worker * lost,
            "lost_cpu_hours": nodes * span.cpus_per_worker * lost,
        }
        hourly = rate(span.instance_type, span.capacity, span.gpus_per_worker, prices)
        if hourly.cost is None:
            added["unpriced_hours"] = nodes
            notes[f"{no_price(span.instance_type, span.capacity)}: its hours are not in the cost"] = None
        else:
            added |= {"cost": nodes * hourly.cost, "lost_cost": nodes * hourly.cost * lost}
            added["saved"] = nodes * (hourly.saved or 0.0)
            if hourly.saved is None:
                unknown = no_price(span.instance_type, "on-demand")
                notes[f"{unknown}: what its spot nodes saved is not known"] = None
        for name, value in added.items():
            self.values[name] += value

    def made(self, month: str, job: str) -> UsageLine:
        return UsageLine(month=month, job=job, name=self.name, person=self.person, **self.values)


def _months(begins: float, ends: float) -> Iterator[tuple[str, float, float]]:
    """The part of each month that is between the two moments; none if they are the wrong way round."""
    while begins < ends:
        month = month_of(begins)
        after = month_range(month)[1]
        yield month, begins, min(ends, after)
        begins = after


def _sums(lines: Iterable[UsageLine]) -> dict[str, Any]:
    lines = tuple(lines)
    return {name: math.fsum(getattr(line, name) for line in lines) for name in AMOUNTS}


def _grouped(lines: Iterable[UsageLine], key: Callable[[UsageLine], str]) -> list[tuple[str, dict[str, Any]]]:
    groups: dict[str, list[UsageLine]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return [(name, _sums(group)) for name, group in sorted(groups.items())]


def _region(prices: Prices) -> str:
    return f" (of {prices.region})" if prices.region else ""
