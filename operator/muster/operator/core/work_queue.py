"""Queue of keys to process. Each key is processed by one worker at a time, and is queued at most once.

Time here is `ticks`: seconds of a clock that never jumps (not the world's clock).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from muster.operator.pacing import RETRY_SECONDS, RETRY_SECONDS_MAX


@dataclass
class WorkQueue:
    _due: dict[str, float] = field(default_factory=dict)  # key -> when
    # The same, with stale entries that `take` skips; those to be preferred, and the others.
    _heaps: tuple[list[tuple[float, str]], list[tuple[float, str]]] = field(default_factory=lambda: ([], []))
    _preferred: set[str] = field(default_factory=set)
    _processing: set[str] = field(default_factory=set)
    _enqueued_meanwhile: set[str] = field(default_factory=set)
    _failures: dict[str, int] = field(default_factory=dict)

    def enqueue(self, key: str, ticks: float) -> None:
        """Process `key` now. A key that keeps failing still waits for its next retry."""
        if key in self._processing:
            self._enqueued_meanwhile.add(key)
        elif not self._failures.get(key):
            self._put(key, ticks)
        elif key not in self._due:
            self._put(key, ticks + self._retry_seconds(key))

    def prefer(self, key: str, preferred: bool) -> None:
        """Let `key` go before all others that are due, from its next time on (a gang that runs before ten thousand that
        wait), or no longer."""
        if preferred:
            self._preferred.add(key)
        else:
            self._preferred.discard(key)

    def take(self, ticks: float) -> str | None:
        """The key that has been due longest, in processing until `done` or `failed`; None if none is due."""
        for heap in self._heaps:
            while heap and heap[0][0] <= ticks:
                at, key = heapq.heappop(heap)
                if self._due.get(key) == at:
                    del self._due[key]
                    self._processing.add(key)
                    return key
        return None

    def done(self, key: str, ticks: float, wake_after: float | None) -> None:
        """Queue a key that was processed again in `wake_after` seconds, or at once if it was enqueued meanwhile.

        If `wake_after` is None, it waits for the next `enqueue`.
        """
        self._failures.pop(key, None)
        if self._finish(key):
            self._put(key, ticks)
        elif wake_after is not None:
            self._put(key, ticks + max(0.0, wake_after))

    def failed(self, key: str, ticks: float) -> float:
        """Schedule `key` again after a growing delay, which is returned."""
        self._failures[key] = self._failures.get(key, 0) + 1
        self._finish(key)
        seconds = self._retry_seconds(key)
        self._put(key, ticks + seconds)
        return seconds

    def next_at(self) -> float | None:
        """Return when the next key is due."""
        for heap in self._heaps:
            while heap and self._due.get(heap[0][1]) != heap[0][0]:
                heapq.heappop(heap)
        return min((heap[0][0] for heap in self._heaps if heap), default=None)

    def __len__(self) -> int:
        """Keys that are due some time, or in hand."""
        return len(self._due) + len(self._processing)

    def _retry_seconds(self, key: str) -> float:
        return float(min(RETRY_SECONDS_MAX, RETRY_SECONDS * 2 ** min(self._failures.get(key, 1) - 1, 16)))

    def _finish(self, key: str) -> bool:
        self._processing.discard(key)
        again = key in self._enqueued_meanwhile
        self._enqueued_meanwhile.discard(key)
        return again

    def _put(self, key: str, at: float) -> None:
        if key not in self._due or at < self._due[key]:
            self._due[key] = at
            heapq.heappush(self._heaps[0 if key in self._preferred else 1], (at, key))
