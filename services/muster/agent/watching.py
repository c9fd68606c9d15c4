"""The agent as threads: one per source, that looks and pauses; one for the Node object; one for the file."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from muster.agent import folder as folders
from muster.agent.board import NoticeBoard
from muster.agent.node import NodeObject
from muster.agent.source import LogOnChange, NoticeSource
from muster.kube.client import ApiClient
from muster.kube.connection import connect

HEARTBEAT_SECONDS = 300.0  # of the Node's conditions: each is a write to etcd, seen by all who watch nodes
RETRY_SECONDS, RETRY_SECONDS_MAX = 1.0, 60.0
STUCK_SECONDS = 60.0  # past its pause: a source that hangs in the driver
INHERITED = "before"


class SourcePoller:
    """Loop that polls all sources until told to stop."""

    def __init__(self, sources: Sequence[NoticeSource], board: NoticeBoard) -> None:
        self._sources, self._board = sources, board
        self._looked: dict[str, float] = {source.name: time.monotonic() for source in sources}
        self.stop = threading.Event()

    def start(self) -> None:
        for source in self._sources:
            threading.Thread(target=self._watch, args=(source,), name=source.name, daemon=True).start()

    def ages(self) -> dict[str, float]:
        now = time.monotonic()
        return {name: now - at for name, at in self._looked.items()}

    def stuck(self) -> str:
        """The sources that should have looked again long ago."""
        ages = self.ages()
        late = [s.name for s in self._sources if ages[s.name] > s.pause_seconds + STUCK_SECONDS]
        return f"{', '.join(late)} did not come back from looking" if late else ""

    def acknowledge(self) -> None:
        for source in self._sources:
            source.acknowledge()

    def _watch(self, source: NoticeSource) -> None:
        changes = LogOnChange(source.name)
        while not self.stop.is_set():
            try:
                self._board.put(source.name, source.look())
                changes.fine("looks again")
            except Exception as error:
                changes.say(f"{type(error).__name__}: {error}")
            self._looked[source.name] = time.monotonic()
            self.stop.wait(source.pause_seconds)


def keep_file(folder: Path, board: NoticeBoard, stop: threading.Event) -> None:
    """Keep the file up to date until `stop` is set. It exists while there are findings."""
    changes, version = LogOnChange("folder"), -1
    while not stop.is_set():
        seen = board.wait(version, 0.5)
        if seen == version:
            continue
        try:
            folders.write(folder, board.now())
            version = seen
            changes.fine("written")
        except OSError as error:
            changes.say(f"can't write to {folder}: {error.strerror}; trying on")
            stop.wait(RETRY_SECONDS)


def keep_node(
    service_account: Path, node: str, board: NoticeBoard, stop: threading.Event, acknowledge: Callable[[], None]
) -> None:
    """Run `publish_on_node` in a thread of its own, once there is a service account for it."""

    async def tell() -> None:
        async with ApiClient(connection, "muster-agent", at_once=1) as client:
            await publish_on_node(NodeObject(client, node, boot_id()), board, stop, acknowledge)

    changes = LogOnChange("kubernetes")
    while not stop.is_set():
        try:
            connection = connect(service_account=service_account)
        except OSError as error:
            changes.say(f"the API server is not known: {error}; trying on")
            stop.wait(RETRY_SECONDS_MAX)
        else:
            return asyncio.run(tell())


async def publish_on_node(
    node: NodeObject, board: NoticeBoard, stop: threading.Event, acknowledge: Callable[[], None]
) -> None:
    """Publish changes and a heartbeat until `stop` is set, and then that nobody watches any more."""
    changes, version, retry, begun, due = LogOnChange("kubernetes"), -1, RETRY_SECONDS, False, 0.0
    while not stop.is_set():
        try:
            if not begun:
                await node.begin()
                board.put(INHERITED, node.inherited)
                begun = True
            seen = await asyncio.to_thread(board.wait, version, min(1.0, max(0.0, due - time.monotonic())))
            if seen != version:
                await node.write(board.now())
                version, due = seen, time.monotonic() + HEARTBEAT_SECONDS
            elif time.monotonic() >= due:
                if await node.settled():
                    board.put(INHERITED, ())
                    acknowledge()
                await node.confirm(board.now())
                due = time.monotonic() + HEARTBEAT_SECONDS
            retry = RETRY_SECONDS
            changes.fine("the API server answers")
        except (OSError, ValueError, KeyError) as error:
            changes.say(f"the Node can't be written: {error}; trying on")
            await asyncio.to_thread(stop.wait, retry)
            retry = min(2 * retry, RETRY_SECONDS_MAX)
    try:
        await node.confirm(board.now(), ready=False)
    except OSError:
        pass  # the heartbeat's age says so too


def boot_id() -> str:
    """Return the boot id of the running kernel; empty if it gives none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def end_at_once(code: int) -> NoReturn:
    """End the process without the interpreter's shutdown, because a thread may hang in the driver for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
