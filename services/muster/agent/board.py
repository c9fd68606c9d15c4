"""Board of the findings of all sources. Reporters wait here for changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from muster.words.notices import NodeNotices, Notice


class NoticeBoard:
    """Board of the findings of all sources on one node. `boot_id` distinguishes one start of its kernel from the
    next."""

    def __init__(self, node: str, boot_id: str = "", clock: Callable[[], float] = time.time) -> None:
        self._node, self._boot_id, self._clock = node, boot_id, clock
        self._current_notices: dict[str, tuple[Notice, ...]] = {}
        self._version = 0
        self._changed = threading.Condition()
        self._now = NodeNotices(node=node, at=clock(), boot_id=boot_id)

    def put(self, source: str, notices: tuple[Notice, ...]) -> None:
        """Replace the findings of this source. A finding that recurs keeps the time at which it was first seen."""
        with self._changed:
            before = self._current_notices.get(source, ())
            first = {_key(notice): notice.at for notice in before}
            notices = tuple(
                notice.model_copy(update={"at": min(notice.at, first.get(_key(notice), notice.at))})
                for notice in notices
            )
            if notices == before:
                return
            self._current_notices[source] = notices
            self._version += 1
            everything = tuple(notice for group in self._current_notices.values() for notice in group)
            self._now = NodeNotices(node=self._node, at=self._clock(), boot_id=self._boot_id, notices=everything)
            self._changed.notify_all()

    def now(self) -> NodeNotices:
        return self._now

    def wait(self, version: int, seconds: float) -> int:
        """The board's version, once it differs from `version` or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, seconds)
            return self._version


def _key(notice: Notice) -> tuple[object, ...]:
    """Return the key by which two findings are equal. A lost process may recur, so its time is part of the key."""
    event = None if notice.keeps_out or notice.asks_to_leave else notice.at
    return (notice.kind, notice.remedy, notice.source, notice.device, event)
