"""muster_agent_*: what the sources saw last, made when somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from muster.agent.disks import DiskSource
from muster.agent.fabric import FabricSource
from muster.agent.gpus import GpuReading, GpuSource
from muster.agent.xid import XidSource
from muster.words.notices import NodeNotices

# metric of a reading → what it means, and the name of the label that its second part fills
_GPU: dict[str, tuple[str, str]] = {
    "memory_used_bytes": ("Memory of the GPU in use", ""),
    "memory_total_bytes": ("Memory of the GPU", ""),
    "ecc_errors_total": ("ECC errors in the GPU's life", "kind"),
    "remapped_rows": ("Rows of memory that were remapped", "kind"),
    "row_remap_pending": ("1: a row will be remapped at the next reset", ""),
    "row_remap_failed": ("1: a row could not be remapped; the GPU must be replaced", ""),
    "retired_pages": ("Pages of memory that were retired (before Ampere)", "kind"),
    "throttled": ("1: its clocks are held down, by reason", "reason"),
    "power_watts": ("Power drawn", ""),
    "temperature_celsius": ("Temperature of the GPU", ""),
    "nvlinks_down": ("NVLinks that are not active", ""),
    "nvlink_errors_total": ("NVLink errors since the driver was loaded", "kind"),
    "recovery_action": ("1: what the driver asks for to make the GPU well", "action"),
}


class AgentMetrics(Collector):
    """Metrics of the agent, as Prometheus scrapes them.

    `notices` returns those that stand now, and `ages` the seconds since each source last looked.
    """

    def __init__(
        self,
        notices: Callable[[], NodeNotices],
        ages: Callable[[], dict[str, float]],
        gpus: GpuSource,
        xids: XidSource,
        fabric: FabricSource,
        disks: DiskSource,
    ) -> None:
        self._notices, self._ages = notices, ages
        self._gpus, self._xids, self._fabric, self._disks = gpus, xids, fabric, disks
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._of_itself()
        yield from self._of_gpus(self._gpus.readings)
        yield from self._of_the_machine()

    def _of_itself(self) -> Iterable[Metric]:
        notices = GaugeMetricFamily(
            "muster_agent_notices", "Notices that stand now", labels=["kind", "remedy", "source"]
        )
        counts: dict[tuple[str, str, str], int] = {}
        for notice in self._notices().notices:
            key = (str(notice.kind), str(notice.remedy), notice.source)
            counts[key] = counts.get(key, 0) + 1
        for key, count in counts.items():
            notices.add_metric(key, count)
        yield notices
        ages = GaugeMetricFamily("muster_agent_source_age_seconds", "Since a source last looked", labels=["source"])
        for name, age in self._ages().items():
            ages.add_metric([name], age)
        yield ages
        xids = CounterMetricFamily("muster_agent_xid_errors", "Xid errors in the kernel log", labels=["device", "xid"])
        for (device, code), total in sorted(self._xids.counts.items()):
            xids.add_metric([device, str(code)], total)
        yield xids

    def _of_gpus(self, readings: tuple[GpuReading, ...]) -> Iterable[Metric]:
        lost = GaugeMetricFamily("muster_agent_gpu_lost", "1: the driver has lost the GPU", labels=["gpu", "device"])
        for reading in readings:
            lost.add_metric([str(reading.index), reading.device], reading.lost)
        yield lost
        for name, (help_text, label) in _GPU.items():
            labels = ["gpu", "device", *([label] if label else [])]
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"muster_agent_gpu_{name}", help_text, labels=labels)
            for reading in readings:
                for (question, value_of_label), value in reading.values.items():
                    if question == name:
                        more = [value_of_label] if label else []
                        family.add_metric([str(reading.index), reading.device, *more], value)
            yield family

    def _of_the_machine(self) -> Iterable[Metric]:
        rdma = CounterMetricFamily(
            "muster_agent_rdma_counter", "Hardware counters of EFA and InfiniBand", labels=["device", "port", "counter"]
        )
        for labels, value in self._fabric.counters.items():
            rdma.add_metric(labels, value)
        yield rdma
        up = GaugeMetricFamily("muster_agent_link_up", "1: the interface or RDMA port is up", labels=["link"])
        for link, is_up in self._fabric.links.items():
            up.add_metric([link], is_up)
        yield up
        for name, help_text in (
            ("bytes_free", "Bytes left for others than root"),
            ("bytes_total", "Size of the file system"),
            ("inodes_free", "Inodes left for others than root"),
            ("read_only", "1: it can't be written to"),
        ):
            family = GaugeMetricFamily(f"muster_agent_disk_{name}", help_text, labels=["path"])
            for path, space in self._disks.spaces.items():
                family.add_metric([path], float(getattr(space, name)))
            yield family
