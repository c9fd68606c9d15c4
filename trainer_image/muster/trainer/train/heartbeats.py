"""The thread that writes a rank's heartbeat file and hears its signals.

Signals arrive in a pipe at once (`signal.set_wakeup_fd`), even while the main thread sits in a collective.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from muster.storage.small_files import write_whole
from muster.words.base import dump_json
from muster.words.signals import Heartbeat

# The file is rewritten at least this often, and at most so often however quick the steps are. A step does not wake the
# thread (it would take the interpreter from the training just then); the thread looks by itself.
SECONDS_BETWEEN_BEATS_MAX = 0.9
SECONDS_BETWEEN_BEATS_MIN = 0.1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class HeartbeatThread:
    """Writes what `heartbeat` makes to the file at `path`, and calls `on_stop` for each signal to stop."""

    def __init__(self, path: Path, heartbeat: Callable[[], Heartbeat], on_stop: Callable[[], None]) -> None:
        self.news = True  # something that the next heartbeat should carry soon
        self._path, self._heartbeat, self._on_stop = path, heartbeat, on_stop
        self._before_beat: Callable[[], None] | None = None
        self._writing = threading.Lock()
        self._inbox, self._outbox = os.pipe()
        os.set_blocking(self._outbox, False)

    def start(self) -> None:
        """Take over SIGTERM and SIGINT and start the thread. Main thread only, once."""
        signal.set_wakeup_fd(self._outbox, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, _ignore)  # the thread hears of it through the pipe
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def before_each_beat(self, action: Callable[[], None] | None) -> None:
        """Have the thread do this too, before it writes a heartbeat."""
        self._before_beat = action

    def wake(self) -> None:
        """Write a heartbeat without waiting for the usual time."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._outbox, b"\0")

    def beat(self) -> None:
        """Rewrite the heartbeat file now."""
        with self._writing:
            write_whole(self._path, dump_json(self._heartbeat()))

    def _watch(self) -> None:
        written = 0.0
        while True:
            ready, _, _ = select.select([self._inbox], [], [], SECONDS_BETWEEN_BEATS_MIN)
            received = os.read(self._inbox, 4096) if ready else b""
            if any(number in received for number in STOP_SIGNALS):
                self._on_stop()
            if not (ready or self.news or time.monotonic() - written >= SECONDS_BETWEEN_BEATS_MAX):
                continue
            self.news = False
            written = time.monotonic()
            with contextlib.suppress(OSError):  # a full disk must not end training; the missing beat is seen outside
                if self._before_beat is not None:
                    self._before_beat()
                self.beat()


def _ignore(number: int, frame: object) -> None:
    """The signal was written to the pipe by C code already; this only replaces the default action."""
