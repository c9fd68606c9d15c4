"""News: deaths at once, heartbeats and the cluster's writes a few times a second."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

from muster.local.cluster import LocalCluster
from muster.operator.core.conditions import change_key
from muster.operator.core.stalls import alarming
from muster.operator.local import processes
from muster.operator.local.notices import NoticeFiles, Stamp
from muster.operator.local.processes import WorkerKey, WorkerRecord
from muster.operator.local.reading import HeartbeatReader
from muster.operator.local.workers import ended
from muster.operator.pacing import POLLS_SKIPPED_IDLE
from muster.operator.world import FLEET
from muster.words.notices import MACHINE
from muster.words.state_folder import StateFolder

Sign = tuple[object, ...]


class JobWatch:
    """Watch that yields the uids of jobs with news, and FLEET for news of the nodes.

    `on_error` is called with a poll that failed; the next one is tried all the same. A launcher's death is heard
    through its pidfd the moment it happens (Linux); elsewhere at the next poll.
    """

    def __init__(
        self,
        state: StateFolder,
        cluster: LocalCluster,
        heartbeats: HeartbeatReader,
        poll_seconds: float,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._state, self._cluster, self._heartbeats = state, cluster, heartbeats
        self._poll_seconds, self._on_error = poll_seconds, on_error
        self._news: asyncio.Queue[str] = asyncio.Queue()
        self._watched: dict[WorkerKey, WorkerRecord] = {}
        self._pidfds: dict[WorkerKey, int] = {}
        self._signs: dict[WorkerKey, Sign] = {}
        self._notices = NoticeFiles(state.notices)
        self._noticed: dict[str, Stamp] = {}
        self._version = 0

    def enqueue(self, uid: str) -> None:
        self._news.put_nowait(uid)

    def follow(self, record: WorkerRecord) -> None:
        """Watch this worker's death and its heartbeats' phases from now on."""
        key = record.key
        if key in self._watched:
            return
        self._watched[key] = record
        try:
            self._pidfds[key] = os.pidfd_open(record.pid)
        except (AttributeError, OSError):
            return  # not this system, or dead already: the poll sees it
        asyncio.get_running_loop().add_reader(self._pidfds[key], self._died, key)

    def followed(self) -> tuple[WorkerKey, ...]:
        """The workers that are alive, as far as is known. From any thread."""
        return tuple(self._watched)

    def follows(self, key: WorkerKey) -> bool:
        return key in self._watched

    def unfollow(self, key: WorkerKey) -> None:
        self._watched.pop(key, None)
        self._signs.pop(key, None)
        if (pidfd := self._pidfds.pop(key, None)) is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    async def events(self) -> AsyncIterator[str]:
        poll = asyncio.get_running_loop().create_task(self._poll_for_ever())
        try:
            while True:
                yield await self._news.get()
        finally:
            poll.cancel()
            for key in list(self._watched):
                self.unfollow(key)

    def _died(self, key: WorkerKey) -> None:
        self.unfollow(key)
        self.enqueue(key.job_uid)

    async def _poll_for_ever(self) -> None:
        while True:
            try:
                for uid in await asyncio.to_thread(self._poll):
                    self.enqueue(uid)
                for key in [key for key, sign in self._signs.items() if sign == _GONE]:
                    self.unfollow(key)
            except Exception as error:
                self._on_error(error)
            await asyncio.sleep(self._poll_seconds * (1.0 if self._watched else POLLS_SKIPPED_IDLE))

    def _poll(self) -> set[str]:
        return self._changed_jobs() | self._changed_workers() | self._changed_nodes()

    def _changed_jobs(self) -> set[str]:
        version = self._cluster.version()
        if version == self._version:
            return set()
        changed = set(self._cluster.written_after(self._version))
        self._version = version
        return changed

    def _changed_nodes(self) -> set[str]:
        """The fleet, and who has a worker on a node that says something else than before."""
        stamps = self._notices.stamps()
        if stamps == self._noticed:
            return set()
        nodes = {name for name, _ in stamps.items() ^ self._noticed.items()}
        self._noticed = stamps
        whose = (record for record in list(self._watched.values()) if record.node in nodes or MACHINE in nodes)
        return {FLEET, *(record.job_uid for record in whose)}

    def _changed_workers(self) -> set[str]:
        changed = set()
        for key, record in list(self._watched.items()):
            sign = self._sign(key, record)
            if self._signs.get(key) != sign and key in self._watched:
                self._signs[key] = sign
                changed.add(key.job_uid)
        return changed

    def _sign(self, key: WorkerKey, record: WorkerRecord) -> Sign:
        """Whatever differs between two polls is news; a mere step is not, but that there is none for long is."""
        if not processes.alive(self._state, record):
            return _GONE
        beats = self._heartbeats.read(key)
        return (ended(self._state, key), alarming(beats, self._heartbeats.now()), *map(change_key, beats))


_GONE: Sign = ("gone",)
