"""What admission sees: the nodes, and every job in short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from muster.contract.spec import JobSpec
from muster.contract.status import JobStatus
from muster.operator.core.observed import Reservation

# A gang grows by a restart, so not all the time.
GROW_AFTER_START_SECONDS = 600.0

CapacityType = Literal["spot", "on-demand"]


@dataclass(frozen=True, slots=True)
class Node:
    """gpus, cpus, memory_bytes, slots (how many workers): what Muster may use of it in all, held or free.

    ready: healthy, not cordoned and not being drained, so that new workers may go there.
    taints: key, value and effect of those that keep out every worker that does not tolerate them by itself.
    """

    name: str
    pool: str
    capacity: CapacityType = "on-demand"
    gpus: int = 0
    cpus: float = 1.0
    memory_bytes: int = 0
    slots: int = 110
    instance_type: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    ready: bool = True
    taints: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class JobSummary:
    uid: str
    namespace: str
    name: str
    created_at: float
    deleting: bool
    spec: JobSpec
    status: JobStatus


@dataclass(frozen=True, slots=True)
class Fleet:
    """limits: accelerators that a namespace's jobs may hold together; a namespace that is not named has no limit.
    grow_after_seconds: an elastic gang that has run for so long may be offered more nodes.
    others: what is in use on the nodes and was not placed by Muster; it will be free some time.
    priorities: values of the classes that jobs may name.
    """

    now: float
    fresh: bool
    nodes: tuple[Node, ...]
    jobs: tuple[JobSummary, ...]
    limits: dict[str, int] = field(default_factory=dict)
    others: tuple[Reservation, ...] = ()
    priorities: Mapping[str, int] = field(default_factory=dict)
    grow_after_seconds: float = GROW_AFTER_START_SECONDS

    def line(self, job: JobSummary) -> tuple[int, float, str]:
        """For sorting, the first in line first: by the job's own priority, else its class's, then by age."""
        priority = job.spec.priority or self.priorities.get(job.spec.priority_class_name or "", 0)
        return -priority, job.created_at, job.uid
