"""Small facts about processes: when one started, what it is called, and with whom it dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

from muster.worker.names import LAUNCHER_ENV

LAUNCHER = LAUNCHER_ENV
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent() -> None:
    """Be killed when the launcher dies, however it dies (Linux: prctl(2), PR_SET_PDEATHSIG). Else do nothing."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def has_adopter() -> bool:
    """Return whether a launcher adopts the processes that a dead rank leaves running, and sees to their end."""
    return LAUNCHER in os.environ and sys.platform.startswith("linux")


def die_with_adopter(parent: int) -> None:
    """Outlive `parent`, which started us, if a launcher adopts us then, and die with that; else die with `parent`."""
    if not sys.platform.startswith("linux"):
        return
    kept_by = (parent, int(os.environ.get(LAUNCHER, parent)))

    def orphaned(*_: object) -> None:  # also told when only the parent's main thread is gone, and the rest is going
        if os.getppid() not in kept_by:
            os._exit(1)

    signal.signal(signal.SIGUSR1, orphaned)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    orphaned()  # it may have died before the line above


def name_process(name: str) -> None:
    """Set the name of this process in `ps` and `top`, 15 characters (Linux: PR_SET_NAME)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def process_started_at() -> float:
    """Return the time at which this process was started, seconds since the epoch: before the interpreter and its
    imports."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rsplit(b")", 1)[1].split()[19])
        with open("/proc/uptime") as file:
            uptime = float(file.read().split()[0])
    except OSError:
        return time.time()
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
