"""Protocol of a source: each time it is polled, it returns all its current findings."""

from __future__ import annotations

import logging
from typing import Protocol

from muster.words.notices import Notice

log = logging.getLogger("muster.agent")


class NoticeSource(Protocol):
    name: str
    pause_seconds: float
    """Time until the next read; a source may change it, so that what is absent is not polled every second."""

    def look(self) -> tuple[Notice, ...]:
        """Return all current findings; one that is no longer returned has ended. May block for a few seconds. An
        exception is reported once, and nothing is known until the next read."""

    def acknowledge(self) -> None:
        """A person says that what was found is settled: forget what only memory holds."""


class LogOnChange:
    """Logger that says a thing once, until it changes: a missing driver is worth one line, not one a second."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._said = ""

    def say(self, what: str, level: int = logging.WARNING) -> None:
        if what != self._said:
            self._said = what
            log.log(level, "%s: %s", self._name, what)

    def fine(self, what: str) -> None:
        """The trouble is over; silent if there was none."""
        if self._said:
            self.say(what, logging.INFO)
            self._said = ""
