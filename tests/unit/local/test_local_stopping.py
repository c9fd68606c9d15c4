"""Told to stop while there is news, the operator stops all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from tests.polling import WAIT_SECONDS_MAX

from muster.operator import runner
from muster.operator.core.observed import ObservedJob
from muster.operator.runner import JobRunner
from muster.operator.world import World


class Newsy:
    """A world in which nothing is, and of which much is heard."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[str] = asyncio.Queue()

    async def watch(self) -> AsyncIterator[str]:
        while True:
            yield await self.news.get()

    async def jobs(self) -> tuple[str, ...]:
        return ()

    async def observe(self, uid: str, fresh: bool = False) -> ObservedJob | None:
        return None


class Patient(JobRunner):
    async def admission(self, ticks: float) -> Any:
        return 15.0


@pytest.mark.parametrize("moment", range(8))
async def test_news_and_the_end_at_the_same_moment(moment: int) -> None:
    world = Newsy()
    serving = asyncio.create_task(runner.serve(Patient(cast(World, world)), workers=8))
    for _ in range(50):
        await asyncio.sleep(0)
    world.news.put_nowait("some-job")
    for _ in range(moment):
        await asyncio.sleep(0)
    serving.cancel()
    done, _ = await asyncio.wait([serving], timeout=WAIT_SECONDS_MAX)
    assert done, "still serving"
    assert serving.cancelled()
