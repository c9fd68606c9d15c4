"""Taking workers away: SIGTERM to the launcher, after the grace SIGKILL for whatever carries the worker's marks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import psutil

from muster.operator.local import processes
from muster.operator.local.processes import WorkerKey
from muster.words.state_folder import StateFolder

POLL_SECONDS = 0.03
RETRY_SECONDS = 0.25
# A process that survives SIGKILL for so long hangs in the kernel (a dead disk, a stuck driver): ask again, but seldom.
STUCK_SECONDS = 5.0


class WorkerRemovals:
    """The removals under way, one task per worker, so that no pass of the operator ever waits for a grace to end.

    `on_gone` is called with a worker's key when no process of the worker is left.
    """

    def __init__(self, state: StateFolder, on_gone: Callable[[WorkerKey], None]) -> None:
        self._state = state
        self._on_gone = on_gone
        self._deadlines: dict[WorkerKey, float] = {}
        self._tasks: dict[WorkerKey, asyncio.Task[None]] = {}

    def remove(self, key: WorkerKey, grace_seconds: float) -> None:
        """Begin to remove the worker. Asked again, the earlier of the two deadlines holds."""
        deadline = time.monotonic() + grace_seconds
        self._deadlines[key] = min(deadline, self._deadlines.get(key, deadline))
        if key not in self._tasks:
            self._tasks[key] = asyncio.get_running_loop().create_task(self._removal(key))

    def under_way(self) -> frozenset[WorkerKey]:
        return frozenset(self._tasks)

    async def finish(self) -> None:
        """Wait until every removal begun so far has ended."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def abandon(self) -> None:
        """Stop seeing to it; the next operator asks anew."""
        for task in self._tasks.values():
            task.cancel()

    async def _removal(self, key: WorkerKey) -> None:
        try:
            tree = await self._tree(key)
            if tree and time.monotonic() < self._deadlines[key]:
                await self._ask(key, tree)
            await self._kill(key)
        finally:
            self._deadlines.pop(key, None)
            self._tasks.pop(key, None)
        self._on_gone(key)

    async def _ask(self, key: WorkerKey, tree: list[psutil.Process]) -> None:
        """Send SIGTERM to the launcher, which stops its ranks; return when it is gone or the grace period is over."""
        launcher = processes.top_of(tree)
        if launcher is None:
            return
        with contextlib.suppress(psutil.Error):
            launcher.terminate()
        while processes.is_running(launcher):
            if time.monotonic() >= self._deadlines[key]:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _kill(self, key: WorkerKey) -> None:
        """Kill and look again until a scan finds nothing: a dying tree may still fork."""
        started = time.monotonic()
        while tree := await self._tree(key):
            processes.kill_all(tree)
            await asyncio.sleep(POLL_SECONDS if time.monotonic() - started < STUCK_SECONDS else 1.0)

    async def _tree(self, key: WorkerKey) -> list[psutil.Process]:
        while True:
            try:
                return processes.members(await asyncio.to_thread(processes.scan, self._state), key)
            except OSError:  # too many open files, for one: not knowing is no reason to stop
                await asyncio.sleep(RETRY_SECONDS)
