"""Ranks that stay: they meet once, and then train whatever a module's tests ask for, plan after plan.

All of them are forked from one process that has loaded torch, for to load it takes a rank longer than most of these
tests train. What is tested of an attempt that ends with its processes is tested on gangs with a launcher (`Job.start`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests import torch_server
from tests.integration.trainer import many_runs
from tests.polling import eventually
from tests.ports import free_port

PLAN_SECONDS_MAX = 1_500.0
END_SECONDS_MAX = 120.0
KEPT_RANKS_MAX = 2  # larger pools are rare, and each rank takes 400 MB
LOG_BYTES = 4_000


class RankPool:
    """The processes of `many_runs`. environment: on top of which each has its place among the ranks."""

    def __init__(self, ranks: int, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._logs = [tempfile.NamedTemporaryFile() for _ in range(ranks)]  # noqa: SIM115 - closed by `end`
        port = free_port()
        started = [
            torch_server.start(many_runs.rank, {"log": log.name, "variables": variables(rank, ranks, port)})
            for rank, log in enumerate(self._logs)
        ]
        self._processes = [process for process, _ in started]
        self._connections = [connection for _, connection in started]

    def train(self, plan: Path) -> None:
        """Have every rank carry out the plan. Raises AssertionError with their last words when one of them fails; then
        none is left."""
        done = [plan.with_suffix(f".{rank}.done") for rank in range(len(self._processes))]

        def over() -> bool:
            return all(map(Path.exists, done)) or any(process.poll() is not None for process in self._processes)

        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # it has died, which is found right below
                connection.sendall(f"{plan}\n".encode())
        with contextlib.suppress(AssertionError):
            eventually(over, "the ranks to be done", PLAN_SECONDS_MAX)
        if not all(map(Path.exists, done)):
            self._fail()

    def _fail(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)  # it writes down where it stands
        codes = [process.wait(END_SECONDS_MAX) for process in self._processes]
        words = [
            f"rank {rank} ended with {code}:\n{self._last_words(rank)}" for rank, code in enumerate(codes) if code != 0
        ]
        self.end()
        raise AssertionError("\n".join(words))

    def _last_words(self, rank: int) -> str:
        file = self._logs[rank].fileno()  # the rank writes at the same offset: it must not be moved
        size = os.fstat(file).st_size
        return os.pread(file, LOG_BYTES, max(0, size - LOG_BYTES)).decode(errors="replace")

    def end(self) -> None:
        """No process is left of it."""
        for process in self._processes:
            process.kill()
        for process, connection, log in zip(self._processes, self._connections, self._logs, strict=True):
            process.wait()
            connection.close()
            log.close()


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return what the launcher would set for a rank of one worker."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


_pools: dict[int, RankPool] = {}


def train(ranks: int, plan: Path) -> None:
    """Have so many ranks carry out the plan, in the environment as it is now; see `RankPool.train`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    pool = _pools.pop(ranks, None)
    if pool is not None and pool.environment != environment:
        pool.end()
        pool = None
    pool = pool or RankPool(ranks, environment)
    pool.train(plan)
    if ranks <= KEPT_RANKS_MAX:
        _pools[ranks] = pool
    else:
        pool.end()


def end_ranks() -> None:
    """End the ranks that are kept for the next plan."""
    while _pools:
        _pools.popitem()[1].end()
