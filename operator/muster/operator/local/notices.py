"""Notices of virtual nodes: files in the state folder, written by a node agent or a stand-in.

`python -m muster.agent announce local-1 spot` writes such a file; see docs/operations.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from muster.operator.core.observed import ObservedWorker, WorkerState
from muster.storage.small_files import read_regular
from muster.words.notices import MACHINE, NodeNotices, Notice, Remedy
from muster.words.signals import Signal
from muster.words.status import JobStatus, Phase

Stamp = tuple[int, int, int]
_LIVING = (Phase.STARTING, Phase.RUNNING, Phase.RESTARTING)


class NoticeFiles:
    """The notices about nodes in the files `<node>.json` of a folder.

    A file is read again only when it was replaced. One that makes no sense counts as empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, tuple[Stamp, tuple[Notice, ...]]] = {}

    def stamps(self) -> dict[str, Stamp]:
        """Return a stamp for each node that has notices, which changes when they do."""
        try:
            with os.scandir(self._folder) as entries:
                return {
                    entry.name.removesuffix(".json"): _stamp(entry.stat())
                    for entry in entries
                    if entry.name.endswith(".json") and not entry.name.startswith(".")
                }
        except OSError:
            return {}

    def of(self, node: str) -> tuple[Notice, ...]:
        """Return the node's own notices and those of its machine."""
        return (*self._notices_of(node), *self._notices_of(MACHINE))

    def _notices_of(self, node: str) -> tuple[Notice, ...]:
        path = self._folder / f"{node}.json"
        try:
            stamp = _stamp(path.stat())
            cached = self._read.get(node)
            if cached is None or cached[0] != stamp:
                cached = self._read[node] = (stamp, NodeNotices.model_validate_json(read_regular(path)).notices)
            return cached[1]
        except (OSError, ValidationError):
            return ()

    def unfit(self, nodes: Iterable[str]) -> frozenset[str]:
        """Return the nodes where no new worker should go."""
        return frozenset(node for node in nodes if any(notice.keeps_out for notice in self.of(node)))

    def signals(self, status: JobStatus, workers: Iterable[ObservedWorker]) -> tuple[Signal, ...]:
        """Return the notices that concern the current attempt."""
        if status.phase not in _LIVING:
            return ()
        return tuple(
            signal_of(notice, worker)
            for worker in workers
            if worker.id == status.current(worker.worker) and worker.state is not WorkerState.EXITED
            for notice in self.of(worker.node)
            if notice.concerns(worker.created_at)
        )


def signal_of(notice: Notice, worker: ObservedWorker) -> Signal:
    return Signal(
        kind=notice.kind,
        attempt=worker.attempt,
        at=notice.at,
        worker=worker.worker,
        incarnation=worker.incarnation,
        node=worker.node,
        message=f"node {worker.node}: {notice.message}",
        source=notice.source,
        in_place=notice.remedy is Remedy.RESTART,
    )


def _stamp(stat: os.stat_result) -> Stamp:
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)
