"""One process at a time prepares a thing; the others wait, and see how far it is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

Report = Callable[[str], None]

WAIT_REPORT_SECONDS = 10.0


@contextlib.contextmanager
def locked(path: Path, source: str, report: Report) -> Iterator[Report]:
    """Hold the lock; yield a `report` whose last line those who wait for the lock can see too.

    The kernel takes the lock back when its holder dies, so a crash blocks nobody.
    """
    with open(path, "a+") as file:
        _wait_for(file.fileno(), path, source, report)

        def say(line: str) -> None:
            with contextlib.suppress(OSError):  # only news for others
                file.truncate(0)
                file.write(f"process {os.getpid()}: {line}")
                file.flush()
            report(line)

        yield say


def _wait_for(descriptor: int, path: Path, source: str, report: Report) -> None:
    reported_at = float("-inf")
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() - reported_at >= WAIT_REPORT_SECONDS:
                reported_at = time.monotonic()
                report(f"data: waiting for another process to prepare {source} ({path.read_text() or 'just begun'})")
            time.sleep(0.1)
