"""Ranks of a worker: one process for each, with torchrun's variables, watched until all of them are gone.

torchrun's agent does this too, at the price of importing torch (two seconds of processor time for each worker) and of
a rendezvous of its own before the ranks'. Here a rank is started at once and meets the others by itself: rank 0 hosts
the store of `init_process_group`, the others ask for it until it is there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

# After one rank failed, the others get this long to notice before they are killed.
SHUTDOWN_SECONDS = 15.0
NODES, NODE_RANK, RANKS_PER_NODE = "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"
HOST, PORT = "PET_MASTER_ADDR", "PET_MASTER_PORT"


@dataclass(frozen=True)
class RankLayout:
    """Ranks of a gang and the place where they meet, as seen by one of its workers."""

    nodes: int
    node: int
    """Number of this worker."""
    ranks_per_node: int
    master_address: str
    master_port: int
    """Port of rank 0's store; 0 in a gang of one worker that was given none, until one is reserved."""

    @property
    def world(self) -> int:
        """Return the number of ranks of the gang."""
        return self.nodes * self.ranks_per_node

    @property
    def first_rank(self) -> int:
        """Return the lowest rank of this worker."""
        return self.node * self.ranks_per_node


def read_layout(environ: Mapping[str, str] = os.environ) -> RankLayout:
    """Read the layout from torchrun's variables (PET_*). Raises ValueError, which names the variable."""
    nodes = _number(environ, NODES, "1", least=1)
    layout = RankLayout(
        nodes=nodes,
        node=_number(environ, NODE_RANK, "0", least=0),
        ranks_per_node=_number(environ, RANKS_PER_NODE, "1", least=1),
        master_address=environ.get(HOST) or "127.0.0.1",
        master_port=_number(environ, PORT, "0", least=0),
    )
    if layout.node >= nodes:
        raise ValueError(f"{NODE_RANK} is {layout.node}, but {NODES} says that there are {nodes}")
    if nodes > 1 and not (environ.get(HOST) and layout.master_port):
        raise ValueError(f"{HOST} and {PORT} must say where the ranks of {nodes} workers meet")
    return layout


def _number(environ: Mapping[str, str], name: str, default: str, least: int) -> int:
    text = environ.get(name) or default
    low, _, high = text.partition(":")  # torchrun also takes a range; a gang has one size
    if not low.isdecimal() or (high and high != low) or int(low) < least:
        raise ValueError(f"{name} is {text!r}, and must be a whole number of at least {least}")
    return int(low)


def rank_environment(layout: RankLayout, local_rank: int, base: Mapping[str, str], run_id: str = "") -> dict[str, str]:
    """Return `base` with the variables that torchrun sets for a rank, except the one by which its agent hosts the
    store."""
    rank, world = str(layout.first_rank + local_rank), str(layout.world)
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **meeting_environment(layout, base),
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "TORCHELASTIC_RUN_ID": run_id or "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def meeting_environment(layout: RankLayout, base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` with the variables that are the same for all processes of a worker."""
    return {
        **base,
        "MASTER_ADDR": layout.master_address,
        "MASTER_PORT": str(layout.master_port),
        "LOCAL_WORLD_SIZE": str(layout.ranks_per_node),
        "GROUP_RANK": str(layout.node),
        "GROUP_WORLD_SIZE": str(layout.nodes),
    }


def reserve_port(port: int) -> socket.socket:
    """Keep a port (0: any free one) from other programs until rank 0 listens on it; the socket's end ends that.

    A socket that is bound and does not listen keeps the kernel from giving the port away, and does not hinder a rank
    that binds to it with SO_REUSEADDR, as torch does. Raises OSError where somebody listens on the port already.
    """
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        reserved = None
        try:
            reserved = socket.socket(family)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            reserved.bind((host, port))
            return reserved
        except OSError as error:
            if reserved is not None:
                reserved.close()
            if family == socket.AF_INET or error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise OSError(error.errno, f"port {port} of the rendezvous: {error.strerror}") from error
    raise AssertionError("unreachable: the last family returns or raises")


