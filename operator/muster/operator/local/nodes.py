"""Virtual nodes: how much of this machine a local world gives away, and who holds which GPU and which port.

All nodes are this one machine. A node without GPUs fits one worker; a node with GPUs fits as many as its GPUs allow.
So four nodes, the default, run two jobs of two workers each, and a third one waits, with the reason in `because`. Cores
and memory are not divided: each node has all of them, so a job that asks for the machine's worth can run here too.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from muster.operator.core.fleet import FleetNode
from muster.operator.local.processes import WorkerRecord
from muster.operator.settings import cores
from muster.storage.small_files import read_regular, write_whole
from muster.words.state_folder import StateFolder

POOL = "local"
RENDEZVOUS = "rendezvous.json"  # in the attempt's folder: {"port": …}, the same for all its workers
# Below the range that Linux hands to outgoing connections (32768 up), so that no client takes the port meanwhile.
PORTS = range(20_000, 32_000)
_SLOTS_OF_A_GPU_NODE = 64


@dataclass(frozen=True)
class VirtualNodes:
    """The machine as nodes named `local-0`, `local-1` … . Node i has the machine's GPUs from i × gpus_per_node on."""

    number: int
    gpus_per_node: int = 0

    def names(self) -> tuple[str, ...]:
        return tuple(f"local-{index}" for index in range(self.number))

    def all(self, unfit: frozenset[str] = frozenset()) -> tuple[FleetNode, ...]:
        """All nodes; those named in `unfit` are not ready, so that no new worker goes there."""
        memory = psutil.virtual_memory().total
        return tuple(
            FleetNode(
                name=name,
                pool=POOL,
                gpus=self.gpus_per_node,
                cpus=float(cores()),
                memory_bytes=memory,
                slots=_SLOTS_OF_A_GPU_NODE if self.gpus_per_node else 1,
                ready=name not in unfit,
            )
            for name in self.names()
        )

    def gpus(self, node: str, count: int, workers: Sequence[WorkerRecord]) -> tuple[int, ...]:
        """Indices of `count` GPUs of the node that no live worker (`workers`) has. Raises OSError for too few."""
        if not count:
            return ()
        first = self.names().index(node) * self.gpus_per_node
        taken = {gpu for record in workers if record.node == node for gpu in record.gpus}
        free = [gpu for gpu in range(first, first + self.gpus_per_node) if gpu not in taken]
        if len(free) < count:
            raise OSError(f"{node} has {len(free)} free GPUs, {count} are needed: a worker on it is not gone yet")
        return tuple(free[:count])


def rendezvous_port(state: StateFolder, job_uid: str, attempt: int) -> int:
    """The port on which this attempt's workers meet: chosen free by the first who asks, then the same for all."""
    path = state.attempt(job_uid, attempt) / RENDEZVOUS
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(read_regular(path))["port"])
    path.parent.mkdir(parents=True, exist_ok=True)
    port = next(free_ports(f"{job_uid}/{attempt}"))
    write_whole(path, json.dumps({"port": port}))
    return port


def free_ports(key: str) -> Iterator[int]:
    """Ports that nobody listens on now, begun at a place that `key` decides, so that neighbours seldom want the same.

    Raises OSError when every port of the range is taken.
    """
    start = zlib.crc32(key.encode())
    for offset in range(len(PORTS)):
        port = PORTS[(start + offset) % len(PORTS)]
        with socket.socket() as probe:
            if os.name == "posix":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port
    raise OSError(f"no free port between {PORTS.start} and {PORTS.stop - 1} for the workers to meet on")
