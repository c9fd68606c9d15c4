"""The gang of a job: number of workers, nodes, devices, network and scheduler."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from muster.words.base import Many, Spec
from muster.words.fields import Positive, Text
from muster.words.rules import DocumentRule, RuledSpec

# Bounded, so that what is made of it stays a number of 64 bits; only the digits 0 to 9, as Kubernetes has it.
QUANTITY = r"[0-9]{1,15}(\.[0-9]{1,9})?(m|Ki|Mi|Gi|Ti|k|M|G|T)?"
PER_NODE_MAX = 1024  # processes or GPUs; the largest machines have some hundred cores and sixteen GPUs
NODES_MAX = 10_000  # each size from min to max is looked at


def _nodes(value: Any) -> Any:
    if isinstance(value, Nodes | dict):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be a whole number, or a mapping with min and max, not {value!r}"[:200])
    if not 0 < value <= NODES_MAX:
        raise ValueError(f"must be at least 1 and at most {NODES_MAX:,}, not {value}")
    return {"min": value, "max": value}


def _quantity(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not re.fullmatch(QUANTITY, value):
        raise ValueError(f"must be a Kubernetes quantity (90, 500m, 900Gi), not {value!r}"[:200])
    return value


Quantity = Annotated[str, BeforeValidator(_quantity)]


class Nodes(Spec):
    """Number of workers of an elastic gang: it shrinks to `min` when nodes are lost and grows again up to `max`."""

    min: Annotated[int, Field(gt=0, le=NODES_MAX)]
    """The fewest workers with which the job trains."""
    max: Annotated[int, Field(gt=0, le=NODES_MAX)]
    """The most workers with which the job trains."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is greater than max {self.max}")
        return self


class Resources(Spec):
    """Resources of each worker besides GPUs, as Kubernetes quantities."""

    cpu: Quantity | None = None
    """Cores of each worker: `90` or `500m`."""
    memory: Quantity | None = None
    """Memory of each worker: `900Gi`."""


class CapacityPreference(Spec):
    """Use of spot nodes."""

    prefer: Literal["any", "spot", "on-demand"] = "any"
    """The capacity that is asked for first."""
    fall_back_after_preemptions: Positive = 3
    """Preemptions in a row after which on-demand nodes are asked for."""


class Scheduler(Spec):
    """Scheduler that places all workers of the gang together."""

    kind: Literal["builtin", "kueue", "coscheduling", "volcano", "kai", "workload"] = "builtin"
    """The gang scheduler; `workload` is Kubernetes' own, `builtin` is Muster's."""
    queue: Text | None = None
    """The scheduler's queue, where it has queues."""


class Topology(Spec):
    """Placement of workers near each other: a node label, such as that of a rack, whose value they share."""

    required: Text | None = None
    """The label whose value all workers must share."""
    preferred: Text | None = None
    """The label whose value all workers should share."""


class Network(Spec):
    """Network between workers."""

    efa: Literal["auto", "off"] = "auto"
    """Whether Elastic Fabric Adapters are used; `auto` uses those that the instance type has."""
    nccl: dict[str, str] = {}
    """Variables of NCCL that win over those that Muster sets."""


class DeviceClasses(Spec):
    """DeviceClasses by which a worker's devices are claimed (Dynamic Resource Allocation), in place of the resources
    `nvidia.com/gpu` and `vpc.amazonaws.com/efa` of device plugins.
    """

    gpus: Text | None = None
    """The class of which each worker claims gpusPerNode devices."""
    efa: Text | None = None
    """The class of which each worker claims all devices of its node."""


class Gang(RuledSpec):
    """The workers that run together, and what each of them needs."""

    rules = (
        DocumentRule[Any](
            "processesPerNode must equal gpusPerNode",
            lambda it: (
                it.gpus_per_node
                and it.processes_per_node not in (None, it.gpus_per_node)
                and f"processesPerNode {it.processes_per_node} must equal gpusPerNode {it.gpus_per_node}"
            ),
            "self.gpusPerNode == 0 || !has(self.processesPerNode) || self.processesPerNode == self.gpusPerNode",
        ),
        DocumentRule[Any](
            "deviceClasses: claims devices for GPU workers, and gpusPerNode is 0",
            lambda it: not it.gpus_per_node and it.device_classes != DeviceClasses(),
        ),
    )

    nodes: Annotated[Nodes, BeforeValidator(_nodes)] = Nodes(min=1, max=1)
    """Number of workers or, for an elastic gang, their range as `{min, max}`."""
    gpus_per_node: Annotated[int, Field(ge=0, le=PER_NODE_MAX)] = 0
    """GPUs of each worker, with a rank for each; 0 trains on CPUs."""
    processes_per_node: Annotated[int, Field(gt=0, le=PER_NODE_MAX)] | None = None
    """Ranks of each worker where it has no GPUs; left out, one."""
    share_nodes: bool = False
    """Whether several workers of the gang may run on one node."""
    instance_types: Many[Text] = ()
    """The instance types that nodes may have; where none is named, every one will do."""
    resources: Resources = Resources()
    capacity: CapacityPreference = CapacityPreference()
    scheduler: Scheduler = Scheduler()
    topology: Topology = Topology()
    network: Network = Network()
    device_classes: DeviceClasses = DeviceClasses()

    @property
    def ranks_per_node(self) -> int:
        return _ranks(self.gpus_per_node, self.processes_per_node)


def ranks_per_node(document: Mapping[str, Any]) -> int:
    """Return the ranks per node of a spec as a document, complete or as it was sent, for code that reads many and
    parses none."""
    gang = document.get("gang") or {}
    return _ranks(int(gang.get("gpusPerNode") or 0), int(gang.get("processesPerNode") or 0))


def _ranks(gpus: int, processes: int | None) -> int:
    return gpus or processes or 1
