"""Holds a worker of a shared machine to its memory and to a number of processes. In a pod, control groups do that.

An address-space limit would break CUDA, which reserves far more addresses than it uses, so the launcher looks once a
second at what its processes hold. Between two looks RLIMIT_NPROC stops what multiplies faster than that.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from muster.words.names import ExitCode, Rendezvous
from muster.words.signals import WorkerExit
from muster.worker.cores import usable_cores

if TYPE_CHECKING:
    import psutil

LOOK_SECONDS = 1.0
# Of a core, for looks: psutil takes 0.1 ms for each process of the machine (measured: 10 ms of 110).
LOOK_SHARE_MAX = 0.1

# Processes of a worker. A rank has up to 32 that prepare its data (data/processes.py) and as many that compile its
# kernels (torch's inductor); 512 are left for trackers, uploads, verifiers and what the job's own code starts.
PROCESSES = 512
PROCESSES_PER_RANK = 64

# Tasks (processes and threads) that may come to what the user of this machine runs already. All of the user's count,
# also those of workers that start later, so it is generous: eight ranks of a machine with 192 cores have some 200 tasks
# for their sums together and 4,000 of all kinds at most. It stays below the kernel's own default for the whole machine
# (pid_max, 1,024 for each core and at least 32,768).
TASKS = 4_096
TASKS_PER_CORE = 64


class ProcessLimits:
    """Looks at this process and all that it started or adopted; ends these when they are more than they may be."""

    def __init__(self, memory_bytes: int | None, processes: int) -> None:
        self._memory_bytes, self._processes = memory_bytes, processes
        self.exceeded: WorkerExit | None = None  # how the worker ends, once it took more than it may

    def watch(self) -> None:
        """Look in a thread of our own, until this process ends or a limit was exceeded."""
        threading.Thread(target=self._watch, name="limits", daemon=True).start()

    def _watch(self) -> None:
        while self.exceeded is None:
            began = time.monotonic()
            self.exceeded = self.look()
            took = time.monotonic() - began
            time.sleep(max(LOOK_SECONDS, took / LOOK_SHARE_MAX) if self.exceeded is None else 0.0)
        print(f"the ranks are killed: {self.exceeded.message}", file=sys.stderr, flush=True)
        kill_tree()

    def look(self) -> WorkerExit | None:
        """Return how the worker must end, where it exceeds a limit; None where it does not."""
        pids = [os.getpid(), *(process.pid for process in tree())]
        if len(pids) > self._processes:
            message = (
                f"the worker ran {len(pids)} processes, and may run {self._processes} on a shared machine: let the "
                "job's code start fewer at once, and wait for those that have ended"
            )
            return WorkerExit(exit_code=ExitCode.USER_ERROR, at=time.time(), message=message)
        if self._memory_bytes is None or sum(map(held_bytes_at_most, pids)) <= self._memory_bytes:
            return None
        used = sum(map(held_bytes, pids))
        if used <= self._memory_bytes:
            return None
        message = (
            f"its {len(pids)} processes held {used / 2**20:,.0f} MiB of memory, "
            f"gang.resources.memory lets them hold {self._memory_bytes / 2**20:,.0f} MiB"
        )
        code, number = 128 + signal.SIGKILL, int(signal.SIGKILL)  # as a pod ends that the kernel kills for its memory
        return WorkerExit(exit_code=code, at=time.time(), signal=number, message=message, oom_killed=True)


def processes_max() -> int:
    """The processes that this worker may have, its launcher among them."""
    return PROCESSES + PROCESSES_PER_RANK * int(os.environ.get(Rendezvous.RANKS_PER_NODE, "1"))


def limit_tasks() -> None:
    """Let this process and its children start no task once the user of this machine runs many more than now. The kernel
    counts threads too, and holds root to nothing."""
    room = tasks_of_user() + TASKS + TASKS_PER_CORE * usable_cores()
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most = room if hard == resource.RLIM_INFINITY else min(room, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def tasks_of_user() -> int:
    """Threads of all processes of our user, as far as this system shows them."""
    import psutil

    mine, count = os.getuid(), 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            count += process.num_threads() if process.uids().real == mine else 0
    return count


def tree() -> list[psutil.Process]:
    """Return the processes that this process started or adopted (see adopt_orphans), and those that they started."""
    import psutil

    return list(psutil.Process().children(recursive=True))


def kill_tree() -> None:
    """Stop all first, so that none starts another while the rest is killed."""
    import psutil

    for number in (signal.SIGSTOP, signal.SIGKILL):
        signalled: set[int] = set()
        while new := [process for process in tree() if process.pid not in signalled]:
            signalled.update(process.pid for process in new)
            for process in new:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)


# What counts is what a control group could not take back: anonymous and shared memory, not pages of files, and not what
# a driver maps of a GPU. A forked process shares its parent's pages, and ranks share buffers: memory that only one
# process has (USS) leaves all of that out, and RSS counts it in each. Only Pss is right, but the kernel walks all pages
# for it: 35 ms for each GiB in pages of 4 KiB, against 0.25 ms for the RSS of a process. So the RSS is looked at, and
# Pss where that is beyond the limit.


def held_bytes_at_most(pid: int) -> int:
    """Anonymous and shared memory of a process, what it shares with others in full; 0 for one that is gone."""
    return _sum(f"/proc/{pid}/status", "RssAnon:", "RssShmem:") or 0


def held_bytes(pid: int) -> int:
    """The same, of what is shared only this process's part."""
    size = _sum(f"/proc/{pid}/smaps_rollup", "Pss_Anon:", "Pss_Shmem:")
    return held_bytes_at_most(pid) if size is None else size


def _sum(path: str, *names: str) -> int | None:
    """The sum of these lines of a file of proc(5), in bytes; None where it can't be read or has none of them."""
    try:
        with open(path) as file:
            sizes = [int(line.split()[1]) * 1024 for line in file if line.startswith(names)]
    except OSError:
        return None
    return sum(sizes) if sizes else None
