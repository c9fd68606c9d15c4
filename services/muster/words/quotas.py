"""Quotas of a project and of each person in it: set through the API, enforced by the operator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, ValidationError

from muster.words.base import Spec, known_part

QUOTAS = "muster-project-quotas"
"""The ConfigMap in the operator's namespace that has a key per project: ProjectQuota as JSON (`dump_json`)."""

Count = Annotated[int, Field(ge=0, le=1_000_000)]
Amount = Annotated[float, Field(ge=0, le=1_000_000_000)]


class Quota(Spec):
    """Limits on what may be held at a time. Omitted limits do not apply. A limit that is lowered stops nothing that
    runs: nothing more begins until enough has ended."""

    gpus: Count | None = None
    """Accelerators of the gangs that hold nodes."""
    gangs: Count | None = None
    """Gangs that hold nodes."""
    processes: Count | None = None
    """Training processes (ranks) of the gangs that hold nodes: nodes x processes of each."""
    queued_jobs: Count | None = None
    """Jobs in the queue; a further one is refused at submission."""
    gpu_hours_per_month: Amount | None = None
    """GPU-hours in a month of the calendar, in UTC. Once they are used up running jobs commit and are suspended, and
    nothing begins that uses GPUs; with 0, nothing begins at all."""
    money_per_month: Amount | None = None
    """The same in the currency of the table of prices. Nothing begins on nodes whose price is not known."""


class Spent(Spec):
    """Usage of the current month."""

    gpu_hours: float = 0.0
    money: float = 0.0


class MonthSpent(Spec):
    """Usage of a project in a month, as the API counted it: from the month's beginning until `as_of`."""

    month: str
    as_of: float
    """Time of the count, in seconds since the epoch."""
    total: Spent = Spent()
    people: dict[str, Spent] = {}
    """Amounts by person; those who used nothing are left out."""


class ProjectQuota(Quota):
    """Quota of a project: what its jobs may hold together, and its share of a contended fleet."""

    weight: Annotated[float, Field(gt=0, le=1_000)] | None = None
    """The project's share relative to others', where any project names a weight or a guarantee: among jobs of one
    priority whoever holds least for its weight comes first. 1 if it is left out. It is never 0: who has no share would
    wait for ever where the others always ask."""
    guaranteed_gpus: Count | None = None
    """Accelerators that are its share before the rest is divided by weight; others may borrow them while they idle."""
    preempts: bool = False
    """Whether its jobs may preempt running gangs, which commit and make room: those of a lower priority, those that
    others hold beyond their share and, for a job that has not had nodes for ten minutes yet, its own."""
    person: Quota = Quota()
    """Limits of what the jobs of any one person may hold of it."""
    spent: MonthSpent | None = None
    """Written by the API alongside a budget, for the operator; nobody else sets it."""

    @property
    def bounds_queue(self) -> bool:
        """Return whether the number of queued jobs is limited, of the project or of each person."""
        return self.queued_jobs is not None or self.person.queued_jobs is not None

    @property
    def has_month_budget(self) -> bool:
        return any(
            limit is not None
            for quota in (self, self.person)
            for limit in (quota.gpu_hours_per_month, quota.money_per_month)
        )


NOTHING = ProjectQuota(gangs=0)


def read_quotas(
    written: Mapping[str, str], previous: Mapping[str, ProjectQuota]
) -> tuple[dict[str, ProjectQuota], list[str]]:
    """The quotas by project, from JSON texts by project, and what can't be read of them. Of a project whose text makes
    no sense, the quota that is `previous` goes on; if none is, none of its jobs begins.
    """
    quotas: dict[str, ProjectQuota] = {}
    faults = []
    for project, text in written.items():
        try:
            quotas[project] = ProjectQuota.model_validate(known_part(ProjectQuota, json.loads(text)))
        except (ValueError, ValidationError, AttributeError) as error:
            quotas[project] = previous.get(project, NOTHING)
            faults.append(f"the quota of project {project} can't be read: {str(error).splitlines()[0]}")
    return quotas, faults
