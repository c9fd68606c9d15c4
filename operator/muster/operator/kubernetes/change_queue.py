"""Jobs and the fleet that have changed, gathered for a moment, so that one look sees what belongs together."""

from __future__ import annotations

import asyncio

from muster.operator.pacing import EVENT_SECONDS, EVENT_SECONDS_MAX, EVENTS_PER_SECOND, LATER_SECONDS


class ChangeQueue:
    """Queue of what to look at next. Keys are uids of jobs, or FLEET."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[str] = asyncio.Queue()
        self._enqueued: set[str] = set()
        self._enqueued_later: set[str] = set()

    async def next(self) -> str:
        """The key that has waited longest, once there is one."""
        key = await self._ready.get()
        self._enqueued.discard(key)
        self._enqueued_later.discard(key)
        return key

    def enqueue(self, key: str) -> None:
        """Queue the job a moment later: pods of a gang come up one by one, and one pass sees several."""
        if key not in self._enqueued:
            self._enqueued.add(key)
            pause = min(EVENT_SECONDS_MAX, max(EVENT_SECONDS, len(self._enqueued) / EVENTS_PER_SECOND))
            asyncio.get_running_loop().call_later(pause, self._ready.put_nowait, key)

    def enqueue_later(self, key: str) -> None:
        """Queue the job with its next change, or in LATER_SECONDS: only words and counts of it changed."""

        def remind() -> None:
            if key in self._enqueued_later:
                self.enqueue(key)

        if key not in self._enqueued_later:
            self._enqueued_later.add(key)
            asyncio.get_running_loop().call_later(LATER_SECONDS, remind)
