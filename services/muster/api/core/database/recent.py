"""Cache of what was read a moment ago, so that a burst of requests queries the database once for its caller and its
project.

A cached answer is used for at most a second, and never after this process has changed a row that it came from: a
revoked right takes effect with the next request here, and within a second where several processes serve one database.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar

from sqlalchemy import event
from sqlalchemy.orm import ORMExecuteState, Session

from muster.api.core.database.tables import Table

KEPT_SECONDS = (
    1.0  # as often as an open stream looks; twice as long would double what a second process answers in error
)
_KEPT_MAX = 10_000

T = TypeVar("T")


class RecentAnswers(Generic[T]):
    """Answers by their questions, made of rows of these tables."""

    def __init__(self, *tables: type[Table]) -> None:
        self._tables = tables
        self._entries: OrderedDict[Hashable, tuple[float, T]] = OrderedDict()
        self._looks: dict[tuple[Hashable, int], asyncio.Task[T | None]] = {}
        self.changes = 0
        """Number of times that a row may have changed."""

    def get(self, question: Hashable, now: float | None = None) -> T | None:
        entry = self._entries.get(question)
        if entry is None or (time.monotonic() if now is None else now) >= entry[0]:
            return None
        return entry[1]

    async def ask(self, question: Hashable, look: Callable[[], Awaitable[T | None]]) -> T | None:
        """The answer that is kept, or what `look` finds; None is not kept. Whoever asks meanwhile waits for the same
        look, unless a row has changed since it began: a thousand streams of one reader ask the database once."""
        if (answer := self.get(question)) is not None:
            return answer
        asked = (question, self.changes)
        if (task := self._looks.get(asked)) is None:
            self._looks[asked] = task = asyncio.ensure_future(self._look(question, look))

            def forget(ended: asyncio.Task[T | None]) -> None:
                self._looks.pop(asked, None)
                if not ended.cancelled():
                    ended.exception()  # taken note of, also where everybody has gone who waited

            task.add_done_callback(forget)
        return await asyncio.shield(task)

    async def _look(self, question: Hashable, look: Callable[[], Awaitable[T | None]]) -> T | None:
        changes = self.changes
        answer = await look()
        if answer is not None:
            self.keep(question, answer, changes)
        return answer

    def keep(self, question: Hashable, answer: T, changes: int, now: float | None = None) -> None:
        """Remember what was read while `changes` stood so; what was read before a change is not kept."""
        if changes != self.changes:
            return
        self._entries[question] = ((time.monotonic() if now is None else now) + KEPT_SECONDS, answer)
        self._entries.move_to_end(question)
        if len(self._entries) > _KEPT_MAX:
            self._entries.popitem(last=False)

    def forget(self) -> None:
        self.changes += 1
        self._entries.clear()

    def watch(self, sessions: type[Session]) -> None:
        """Forget everything with each commit of a session of this class that may have changed a row."""

        def flushed(session: Session, _context: Any) -> None:
            if any(isinstance(row, self._tables) for row in (*session.new, *session.dirty, *session.deleted)):
                session.info[self] = True

        def executed(state: ORMExecuteState) -> None:
            if state.is_update or state.is_delete or state.is_insert:
                mapper = state.bind_mapper
                if mapper is not None and issubclass(mapper.class_, self._tables):
                    state.session.info[self] = True

        def committed(session: Session) -> None:
            if session.info.pop(self, False):
                self.forget()

        event.listen(sessions, "after_flush", flushed)
        event.listen(sessions, "do_orm_execute", executed)
        event.listen(sessions, "after_commit", committed)
