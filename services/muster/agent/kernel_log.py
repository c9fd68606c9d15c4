"""Xid errors from the kernel log. /dev/kmsg gives one record a read (`prio,seq,microseconds,flags;text`, see the
kernel's dev-kmsg document); a file or FIFO with such lines, or with bare texts, is read alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from muster.agent.source import LogOnChange
from muster.agent.xid import XidSource
from muster.words.notices import Notice

PAUSE_SECONDS, ABSENT_SECONDS = 0.25, 60.0
_RECORD_BYTES_MAX = 8192  # what the kernel gives in one read


class KernelLog:
    """Reader of the kernel log. Lines from before this process are counted but cause no action: they were handled,
    or the node's annotation still says so.
    """

    name = "xid"

    def __init__(self, path: Path, xids: XidSource) -> None:
        self.pause_seconds = PAUSE_SECONDS
        self._path, self._xids = path, xids
        self._file: int | None = None
        self._rest = b""
        self._began = time.monotonic()
        self._log = LogOnChange(self.name)

    def look(self) -> tuple[Notice, ...]:
        if self._file is None and not self._open():
            return self._xids.standing(time.time())
        for line in self._lines():
            stamp, text = record(line)
            age = max(0.0, time.monotonic() - stamp) if stamp is not None else 0.0
            # News is told by the clock that does not jump.
            self._xids.read(text, time.time() - age, is_news=stamp is None or stamp >= self._began - 1.0)
        return self._xids.standing(time.time())

    def acknowledge(self) -> None:
        self._xids.acknowledge()

    def _open(self) -> bool:
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            self._log.say(f"can't read {self._path}: {error.strerror}; Xid errors go unseen")
            self.pause_seconds = ABSENT_SECONDS
            return False
        self._log.fine(f"reads {self._path}")
        self.pause_seconds = PAUSE_SECONDS
        return True

    def _lines(self) -> Iterator[str]:
        """Yield all complete lines that are there now. A reader that was overtaken (EPIPE) continues with the oldest
        record."""
        assert self._file is not None
        while True:
            try:
                data = os.read(self._file, _RECORD_BYTES_MAX)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue
            except OSError as error:
                self._log.say(f"reading {self._path} failed: {error.strerror}")
                os.close(self._file)
                self._file = None
                return
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)


def record(line: str) -> tuple[float | None, str]:
    """Parse a record into its time, in seconds since boot (time.monotonic), and text; bare text has no time."""
    head, separator, text = line.partition(";")
    fields = head.split(",")
    if not separator or len(fields) < 3 or not fields[2].isdecimal():
        return None, line
    return int(fields[2]) / 1e6, text
