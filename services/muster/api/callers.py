"""Who asked a moment ago, so that a burst of requests by one token asks the database once.

An answer is used again for at most a second, and never after this process has changed a token, a person or a member:
what is taken away counts with the next request here, and within a second where several processes serve one database.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from sqlalchemy import event
from sqlalchemy.orm import ORMExecuteState, Session

from muster.api.tables import MemberRow, PersonRow, TokenRow

if TYPE_CHECKING:
    from muster.api.auth import Principal

KEPT_SECONDS = (
    1.0  # as often as an open stream looks; twice as long would double what a second process answers in error
)
_CALLERS_MAX = 10_000
_ROWS = (TokenRow, PersonRow, MemberRow)
_CHANGED = "muster_callers_changed"


class Callers:
    """Principals by the hash of their token."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[float, Principal]] = OrderedDict()
        self.changes = 0
        """How often somebody's rights may have changed."""

    def get(self, hash_: str, now: float | None = None) -> Principal | None:
        found = self._known.get(hash_)
        if found is None or (time.monotonic() if now is None else now) >= found[0]:
            return None
        return found[1]

    def keep(self, hash_: str, caller: Principal, changes: int, now: float | None = None) -> None:
        """Remember what was read while `changes` stood so; what was read before a change is not kept."""
        if changes != self.changes:
            return
        self._known[hash_] = ((time.monotonic() if now is None else now) + KEPT_SECONDS, caller)
        self._known.move_to_end(hash_)
        if len(self._known) > _CALLERS_MAX:
            self._known.popitem(last=False)

    def forget(self) -> None:
        self.changes += 1
        self._known.clear()

    def watch(self, sessions: type[Session]) -> None:
        """Forget everybody with each commit of a session of this class that may have changed somebody's rights."""

        def flushed(session: Session, _context: Any) -> None:
            if any(isinstance(row, _ROWS) for row in (*session.new, *session.dirty, *session.deleted)):
                session.info[_CHANGED] = True

        def executed(state: ORMExecuteState) -> None:
            if state.is_update or state.is_delete or state.is_insert:
                mapper = state.bind_mapper
                if mapper is not None and issubclass(mapper.class_, _ROWS):
                    state.session.info[_CHANGED] = True

        def committed(session: Session) -> None:
            if session.info.pop(_CHANGED, False):
                self.forget()

        event.listen(sessions, "after_flush", flushed)
        event.listen(sessions, "do_orm_execute", executed)
        event.listen(sessions, "after_commit", committed)
