"""Notification of streams when a job has news, so that they need not query the database many times a second."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator

ANY_JOB = ""  # no job has this id: who waits for it is woken by the news of every job
# How long a stream goes without asking: two seconds where only asking shows what another process wrote; longer where
# that process tells us, for then asking only finds what one wrote that was killed before it told.
POLL_SECONDS = 2.0
POLL_SECONDS_NOTIFIED = 10.0


class StreamSubscription:
    """Subscription of one stream. A notification that arrives while the stream reads ends its next wait at once."""

    def __init__(self, closing: asyncio.Event) -> None:
        self._closing = closing
        self.came = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Return at news since the last wait, at closing, or after so many seconds."""
        if self._closing.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.came.wait()
        self.came.clear()


class NotificationHub:
    """Hub of one process. `untold` are the ids of which other processes are still to be notified; None if there is no
    way to notify them. `heard` says whether they notify us."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, set[StreamSubscription]] = defaultdict(set)
        self.closing = asyncio.Event()
        self.untold: set[str] | None = None
        self.has_untold = asyncio.Event()
        self.heard = False
        self.wakes = 0  # how often anybody was woken: what was read since the last time has all news of this process

    @property
    def poll_seconds(self) -> float:
        return POLL_SECONDS_NOTIFIED if self.heard else POLL_SECONDS

    def tell(self, job_id: str) -> None:
        """A job has news, which are committed: wake its streams here and, soon, in the other processes."""
        self.wake(job_id)
        if self.untold is not None:
            self.untold.add(job_id)
            self.has_untold.set()

    def wake(self, job_id: str) -> None:
        self.wakes += 1
        for news in (*self._waiting.get(job_id, ()), *self._waiting.get(ANY_JOB, ())):
            news.came.set()

    def wake_all(self) -> None:
        self.wakes += 1
        for waiting in self._waiting.values():
            for news in waiting:
                news.came.set()

    def close(self) -> None:
        """The process is asked to end: every stream finishes at its next step."""
        self.closing.set()
        self.wake_all()

    @contextlib.contextmanager
    def following(self, job_id: str) -> Iterator[StreamSubscription]:
        news = StreamSubscription(self.closing)
        self._waiting[job_id].add(news)
        try:
            yield news
        finally:
            self._waiting[job_id].discard(news)
            if not self._waiting[job_id]:
                del self._waiting[job_id]

    async def wait(self, job_id: str, seconds: float) -> None:
        """Return at the job's next news, at closing, or after so many seconds."""
        with self.following(job_id) as news:
            await news.wait(seconds)