@dataclass(frozen=True)
class ProcessEnd:
    """End of a rank's process."""

    rank: int
    exit_code: int
    """As the system reports it, negative for a signal."""
    at: float
    """Seconds since the epoch."""


class RankProcesses:
    """Processes of this worker's ranks. Each leads a session of its own, so that a signal to the launcher's group does
    not reach it."""

    def __init__(
        self,
        layout: RankLayout,
        command: Sequence[str],
        environ: Mapping[str, str],
        run_id: str = "",
        once: bool = False,
        directory: str | None = None,
        output: Mapping[int, int] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """With `once` the command is started once instead of once for each rank. `output` maps a rank to the descriptor
        that is its standard output and error; `prepare` runs in each new process before the command."""
        self.layout = layout
        self._command, self._environ, self._run_id, self._once = list(command), environ, run_id, once
        self._directory, self._output, self._prepare = directory, output or {}, prepare
        self._reserved: socket.socket | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: queue.Queue[ProcessEnd] = queue.Queue()
        self._gone: set[int] = set()

    def start(self) -> None:
        """Start all ranks. Raises OSError if the port is taken or a process can't be started; then none is left."""
        if self.layout.node == 0:
            self._reserved = reserve_port(self.layout.master_port)
            self.layout = replace(self.layout, master_port=self._reserved.getsockname()[1])
        try:
            for local_rank in range(1 if self._once else self.layout.ranks_per_node):
                self._start(local_rank)
        except BaseException:
            self.signal(signal.SIGKILL)
            self.close()
            raise

    def _start(self, local_rank: int) -> None:
        rank = self.layout.first_rank + local_rank
        if self._once:
            environ = meeting_environment(self.layout, self._environ)
        else:
            environ = rank_environment(self.layout, local_rank, self._environ, self._run_id)
        output = self._output.get(rank)
        self._processes[rank] = subprocess.Popen(
            self._command,
            env=environ,
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=self._prepare,
        )
        threading.Thread(target=self._watch, args=(rank,), name=f"rank {rank}", daemon=True).start()

    def _watch(self, rank: int) -> None:
        """Wait for one process in a thread of its own: its end is noticed at once, and costs nothing until then."""
        code = self._processes[rank].wait()
        at = time.time()
        self._gone.add(rank)
        self._ended.put(ProcessEnd(rank, code, at))

    def wait(
        self, on_end: Callable[[ProcessEnd], None] | None = None, stopping: Callable[[], bool] = lambda: False
    ) -> tuple[ProcessEnd, ...]:
        """Return the ends of all ranks, in their order, once all of them are gone.

        When one has failed, the others are asked to stop, and killed after SHUTDOWN_SECONDS. A process that even
        SIGKILL does not end within that time again (it sits in the kernel, on a broken GPU or disk) is given up. Where
        `stopping` says that all were asked already, they have as long as whoever asked gives them.
        """
        ends: list[ProcessEnd] = []
        deadline, killed = None, False
        while len(ends) < len(self._processes):
            try:
                end = self._ended.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                if killed:
                    now = time.time()
                    ends += [ProcessEnd(rank, -signal.SIGKILL, now) for rank in self.pids()]
                    break
                self.signal(signal.SIGKILL)
                killed, deadline = True, time.monotonic() + SHUTDOWN_SECONDS
                continue
            ends.append(end)
            if on_end is not None:
                on_end(end)
            if end.exit_code and deadline is None and not stopping():
                self.signal(signal.SIGTERM)
                deadline = time.monotonic() + SHUTDOWN_SECONDS
        self.close()
        return tuple(ends)

    def signal(self, number: int) -> None:
        """Send a signal to the process groups of the ranks that still run."""
        for pid in self.pids().values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def pids(self) -> dict[int, int]:
        """Return the process ids of the ranks that still run, by rank."""
        return {rank: process.pid for rank, process in self._processes.items() if rank not in self._gone}

    def started(self) -> dict[int, int]:
        """Return the process ids of all ranks by rank, also of those that have ended: a short program may be over
        before anybody looks at it."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def close(self) -> None:
        """Let others have the rendezvous' port."""
        if self._reserved is not None:
            self._reserved.close()
