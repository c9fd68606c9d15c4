"""EFA, InfiniBand and Ethernet: the counters that the kernel keeps, and whether the links are up. Metrics only: what a
slow or lossy network does to a job shows in its steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from muster.words.notices import Notice

PAUSE_SECONDS = 15.0
# Of the many hardware counters, those that tell of trouble or of the traffic (efa and mlx5 have names of their own).
COUNTERS = frozenset(
    {
        "rx_drops", "rdma_read_wr_err", "rdma_write_wr_err", "retrans_bytes", "retrans_pkts", "retrans_timeout_events",
        "impaired_remote_conn_events", "unresponsive_remote_events", "rx_bytes", "tx_bytes", "rdma_read_bytes",
        "rdma_write_bytes", "out_of_buffer", "out_of_sequence", "packet_seq_err", "local_ack_timeout_err",
        "rnr_nak_retry_err", "rx_icrc_encapsulated", "roce_adp_retrans", "np_cnp_sent", "rp_cnp_handled",
    }
)  # fmt: skip


class FabricSource:
    """Source of link states and error counters of network and RDMA ports below `root`, which is /sys but in tests."""

    name = "fabric"

    def __init__(self, root: Path) -> None:
        self.pause_seconds = PAUSE_SECONDS
        self._root = root
        self.counters: dict[tuple[str, str, str], float] = {}  # device, port, counter → value
        self.links: dict[str, bool] = {}  # of interfaces and RDMA ports: whether it is up

    def look(self) -> tuple[Notice, ...]:
        self.counters = dict(self._counters())
        self.links = dict(self._links())
        return ()

    def acknowledge(self) -> None:
        """Do nothing: there is no state to clear."""

    def _counters(self) -> Iterator[tuple[tuple[str, str, str], float]]:
        for path in sorted(self._root.glob("class/infiniband/*/ports/*/hw_counters/*")):
            if path.name in COUNTERS and (text := _read(path)).isdecimal():
                yield (path.parts[-5], path.parts[-3], path.name), float(text)

    def _links(self) -> Iterator[tuple[str, bool]]:
        """RDMA ports, and interfaces of real devices that somebody has turned on."""
        for path in sorted(self._root.glob("class/infiniband/*/ports/*/state")):
            yield f"{path.parts[-4]}/{path.parts[-2]}", "ACTIVE" in _read(path)
        for path in sorted(self._root.glob("class/net/*/operstate")):
            interface = path.parent
            flags = _read(interface / "flags")
            if (interface / "device").exists() and flags.startswith("0x") and int(flags, 16) & 1:  # IFF_UP
                yield interface.name, _read(path) == "up"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
