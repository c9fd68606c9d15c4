"""Operations as steps without IO, so that each is written once for threads and for asyncio.

Steps are a generator: it yields `FoundResult` for a value that whoever iterates is to have, `PauseStep` for time to
pass, and anything else, such as `RequestStep`, to be answered by whoever carries the steps out; it returns their
result. The functions below carry them out, with threads or with asyncio.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[Any, Any, T]


@dataclass(frozen=True)
class RequestStep:
    """A request, answered by the answer's JSON. `path` is relative to /api/v1, or begins with a slash.
    Where it may not be made twice (`repeat` False), a lost answer is an error; with an idempotency `key` it always may.
    """

    method: str
    path: str
    params: dict[str, Any] = field(default_factory=dict)
    body: Any = None
    key: str | None = None
    repeat: bool = True


@dataclass(frozen=True)
class PauseStep:
    seconds: float


@dataclass(frozen=True)
class FoundResult:
    value: Any


@dataclass(frozen=True)
class _StepsEnded:
    result: Any


def _next(steps: Steps[Any], answer: Any, error: Exception | None) -> Any:
    try:
        return steps.throw(error) if error is not None else steps.send(answer)
    except StopIteration as end:
        return _StepsEnded(end.value)


def walk(steps: Steps[T], answer_to: Callable[[Any], Any]) -> Generator[Any, None, T]:
    """Yield what the steps find, one by one; the generator returns their result."""
    answer: Any = None
    error: Exception | None = None
    while not isinstance(step := _next(steps, answer, error), _StepsEnded):
        answer = error = None
        if isinstance(step, FoundResult):
            yield step.value
        elif isinstance(step, PauseStep):
            time.sleep(step.seconds)
        else:
            try:
                answer = answer_to(step)
            except Exception as raised:  # the steps may know what to do about it
                error = raised
    result: T = step.result
    return result


def run(steps: Steps[T], answer_to: Callable[[Any], Any]) -> T:
    """The steps' result. What they find is nobody's."""
    walking = walk(steps, answer_to)
    while True:
        try:
            next(walking)
        except StopIteration as end:
            result: T = end.value
            return result


async def walk_async(
    steps: Steps[T], answer_to: Callable[[Any], Awaitable[Any]], ended: list[T] | None = None
) -> AsyncGenerator[Any, None]:
    """Do as `walk`, for asyncio. The result is appended to `ended`, because an asynchronous generator returns
    nothing."""
    answer: Any = None
    error: Exception | None = None
    while not isinstance(step := _next(steps, answer, error), _StepsEnded):
        answer = error = None
        if isinstance(step, FoundResult):
            yield step.value
        elif isinstance(step, PauseStep):
            await asyncio.sleep(step.seconds)
        else:
            try:
                answer = await answer_to(step)
            except Exception as raised:
                error = raised
    if ended is not None:
        ended.append(step.result)


async def run_async(steps: Steps[T], answer_to: Callable[[Any], Awaitable[Any]]) -> T:
    """Do as `run`, for asyncio."""
    ended: list[T] = []
    async for _ in walk_async(steps, answer_to, ended):
        pass
    return ended[0]
