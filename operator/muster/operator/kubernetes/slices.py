"""GPUs of drivers for Dynamic Resource Allocation: a node with one of them counts no `nvidia.com/gpu`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from muster.kube.client import Object
from muster.operator.core.fleet import FleetNode

GPU_DRIVERS = frozenset({"gpu.nvidia.com"})


class ResourceSlices:
    """The number of whole GPUs of each node, from ResourceSlices. `on_change` is called when one of them changes."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._gpus: dict[str, tuple[str, int]] = {}  # uid → node, GPUs

    def put(self, item: Object) -> None:
        spec = item["spec"]
        if spec.get("driver") not in GPU_DRIVERS or not spec.get("nodeName"):
            return
        node_gpus = (str(spec["nodeName"]), sum(_is_whole(device) for device in spec.get("devices") or ()))
        if self._gpus.get(item["metadata"]["uid"]) != node_gpus:
            self._gpus[item["metadata"]["uid"]] = node_gpus
            self._on_change()

    def drop(self, item: Object) -> None:
        if self._gpus.pop(item["metadata"]["uid"], None):
            self._on_change()

    def keep_only(self, uids: set[str]) -> None:
        self._gpus = {uid: node_gpus for uid, node_gpus in self._gpus.items() if uid in uids}

    def counted(self, nodes: tuple[FleetNode, ...]) -> tuple[FleetNode, ...]:
        """The nodes, with their GPUs also where no device plugin counts them."""
        if not self._gpus:
            return nodes
        totals: dict[str, int] = {}
        for node, gpus in self._gpus.values():
            totals[node] = totals.get(node, 0) + gpus
        return tuple(node if node.gpus else replace(node, gpus=totals.get(node.name, 0)) for node in nodes)


def _is_whole(device: Object) -> bool:
    """Return whether the device is a whole GPU and not a MIG partition of one."""
    kind = ((device.get("attributes") or {}).get("type") or {}).get("string", "gpu")
    return bool(kind == "gpu")
