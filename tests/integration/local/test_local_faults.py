"""The real runner over the real local world while the disk is full, the database is locked and the clock jumps."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.integration.local.house import FAKE, House
from tests.polling import WAIT_SECONDS_MAX

from muster.local.cluster import LocalCluster
from muster.operator.core import shutdown
from muster.operator.core.codes import Code
from muster.operator.local import processes
from muster.operator.local.nodes import VirtualNodes
from muster.operator.local.world import LocalWorld
from muster.operator.runner import JobRunner, RunnerListener, serve
from muster.recipe.document import JobSpec
from muster.words.status import JobStatus, Phase

STEPS = 40


class Errors(RunnerListener):
    def __init__(self) -> None:
        self.seen: list[Exception] = []

    def failed(self, key: str, error: Exception, retry_seconds: float) -> None:
        self.seen.append(error)


@asynccontextmanager
async def operator(house: House, clock: Callable[[], float] = time.time) -> AsyncIterator[Errors]:
    """In this process, so that the test can break things under it."""
    errors = Errors()
    world = LocalWorld(house.state.root, VirtualNodes(4), FAKE, JobSpec, clock=clock, on_error=errors.seen.append)
    await world.adopt()
    serving = asyncio.create_task(serve(JobRunner(world, errors)))
    try:
        yield errors
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        world.close()


async def until(question: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS_MAX) -> None:
    deadline = time.monotonic() + seconds
    while not question():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        await asyncio.sleep(0.02)


async def finishes(house: House, uid: str) -> JobStatus:
    await until(lambda: house.status(uid).phase.terminal, "the job to end")
    status = house.status(uid)
    assert status.phase == Phase.SUCCEEDED, status.because
    assert house.never_two(uid)
    await until(lambda: not processes.scan(house.state), "the last process to be gone")
    return status


async def test_a_full_disk_holds_the_job_up_and_loses_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def no_room_for_rows(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async with operator(house) as errors:
        uid = house.submit(steps=STEPS, env={"FAKE_HOLD_AT": "12"})
        await until(lambda: house.newest_step(uid) == 12, "some steps")
        for module in ("processes", "reading", "nodes"):
            monkeypatch.setattr(f"muster.operator.local.{module}.write_whole", no_room)
        monkeypatch.setattr(Path, "touch", no_room)
        monkeypatch.setattr(LocalCluster, "write_status", no_room_for_rows)
        processes.kill_all(house.trees(uid)[1, 0])
        await until(lambda: len(errors.seen) >= 3, "the operator to stumble")
        assert house.status(uid).attempt == 1
        assert {type(error) for error in errors.seen} == {sqlite3.OperationalError}
        monkeypatch.setattr(LocalCluster, "write_status", WRITE_STATUS)
        await until(lambda: any(isinstance(error, OSError) for error in errors.seen), "it to fail to start workers")
        status = house.status(uid)
        assert (status.attempt, status.phase) == (2, Phase.STARTING)
        assert not processes.scan(house.state), "no worker that nobody could write down"
        monkeypatch.undo()
        status = await finishes(house, uid)
    assert (status.attempt, status.attempts[1].resume_step >= 10) == (2, True)


WRITE_STATUS = LocalCluster.write_status


async def test_a_locked_database_is_waited_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    # A connection waits for half a minute; it is made once, and waits as long as it was told then.
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: CONNECT(*a, **{**k, "timeout": 0.5}))
    async with operator(house) as errors:
        uid = house.submit(steps=STEPS, env={"FAKE_HOLD_AT": "3"})
        await until(lambda: house.newest_step(uid) == 3, "some steps")
        other = CONNECT(house.state.cluster, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        house.goes_on(uid)
        await until(lambda: not house.trees(uid), "the gang to finish meanwhile")
        await until(lambda: errors.seen, "the operator to stumble")
        assert {str(error) for error in errors.seen} == {"database is locked"}
        other.execute("ROLLBACK")
        other.close()
        assert (await finishes(house, uid)).attempt == 1


CONNECT = sqlite3.connect


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0], ids=["forwards", "backwards"])
async def test_a_clock_that_jumps_ends_no_attempt(house: House, jump: float) -> None:
    offset = 0.0
    async with operator(house, clock=lambda: time.time() + offset) as errors:
        uid = house.submit(steps=STEPS, env={"FAKE_HOLD_AT": "15"})
        await until(lambda: house.newest_step(uid) >= 5, "some steps")
        offset = jump
        await until(lambda: house.newest_step(uid) == 15, "more steps")
        await until(lambda: house.status(uid).phase == Phase.RUNNING, "the operator to have looked")
        processes.kill_all(house.trees(uid)[1, 1])
        await until(lambda: house.status(uid).attempt == 2, "the next attempt")
        offset = 0.0
        status = await finishes(house, uid)
    assert (status.attempt, status.restarts.by_cause) == (2, {"infrastructure": 1})
    assert errors.seen == []


async def test_a_folder_that_was_moved_away_and_back_is_no_death(house: House) -> None:
    """Only a scan of all processes makes absence true, so no second gang is made beside the first."""
    async with operator(house):
        uid = house.submit(steps=10_000)
        await until(lambda: house.newest_step(uid) >= 5, "some steps")
        attempt = house.state.attempt(uid, 1)
        gang = {process.pid for tree in house.trees(uid).values() for process in tree}
        os.rename(attempt, attempt.with_name("hidden"))
        os.mkdir(attempt)
        for worker in (0, 1):
            os.mkdir(house.state.worker(uid, 1, worker))
        await until(lambda: house.newest_step(uid) >= 15, "more steps")
        assert {process.pid for tree in house.trees(uid).values() for process in tree} == gang
        assert house.status(uid).attempt == 1
        house.set_spec(uid, cancel=True)
        await until(lambda: house.status(uid).phase == Phase.CANCELLED, "the job to be cancelled")
        await until(lambda: not processes.scan(house.state), "the last process to be gone")


async def test_what_is_no_commit_keeps_nobody_from_resuming_nor_from_cancelling(house: House) -> None:
    """A COMMIT nested 200,000 deep ended every pass; a FIFO in its place would hold up the operator for good."""
    async with operator(house) as errors:
        uid = house.submit(steps=10_000, env={"FAKE_HOLD_AT": "12"})
        await until(lambda: house.newest_step(uid) == 12, "some steps")
        commits = house.job_folder(uid) / "commits"
        (commits / "step-00000100.json").write_bytes(b"[" * 200_000)
        os.mkfifo(commits / "step-00000200.json")
        (commits / "step-00000300.json").symlink_to("/dev/zero")
        processes.kill_all(house.trees(uid)[1, 0])
        await until(lambda: house.status(uid).attempt == 2, "the next attempt")
        assert house.status(uid).resume_step == 10, "the newest sound commit"
        house.goes_on(uid)
        await until(lambda: house.status(uid).phase == Phase.RUNNING, "the job to go on")
        house.set_spec(uid, cancel=True)
        await until(lambda: house.status(uid).phase == Phase.CANCELLED, "the job to be cancelled")
        await until(lambda: not processes.scan(house.state), "the last process to be gone")
    assert errors.seen == []


async def test_a_checkpoint_folder_that_is_away_is_waited_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its job remembers a commit, so an empty place is no reason to begin anew."""
    monkeypatch.setattr(shutdown, "AWAIT_COMMITS_SECONDS", 0.2)
    async with operator(house) as errors:
        uid = house.submit(steps=STEPS, env={"FAKE_HOLD_AT": "12"})
        await until(lambda: house.newest_step(uid) == 12, "some steps")
        await until(lambda: house.status(uid).checkpoint is not None, "the checkpoint to be remembered")
        house.set_spec(uid, suspend=True)
        await until(lambda: house.status(uid).phase == Phase.SUSPENDED, "the job to be suspended")
        kept = house.status(uid).checkpoint
        assert kept is not None
        away = house.state.root / "away"
        os.rename(house.job_folder(uid), away)
        house.set_spec(uid, suspend=False)
        await until(lambda: house.status(uid).code == Code.AWAITING_COMMITS, "the job to wait for its checkpoints")
        status = house.status(uid)
        assert (status.phase, status.attempt, status.checkpoint) == (Phase.QUEUED, 1, kept)
        assert f"checkpoint of step {kept.step} was saved" in status.because
        assert not processes.scan(house.state), "nobody began anew"
        os.rename(away, house.job_folder(uid))
        status = await finishes(house, uid)
        assert (status.attempt, status.resume_step) == (2, kept.step), "as soon as its pause is over"
    assert errors.seen == []
