"""Network settings of instance types, from AWS's own tables and the measurements that the field agrees on.

The table and its sources are explained in docs/kubernetes.md. What is not here is left alone: on current stacks
(libfabric ≥ 1.18 with aws-ofi-nccl ≥ 1.7) NCCL finds EFA and its settings by itself, and stale advice only hurts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from muster.words.gang import Gang

EFA = "vpc.amazonaws.com/efa"
HUGEPAGES = "hugepages-2Mi"

# EFA interfaces per instance. p4d, p4de, p5, p5e, p5en: AWS EC2 user guide, "EFA-enabled instance types", and torchx
# #995, #1098. p6-b200: eight network cards of 400 Gb/s; p6-b300: sixteen for its 6,400 Gb/s; p6e-gb200: of eight
# interfaces four reach the instance's 1,600 Gb/s, for two share the way of one GPU (docs/kubernetes.md). How many a
# node really has is chosen when it is launched; where that is fewer, a claim by device class takes what there is.
EFA_INTERFACES: Mapping[str, int] = {
    "p4d.24xlarge": 4,
    "p4de.24xlarge": 4,
    "p5.48xlarge": 32,
    "p5e.48xlarge": 32,
    "p5en.48xlarge": 16,
    "p6-b200.48xlarge": 8,
    "p6-b300.48xlarge": 16,
    "p6e-gb200.36xlarge": 4,
}
# 5 GiB of 2 MiB pages, as the EFA device plugin's own examples ask for.
HUGEPAGES_OF_EFA = "5120Mi"

# Huge pages for EFA's internal buffers make fork() fail for want of memory when data loaders start (efa-cheatsheet).
_WITH_EFA = {"FI_EFA_USE_HUGE_PAGE": "0"}
# Interfaces that are no path to another node; excluding them holds on every distribution, naming `en` or `eth` doesn't.
_WITH_GPUS = {
    "NCCL_SOCKET_IFNAME": "^docker,lo,veth",
    # The flight recorder: the last collectives of each rank, dumped when one times out.
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "20000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """Needs of the network in one worker's container."""

    environment: dict[str, str]  # variables for the trainer
    resources: dict[str, str]  # quantities of the container, by resource
    overrides: tuple[str, ...] = ()  # which of our values were replaced by the job's, in words
    capabilities: tuple[str, ...] = field(default=())  # Linux capabilities that the container needs


def plan(instance_type: str, gang: Gang, user: Mapping[str, str]) -> NetworkPlan:
    """The settings for one worker.

    `instance_type` is that of its node; empty if it is not known yet. `user` has the variables of runtime.env. The
    user's values win over ours: gang.network.nccl over the table, and runtime.env over both.
    """
    network, claimed = gang.network, gang.device_classes.efa is not None
    if not gang.gpus_per_node:
        return NetworkPlan(dict(network.nccl), {})
    efa = EFA_INTERFACES.get(instance_type, int(claimed)) if network.efa == "auto" else 0
    ours = _WITH_GPUS | (_WITH_EFA if efa else {})
    chosen = ours | network.nccl | {name: value for name, value in user.items() if name in ours or name in network.nccl}
    overrides = tuple(
        f"{name}={chosen[name]} instead of {value}" for name, value in ours.items() if chosen[name] != value
    )
    resources = {} if claimed or not efa else {EFA: str(efa)}
    resources |= {HUGEPAGES: HUGEPAGES_OF_EFA} if efa else {}
    # EFA registers memory for the network card, which needs it locked: more than the restricted standard allows.
    return NetworkPlan(chosen, resources, overrides, ("IPC_LOCK",) if efa else ())
