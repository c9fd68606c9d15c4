"""The few workers that are kept: one a model, each for a while after its last answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from muster.api.core.errors import ApiError
from muster.api.openai.chat.worker import ModelPlace, ModelWorker

IDLE_SECONDS: Final = 300.0  # what is tried out is asked again within minutes, and a model's memory is somebody else's
REAP_SECONDS: Final = 15.0  # between looks for idle ones
WAITING_MAX: Final = 32  # of one model: evaluation harnesses ask many at once, and each waits for those before it

Start = Callable[[ModelPlace], Awaitable[ModelWorker]]


class WorkerPool:
    """Pool of at most `workers_max` workers; with 0 nothing is answered. The worker that was idle longest makes room
    for another model."""

    def __init__(self, workers_max: int, start: Start = ModelWorker.start) -> None:
        self.workers_max = workers_max
        self._start = start
        self._workers: dict[ModelPlace, ModelWorker] = {}
        self._making = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self, place: ModelPlace) -> AsyncIterator[ModelWorker]:
        """A worker that has loaded this model and answers nobody else meanwhile.

        Raises ApiError model_busy where too many wait for it, or where every worker is busy with other models;
        model_unavailable.
        """
        worker = self._workers.get(place)
        if worker is not None and worker.waiting >= WAITING_MAX:
            detail = f"{WAITING_MAX} requests wait for this model, which answers one at a time. Ask again in a moment."
            raise ApiError("model_busy", detail, headers={"Retry-After": "5"})
        worker = await self._made(place)
        worker.waiting += 1
        try:
            async with worker.turn:
                yield worker
        finally:
            worker.waiting -= 1

    async def reap(self) -> bool:
        """End what has been idle for long, and forget what has ended. A round of background work."""
        now = asyncio.get_running_loop().time()
        for place, worker in list(self._workers.items()):
            if not worker.waiting and (not worker.alive or now - worker.used_at > IDLE_SECONDS):
                await self._end(place)
        return False

    async def close(self) -> None:
        for place in list(self._workers):
            await self._end(place)

    async def _made(self, place: ModelPlace) -> ModelWorker:
        async with self._making:  # one model is loaded at a time
            worker = self._workers.get(place)
            if worker is not None and worker.alive:
                return worker
            if worker is not None:
                await self._end(place)
            await self._make_room()
            self._workers[place] = worker = await self._start(place)
            return worker

    async def _make_room(self) -> None:
        while len(self._workers) >= self.workers_max:
            idle = [worker for worker in self._workers.values() if not worker.waiting]
            if not idle:
                detail = (
                    f"This server holds {self.workers_max} model(s) to be tried out, and all of them are answering. "
                    "Ask again in a moment, or serve the model's export (`muster serve` prints how)."
                )
                raise ApiError("model_busy", detail, headers={"Retry-After": "5"})
            await self._end(min(idle, key=lambda worker: worker.used_at).place)

    async def _end(self, place: ModelPlace) -> None:
        if (worker := self._workers.pop(place, None)) is not None:
            await worker.end()
