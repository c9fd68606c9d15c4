"""Lookup of a job's checkpoints that never waits long for the store.

A checkpoint address is the user's: its store may hang (a dead mount, a FIFO), fail, or hold what nobody can read. Each
look runs in a daemon thread of its own, so that it holds up neither another job nor the end of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from muster.operator.core.observed import CommittedSteps
from muster.operator.pacing import COMMITS_ANSWER_SECONDS
from muster.storage.errors import StorageError
from muster.storage.listing import CommitSummary
from muster.words.base import UserError

WHY_LENGTH_MAX = 500


@dataclass(frozen=True, slots=True)
class KnownCommits:
    """Known checkpoints of a job."""

    committed: CommittedSteps | None = None  # the newest; None where there is none, or nothing is known
    unreadable: str = ""  # why nothing is known


@dataclass(frozen=True, slots=True)
class _HangingLookup:
    thread: threading.Thread
    since: float  # monotonic


class CommitLookup:
    """Lookup of commits in folders that may hang, without ever waiting longer than `seconds_max`.

    `read` lists the commits of a folder, ascending by step. It may block for ever, and raise anything.
    """

    def __init__(
        self, read: Callable[[str], tuple[CommitSummary, ...]], seconds_max: float = COMMITS_ANSWER_SECONDS
    ) -> None:
        self._read, self._seconds_max = read, seconds_max
        self._hanging: dict[str, _HangingLookup] = {}

    async def look(self, uid: str, folder: str) -> KnownCommits:
        """The job's commits now. Never raises; returns within `seconds_max`, at once while an earlier look hangs."""
        if (hanging := self._hanging.get(uid)) is not None:
            if hanging.thread.is_alive():
                return _silent(folder, time.monotonic() - hanging.since)
            del self._hanging[uid]
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[KnownCommits] = loop.create_future()

        def tell(commits: KnownCommits) -> None:
            if not answer.done():
                answer.set_result(commits)

        def work() -> None:
            commits = self._cached_commits(folder)
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(tell, commits)

        thread, began = threading.Thread(target=work, name=f"commits of {uid}", daemon=True), time.monotonic()
        thread.start()
        try:
            async with asyncio.timeout(self._seconds_max):
                return await answer
        except TimeoutError:
            self._hanging[uid] = _HangingLookup(thread, began)
            return _silent(folder, self._seconds_max)

    def forget(self, uid: str) -> None:
        self._hanging.pop(uid, None)

    def _cached_commits(self, folder: str) -> KnownCommits:
        try:
            return KnownCommits(newest(self._read(folder)))
        except Exception as error:  # whatever lies in a job's folder must not keep its user from cancelling
            says_where = isinstance(error, StorageError | UserError)
            words = str(error) if says_where else f"{folder}: {type(error).__name__}: {error}"
            return KnownCommits(unreadable=words[:WHY_LENGTH_MAX] or repr(error))


def newest(commits: tuple[CommitSummary, ...]) -> CommittedSteps | None:
    if not commits:
        return None
    best = [commit.step for commit in commits if commit.best]
    return CommittedSteps(commits[-1].step, commits[-1].committed_at, best[-1] if best else None)


def _silent(folder: str, seconds: float) -> KnownCommits:
    """Return the result for a silent store, in words that stay the same from read to read, because each change is a
    write of the status."""
    minutes = int(seconds // 60)
    for_long = f"{minutes} min" if minutes else "several seconds"
    return KnownCommits(unreadable=f"the checkpoint folder {folder} has not answered for {for_long}")
