"""How many models are held, who waits, and who makes room; with workers that answer at once."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from muster.api.core.errors import ApiError
from muster.api.openai.chat import pool as pools
from muster.api.openai.chat.pool import WorkerPool
from muster.api.openai.chat.worker import ModelPlace, ModelWorker


class Fake:
    """A worker without a process."""

    def __init__(self, place: ModelPlace) -> None:
        self.place, self.turn = place, asyncio.Lock()
        self.waiting, self.used_at, self.alive = 0, asyncio.get_running_loop().time(), True

    async def end(self) -> None:
        self.alive = False


def place(name: str) -> ModelPlace:
    return ModelPlace(f"file:///{name}", "10")


def pool(workers_max: int = 1) -> tuple[WorkerPool, list[Any]]:
    started: list[Any] = []

    async def start(where: ModelPlace) -> ModelWorker:
        started.append(Fake(where))
        return cast(ModelWorker, started[-1])

    return WorkerPool(workers_max, start), started


async def test_a_model_is_kept_until_another_needs_its_place() -> None:
    workers, started = pool()
    for name in ("a", "a", "b"):
        async with workers.turn(place(name)):
            pass
    assert [(fake.place.address, fake.alive) for fake in started] == [("file:///a", False), ("file:///b", True)]


async def test_one_answers_at_a_time_and_a_busy_model_is_not_put_out() -> None:
    workers, started = pool()
    order: list[str] = []

    async def ask(name: str) -> None:
        async with workers.turn(place("a")):
            order.append(f"{name} begins")
            await asyncio.sleep(0)
            order.append(f"{name} ends")

    async with workers.turn(place("a")):
        with pytest.raises(ApiError, match="all of them are answering") as busy:
            async with workers.turn(place("b")):
                pass
        assert (busy.value.code, busy.value.headers["Retry-After"]) == ("model_busy", "5")
        asked = [asyncio.create_task(ask(name)) for name in ("one", "two")]
        await asyncio.sleep(0)
        assert order == []
    await asyncio.gather(*asked)
    assert order == ["one begins", "one ends", "two begins", "two ends"]
    assert len(started) == 1


async def test_no_more_wait_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "WAITING_MAX", 1)
    workers, _ = pool()
    async with workers.turn(place("a")):
        with pytest.raises(ApiError, match="answers one at a time"):
            async with workers.turn(place("a")):
                pass


async def test_what_is_idle_or_has_ended_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, started = pool(2)
    for name in ("a", "b"):
        async with workers.turn(place(name)):
            pass
    started[0].alive = False
    await workers.reap()
    async with workers.turn(place("a")):  # a new one
        await workers.reap()
    assert len(started) == 3
    monkeypatch.setattr(pools, "IDLE_SECONDS", -1.0)
    async with workers.turn(place("a")):
        await workers.reap()
        assert (started[1].alive, started[2].alive) == (False, True)
    await workers.close()
    assert not any(fake.alive for fake in started)
