"""Ends a worker that is asked to stop while nothing is lost by that: it still imports, or waits for its peers.

A pod's first process is PID 1 of its container, and the kernel drops signals to PID 1 that have no handler. Without one
a worker that still imports is waited for until its whole grace is over, and so is the namespace or node that it is on.
So this is the first thing that runs, and it needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# As in muster.words.names, which can't be imported here: it may be what is being imported when the signal comes.
PREEMPTED_NO_COMMIT = 86
WORKER_DIR, TERMINATION_LOG, EXIT_RECORD = "MUSTER_WORKER_DIR", "MUSTER_TERMINATION_LOG", "exit.json"
MESSAGE = "asked to stop before the ranks were started"


def end_on_signals() -> None:
    """Make this process end at once, from now on, when it is asked to stop."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: end_now())


def end_now() -> None:
    """Leave the exit record where the operator looks for it, and end this process, whatever it is doing."""
    record = json.dumps({"exitCode": PREEMPTED_NO_COMMIT, "at": time.time(), "message": MESSAGE})
    with contextlib.suppress(OSError):
        _write(os.path.join(os.environ.get(WORKER_DIR) or ".", EXIT_RECORD), record)
    if log := os.environ.get(TERMINATION_LOG):
        with contextlib.suppress(OSError), open(log, "w") as file:
            file.write(record)
    with contextlib.suppress(OSError):
        os.write(2, f"worker ends with exit code {PREEMPTED_NO_COMMIT}: {MESSAGE}\n".encode())
    os._exit(PREEMPTED_NO_COMMIT)


def _write(path: str, text: str) -> None:
    """Whole or not at all, and never through a link."""
    beside = f"{path}.{os.getpid()}"
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
    os.replace(beside, path)
