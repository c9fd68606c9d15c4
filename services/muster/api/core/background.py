"""Background work of the API: each piece is repeated for ever, and what goes wrong is logged, shown and retried."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from muster.api.core.errors import ApiError

log = structlog.get_logger("muster.api.background")

RETRY_SECONDS_MAX = 10.0
UNHEALTHY_AFTER_SECONDS = 15.0
STOP_SECONDS_MAX = 5.0


@dataclass
class BackgroundWork:
    """Work that is done in rounds, each a call of `step`. `wake` cuts the pause of `seconds` after it short, but not
    below `seconds_min`, so that a burst of wakes is one round's work. `failing_since` is None after a good round. The
    process is ready without work that is not `needed`; `behind` says what work that is still has to do before that.
    """

    name: str
    step: Callable[[], Awaitable[bool]]  # True: there is more to do at once
    seconds: float
    seconds_min: float = 0.0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    needed: bool = True
    behind: Callable[[], str] = str  # empty: nothing
    rounds: int = 0
    failures: int = 0
    failing_since: float | None = None
    error: str = ""

    @property
    def healthy(self) -> bool:
        """A hiccup is not an illness: only failing for a while counts."""
        return self.failing_since is None or time.monotonic() - self.failing_since < UNHEALTHY_AFTER_SECONDS


class BackgroundWorks:
    def __init__(self, works: list[BackgroundWork]) -> None:
        self.works = works
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._for_ever(work), name=work.name) for work in self.works]

    async def stop(self) -> None:
        """Let the current rounds finish, and cancel those that do not."""
        self._stopping.set()
        for work in self.works:
            work.wake.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_SECONDS_MAX)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def alive(self, work: BackgroundWork) -> bool:
        return any(task.get_name() == work.name and not task.done() for task in self._tasks)

    async def _for_ever(self, work: BackgroundWork) -> None:
        failures_in_a_row = 0
        while not self._stopping.is_set():
            pause = work.seconds
            try:
                more = await work.step()
                work.rounds += 1
                if work.failing_since is not None:
                    log.info("background work goes on", work=work.name)
                failures_in_a_row, work.failing_since, work.error = 0, None, ""
                if more:
                    continue
            except Exception as error:
                failures_in_a_row += 1
                _note(work, error)
                pause = min(RETRY_SECONDS_MAX, 0.1 * 2 ** min(failures_in_a_row, 10))
            await asyncio.sleep(min(pause, work.seconds_min))
            await _pause(work, 0.0 if self._stopping.is_set() else pause)


def _note(work: BackgroundWork, error: Exception) -> None:
    work.failures += 1
    work.error = f"{type(error).__name__}: {error}"[:500]
    first = work.failing_since is None
    work.failing_since = work.failing_since or time.monotonic()
    expected = isinstance(error, ApiError)
    if first or not expected:
        log.error("background work failed and will be retried", work=work.name, error=work.error, exc_info=not expected)


async def _pause(work: BackgroundWork, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work.wake.wait()
    except TimeoutError:
        pass
    work.wake.clear()
