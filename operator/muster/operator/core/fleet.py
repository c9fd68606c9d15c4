"""Input of admission: the nodes, and a summary of every job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from muster.operator.core.observed import NodeReservation
from muster.words.job import JobSpec
from muster.words.names import DEFAULT_PROJECT
from muster.words.prices import Prices
from muster.words.quotas import ProjectQuota
from muster.words.status import JobStatus

# A gang grows by a restart, so not all the time.
GROW_AFTER_START_SECONDS = 600.0

CapacityType = Literal["spot", "on-demand"]


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A node, as far as placement asks."""

    name: str
    pool: str
    capacity: CapacityType = "on-demand"
    gpus: int = 0
    """Total that Muster may use, held or free; the same holds for cpus and memory_bytes."""
    cpus: float = 1.0
    memory_bytes: int = 0
    slots: int = 110
    """Maximum number of workers."""
    instance_type: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    ready: bool = True
    """True if it is healthy, not cordoned and not being drained, so that new workers may go there."""
    away: str = "not ready"
    """Reason why it is not ready, in a word or two that stand after a number of nodes: `cordoned`, `being drained`."""
    taints: tuple[tuple[str, str, str], ...] = ()
    """Key, value and effect of those taints that keep out every worker that does not tolerate them by itself."""


@dataclass(frozen=True, slots=True)
class JobSummary:
    uid: str
    namespace: str
    name: str
    created_at: float
    deleting: bool
    spec: JobSpec
    status: JobStatus
    project: str = DEFAULT_PROJECT
    owner: str = ""
    """Person who submitted it; empty if unknown."""

    @property
    def full_name(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Input of admission at one moment."""

    now: float
    fresh: bool
    nodes: tuple[FleetNode, ...]
    jobs: tuple[JobSummary, ...]
    limits: dict[str, int] = field(default_factory=dict)
    """Accelerators that the jobs of a namespace may hold together; a namespace that is not named has no limit."""
    quotas: Mapping[str, ProjectQuota] = field(default_factory=dict)
    """Limits of what a project's jobs, and each of its people, may hold; a project that is not named has no limit."""
    others: tuple[NodeReservation, ...] = ()
    """Usage of the nodes that Muster did not place; it will be free some time."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Values of the priority classes that jobs may name."""
    prices: Prices = field(default_factory=Prices)
    """For budgets in money."""
    grow_after_seconds: float = GROW_AFTER_START_SECONDS
    """An elastic gang that has run for so long may be offered more nodes."""

    def priority(self, job: JobSummary) -> int:
        """The job's own, else its class's."""
        return job.spec.priority or self.priorities.get(job.spec.priority_class_name or "", 0)

    def line(self, job: JobSummary) -> tuple[int, float, str]:
        """Return the key that sorts the queue: by priority, then by age."""
        return -self.priority(job), job.created_at, job.uid
