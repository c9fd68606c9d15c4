"""Starter of a worker's ranks: one process for each, with torchrun's variables, watched until all of them are gone.

torchrun's agent does this too, at the price of importing torch (two seconds of processor time for each worker), of a
rendezvous of its own before the ranks', and of ending all ranks at the first death, whatever the gang could do without
that one. Here a rank is started at once and meets the others by itself: rank 0 hosts the store of
`init_process_group`, the others ask for it until it is there. `after_end` alone decides what follows from a death.

Decision 0079 says what of torchrun is kept, and what nothing used.
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
from enum import Enum

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

    def processes(self, once: bool) -> range:
        """Return the ranks of this worker's processes. With `once` there is one process for each worker, and its rank
        is the worker's number."""
        first, count = (self.node, 1) if once else (self.first_rank, self.ranks_per_node)
        return range(first, first + count)


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


def rank_environment(
    layout: RankLayout, rank: int, base: Mapping[str, str], run_id: str = "", error_file: str = ""
) -> dict[str, str]:
    """Return `base` with the variables that torchrun sets for a rank.

    OMP_NUM_THREADS is not among them: torchrun makes it 1 where a node has several ranks, `cores.share_cores` divides
    the cores. `error_file` is where torch's `record` writes the exception that ends the program.
    """
    world = str(layout.world)
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **meeting_environment(layout, base),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - layout.first_rank),
        "WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": world,
        "TORCHELASTIC_RUN_ID": run_id or "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # Rank 0 hosts the store. Whoever runs us inside of torchrun must not make the ranks wait for an agent's.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": error_file,
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

    @property
    def words(self) -> str:
        """Return how the rank ended, for people."""
        if self.exit_code < 0:
            return f"rank {self.rank} was killed by {signal_name(-self.exit_code)}"
        return f"rank {self.rank} ended with exit code {self.exit_code}"


def signal_name(number: int) -> str:
    """Return a signal's name, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class AfterEnd(Enum):
    """Consequence of one rank's end for the other ranks of its worker."""

    LEAVE_OTHERS = "leave others"
    STOP_OTHERS = "stop others"


def after_end(end: ProcessEnd, stopping: bool) -> AfterEnd:
    """Decide what follows from a rank's end. Nothing else here does.

    The ranks of a gang compute each step together, so without one that failed the others come to no other step: they
    would wait for it until a time-out, which is ten minutes with NCCL and thirty with gloo. One that ended well has
    done its part. Where all were asked to stop, each ends in its own time.
    """
    return AfterEnd.STOP_OTHERS if end.exit_code and not stopping else AfterEnd.LEAVE_OTHERS


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
        error_file: Callable[[int], str] = lambda rank: "",
        shutdown_seconds: float = SHUTDOWN_SECONDS,
    ) -> None:
        """With `once` the command is started once instead of once for each rank. `output` maps a rank to the descriptor
        that is its standard output and error; `prepare` runs in each new process before the command; `error_file` names
        a rank's file for `rank_environment`."""
        self.layout = layout
        self._command, self._environ, self._run_id, self._once = list(command), environ, run_id, once
        self._directory, self._output, self._prepare = directory, output or {}, prepare
        self._error_file, self._shutdown_seconds = error_file, shutdown_seconds
        self._reserved: socket.socket | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._process_count = 0
        self._ended: queue.Queue[ProcessEnd] = queue.Queue()

    def start(self) -> None:
        """Start all ranks. Raises OSError if the port is taken or a process can't be started; then none is left.

        To be called from the main thread where `prepare` binds the ranks' lives to this process'."""
        if self.layout.node == 0:
            self._reserved = reserve_port(self.layout.master_port)
            self.layout = replace(self.layout, master_port=self._reserved.getsockname()[1])
        try:
            for rank in self.layout.processes(self._once):
                self._start(rank)
        except BaseException:
            self.signal(signal.SIGKILL)
            self.close()
            raise

    def _start(self, rank: int) -> None:
        if self._once:
            environ = meeting_environment(self.layout, self._environ)
        else:
            error_file = self._error_file(rank)
            environ = rank_environment(self.layout, rank, self._environ, self._run_id, error_file)
        output = self._output.get(rank)
        process = subprocess.Popen(
            self._command,
            env=environ,
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=self._prepare,
        )
        self._processes[rank] = process
        self._process_count += 1
        threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Put the end of one process into the queue that `wait` reads. A thread notices it at once, costs nothing until
        then, and needs no system call that an old kernel or a sandbox lacks (pidfd_open)."""
        code = process.wait()
        self._ended.put(ProcessEnd(rank, code, time.time()))

    def wait(
        self,
        on_end: Callable[[ProcessEnd, bool], None] = lambda end, stopped_others: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> tuple[ProcessEnd, ...]:
        """Return the ends of all processes, in their order, once all of them are gone.

        `after_end` decides about each of them. `on_end` hears of it when that is done, and whether others that still
        ran were asked to stop because of it. Those that are still there after the shutdown's seconds are killed with
        their process groups. A process that even SIGKILL does not end within that time again (it sits in the kernel, on
        a broken GPU or disk) is given up. Where `stopping` says that all were asked already, they have as long as
        whoever asked gives them.
        """
        ends: list[ProcessEnd] = []
        deadline, killed = None, False
        while len(ends) < self._process_count:
            try:
                end = self._ended.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                if killed:
                    now = time.time()
                    ends += [ProcessEnd(rank, -signal.SIGKILL, now) for rank in self.pids()]
                    break
                self.signal(signal.SIGKILL)
                killed, deadline = True, time.monotonic() + self._shutdown_seconds
                continue
            ends.append(end)
            stops_others = deadline is None and after_end(end, stopping()) is AfterEnd.STOP_OTHERS and bool(self.pids())
            if stops_others:
                self.signal(signal.SIGTERM)
                deadline = time.monotonic() + self._shutdown_seconds
            on_end(end, stops_others)
        self.close()
        return tuple(ends)

    def signal(self, number: int) -> None:
        """Send a signal to the process groups of the ranks that still run."""
        for pid in self.pids().values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def pids(self) -> dict[int, int]:
        """Return the process ids of the ranks that still run, by rank."""
        return {rank: process.pid for rank, process in self._processes.items() if process.returncode is None}

    def started(self) -> dict[int, int]:
        """Return the process ids of all ranks by rank, also of those that have ended: a short program may be over
        before anybody looks at it."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def close(self) -> None:
        """Let others have the rendezvous' port."""
        if self._reserved is not None:
            self._reserved.close()
