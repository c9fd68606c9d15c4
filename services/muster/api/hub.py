"""Wakes streams when a job has news, so that they need not ask the database many times a second."""

from __future__ import annotations

import asyncio
from collections import defaultdict

ANY_JOB = ""  # no job has this id: who waits for it is woken by the news of every job


class Hub:
    """One per process. News of another process's making is found by the poll that every wait falls back to."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self.closing = asyncio.Event()

    def tell(self, job_id: str) -> None:
        for event in (*self._waiting.get(job_id, ()), *self._waiting.get(ANY_JOB, ())):
            event.set()

    def close(self) -> None:
        """The process is asked to end: every stream finishes at its next step."""
        self.closing.set()
        for events in self._waiting.values():
            for event in events:
                event.set()

    async def wait(self, job_id: str, seconds: float) -> None:
        """Return at the job's next news, at closing, or after so many seconds."""
        if self.closing.is_set():
            return
        event = asyncio.Event()
        self._waiting[job_id].add(event)
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting[job_id].discard(event)
            if not self._waiting[job_id]:
                del self._waiting[job_id]
