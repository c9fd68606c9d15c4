"""The fence of a job on one machine: a file of its own, which never lets two attempts pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.local.test_local_world import House

from muster.local.cluster import VersionConflict
from muster.operator.core.decision import RemoveJob
from muster.operator.local.fences import FenceFiles
from muster.words.status import Attempt, GangStatus, JobStatus, Phase
from muster.worker.fence import CurrentGang, FenceUnreachable, StaleAttempt, confirm, current_gang


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def fence(house: House) -> str:
    return FenceFiles(house.world.state, house.world.cluster).address(house.uid)


async def write(house: House, version: str | None = None, **changes: Any) -> None:
    """As the operator does."""
    job = house.job
    status = job.status.model_copy(update=changes)
    await house.world.write_status(house.uid, status, version or job.metadata.resource_version)


async def test_only_the_attempt_that_lives_by_the_status_passes(house: House) -> None:
    with pytest.raises(FenceUnreachable):
        confirm(fence(house), house.uid, 1, 0, 1)
    await write(house, attempt=7)
    confirm(fence(house), house.uid, 7, 0, 1)
    for stale in (6, 8):
        with pytest.raises(StaleAttempt, match="attempt 7 is"):
            confirm(fence(house), house.uid, stale, 0, 1)
    over = Attempt(number=7, created_at=1.0, ended_at=2.0)
    await write(house, attempts=(over,), phase=Phase.SUSPENDED)
    with pytest.raises(StaleAttempt, match="none is: it has ended"):
        confirm(fence(house), house.uid, 7, 0, 1)
    await write(house, attempt=8, phase=Phase.STARTING)
    confirm(fence(house), house.uid, 8, 0, 1)
    with pytest.raises(StaleAttempt, match="attempt 8 is"):
        confirm(fence(house), house.uid, 7, 0, 1)
    await house.world.apply(house.uid, RemoveJob())
    with pytest.raises(StaleAttempt, match="no longer exists"):
        confirm(fence(house), house.uid, 8, 0, 1)


async def test_only_the_current_life_of_a_worker_passes(house: House) -> None:
    await write(house, attempt=7, gang=GangStatus(wanted=3, incarnations=(1, 2)))
    for worker, incarnation in ((0, 1), (1, 2), (2, 1)):  # one that is not listed has its first
        confirm(fence(house), house.uid, 7, worker, incarnation)
    for worker, stale in ((1, 1), (1, 3), (2, 2)):
        with pytest.raises(
            StaleAttempt, match=f"incarnation {stale} of worker {worker} in attempt 7 .* is not current"
        ):
            confirm(fence(house), house.uid, 7, worker, stale)
    with pytest.raises(StaleAttempt, match="attempt 7 is"):
        confirm(fence(house), house.uid, 6, 1, 2)
    await write(house, attempt=8, gang=GangStatus(wanted=3))
    confirm(fence(house), house.uid, 8, 1, 1)


def test_a_fence_that_an_earlier_release_wrote_knows_first_lives_alone(tmp_path: Path) -> None:
    (tmp_path / "fence.json").write_text('{"metadata": {"uid": "u"}, "status": {"attempt": 3, "attempts": []}}')
    confirm(f"file://{tmp_path}/fence.json", "u", 3, 1, 1)
    with pytest.raises(StaleAttempt, match="incarnation 1 is"):
        confirm(f"file://{tmp_path}/fence.json", "u", 3, 1, 2)
    (tmp_path / "fence.json").write_text('{"status": {"attempt": 3, "gang": {"incarnations": [1, null]}}}')
    with pytest.raises(FenceUnreachable):
        confirm(f"file://{tmp_path}/fence.json", "u", 3, 1, 1)


async def test_the_fence_is_there_before_a_worker_is_and_again_after_the_operators_death(house: House) -> None:
    """An operator that dies between fence and status leaves a fence that is too narrow: the next one mends it."""
    await house.create(0)
    confirm(fence(house), house.uid, 1, 0, 1)
    try:
        assert house.environment()["MUSTER_FENCE"] == fence(house)
        FenceFiles(house.world.state, house.world.cluster).tell(house.uid, JobStatus(attempt=2))
        assert current_gang(fence(house), house.uid) == CurrentGang(2)
        await house.world.adopt()
        confirm(fence(house), house.uid, 1, 0, 1)
    finally:
        await house.world.stop_workers(0.0)


async def test_a_status_that_could_not_be_written_moves_no_fence(house: House) -> None:
    await write(house, attempt=1)
    with pytest.raises(VersionConflict):
        await write(house, version="1", attempt=2)
    confirm(fence(house), house.uid, 1, 0, 1)


async def test_a_job_that_never_ran_needs_none(house: House) -> None:
    house.set_attempt(0)
    await write(house, phase=Phase.QUEUED)
    await house.world.apply(house.uid, RemoveJob())
    assert not list(house.world.state.root.glob("jobs/*"))


def test_a_fence_that_can_not_be_read_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "fence.json").write_text("{")
    for address in (f"file://{tmp_path}/absent.json", f"file://{tmp_path}/fence.json", "http://127.0.0.1:9/none"):
        with pytest.raises(FenceUnreachable):
            current_gang(address, "u")
