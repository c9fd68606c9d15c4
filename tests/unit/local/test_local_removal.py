"""Removal: asked to go, then made to go, whole; and no pass waits for it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from tests.polling import WAIT_SECONDS_MAX

from muster.operator.local import processes, removal
from muster.operator.local.processes import WorkerKey, WorkerRecord
from muster.operator.local.removal import WorkerRemovals
from muster.words.state_folder import StateFolder

KEY = WorkerKey("uid-1", attempt=1, worker=0)
NEWER = WorkerKey("uid-1", attempt=2, worker=0)
POLITE = ("sh", "-c", "trap 'echo bye; kill $!; exit 0' TERM; sleep 600 & wait")
DEAF = ("sh", "-c", "trap '' TERM; setsid sleep 600 & sleep 600; sleep 600")
SOON, NEVER = 0.0, 600.0


class Gone(list[WorkerKey]):
    def __init__(self) -> None:
        super().__init__()
        self.news = asyncio.Event()

    def add(self, key: WorkerKey) -> None:
        self.append(key)
        self.news.set()


@pytest.fixture
async def state(tmp_path: Path) -> AsyncIterator[StateFolder]:
    state = StateFolder(tmp_path)
    yield state
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while left := [member.process for member in processes.scan(state)]:
        assert time.monotonic() < deadline
        processes.kill_all(left)
        await asyncio.sleep(0.02)
    processes.reap()


def start(state: StateFolder, key: WorkerKey, command: tuple[str, ...]) -> WorkerRecord:
    record = processes.start(state, key, "local-0", command, dict(os.environ) | processes.marks(state, key))
    assert record is not None
    return record


async def size_becomes(state: StateFolder, key: WorkerKey, size: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while len(processes.members(processes.scan(state), key)) != size:
        assert time.monotonic() < deadline, f"waited for {size} processes of {key}"
        await asyncio.sleep(0.02)


async def test_who_is_asked_may_finish_first(state: StateFolder) -> None:
    start(state, KEY, POLITE)
    await size_becomes(state, KEY, 2)
    gone = Gone()
    removals = WorkerRemovals(state, gone.add)
    removals.remove(KEY, NEVER)
    assert removals.under_way() == {KEY}
    await asyncio.wait_for(removals.finish(), WAIT_SECONDS_MAX)
    assert (KEY.folder(state) / "log").read_text() == "bye\n"
    assert gone == [KEY]
    assert removals.under_way() == frozenset()


async def test_who_is_deaf_is_killed_whole_when_the_grace_is_over(state: StateFolder) -> None:
    start(state, KEY, DEAF)
    await size_becomes(state, KEY, 3)
    gone = Gone()
    removals = WorkerRemovals(state, gone.add)
    before = time.monotonic()
    removals.remove(KEY, 0.3)
    await asyncio.wait_for(removals.finish(), WAIT_SECONDS_MAX)
    assert time.monotonic() - before >= 0.3
    assert processes.members(processes.scan(state), KEY) == []
    assert gone == [KEY]


async def test_asked_again_the_earlier_deadline_holds(state: StateFolder) -> None:
    start(state, KEY, DEAF)
    await size_becomes(state, KEY, 3)
    removals = WorkerRemovals(state, lambda key: None)
    removals.remove(KEY, NEVER)
    await asyncio.sleep(0)
    removals.remove(KEY, SOON)
    removals.remove(KEY, NEVER)
    await asyncio.wait_for(removals.finish(), WAIT_SECONDS_MAX)
    assert processes.members(processes.scan(state), KEY) == []


async def test_what_a_dead_launcher_leaves_behind_is_swept_and_others_are_not(state: StateFolder) -> None:
    record = start(state, KEY, DEAF)
    newer = start(state, NEWER, ("sleep", "600"))
    await size_becomes(state, KEY, 3)
    psutil.Process(record.pid).kill()
    await size_becomes(state, KEY, 2)
    removals = WorkerRemovals(state, lambda key: None)
    removals.remove(KEY, SOON)
    await asyncio.wait_for(removals.finish(), WAIT_SECONDS_MAX)
    assert processes.members(processes.scan(state), KEY) == []
    assert processes.alive(state, newer)


async def test_removing_what_is_not_there_is_done_at_once(state: StateFolder) -> None:
    gone = Gone()
    removals = WorkerRemovals(state, gone.add)
    removals.remove(KEY, NEVER)
    await asyncio.wait_for(removals.finish(), WAIT_SECONDS_MAX)
    assert gone == [KEY]


async def test_a_removal_abandoned_by_one_operator_is_finished_by_the_next(state: StateFolder) -> None:
    start(state, KEY, DEAF)
    await size_becomes(state, KEY, 3)
    first = WorkerRemovals(state, lambda key: None)
    first.remove(KEY, NEVER)
    await asyncio.sleep(0)
    first.abandon()
    await first.finish()
    await size_becomes(state, KEY, 3)
    second = WorkerRemovals(state, lambda key: None)
    second.remove(KEY, SOON)
    await asyncio.wait_for(second.finish(), WAIT_SECONDS_MAX)
    assert processes.members(processes.scan(state), KEY) == []


async def test_an_error_while_looking_is_tried_again(state: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    record = start(state, KEY, DEAF)
    await size_becomes(state, KEY, 3)
    answers = iter([OSError("too many open files"), None])

    def scan(state: StateFolder) -> tuple[processes.WorkerProcess, ...]:
        if error := next(answers, None):
            raise error
        return real(state)

    real = processes.scan
    monkeypatch.setattr(removal.processes, "scan", scan)
    gone = Gone()
    WorkerRemovals(state, gone.add).remove(KEY, SOON)
    await asyncio.wait_for(gone.news.wait(), WAIT_SECONDS_MAX)
    assert not processes.alive(state, record)
