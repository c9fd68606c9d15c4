"""Threads for what lies in jobs' folders: storage that answers nobody holds up who asks for that folder, and no other.

All other work of the API shares the event loop's own few threads, which a dead file system would take one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from muster.storage.errors import StoreError
from muster.words.address import StorageAddress

T = TypeVar("T")

SECONDS_MAX = 15.0  # a client waits 20 for an answer
PER_FOLDER = 3  # so many threads at most hang in one folder, for as long as it hangs


class StorageSilent(StoreError):
    """A folder's storage did not answer in time."""


class FolderThreads:
    """One for an event loop."""

    def __init__(self) -> None:
        self._slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(
        self, folder: StorageAddress, work: Callable[..., T], *arguments: Any, seconds: float | None = None
    ) -> T:
        """Return or raise the result of `work`, called in a thread. Raises StorageSilent if that takes longer than
        `seconds` (SECONDS_MAX), including the time that earlier work on the folder takes; the thread then continues to
        its end."""
        slots = self._slots.setdefault(str(folder), asyncio.Semaphore(PER_FOLDER))
        allowed = SECONDS_MAX if seconds is None else seconds
        try:
            async with asyncio.timeout(allowed):
                await slots.acquire()
                return await asyncio.shield(_in_thread(functools.partial(work, *arguments), slots.release))
        except TimeoutError:
            raise StorageSilent(f"{folder}: its storage did not answer within {allowed:g} s; try again later") from None


def _in_thread(work: Callable[[], T], after: Callable[[], None]) -> asyncio.Future[T]:
    """A daemon, unlike those of a pool: what hangs does not keep the API from ending."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    done: asyncio.Future[T] = loop.create_future()
    done.add_done_callback(
        lambda future: future.cancelled() or future.exception()
    )  # nobody may be there any more to hear it

    def finish(tell: Callable[[Any], None], value: object) -> None:
        after()
        if not done.done():
            tell(value)

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            try:
                result = context.run(work)
            except BaseException as error:
                loop.call_soon_threadsafe(finish, done.set_exception, error)
            else:
                loop.call_soon_threadsafe(finish, done.set_result, result)

    threading.Thread(target=run, name="folder", daemon=True).start()
    return done
