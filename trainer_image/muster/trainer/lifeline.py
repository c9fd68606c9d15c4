"""Small facts about processes: when one started, and how to die with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

LAUNCHER = "MUSTER_LAUNCHER_PID"  # set by the launcher for its ranks
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Be killed when the launcher dies, however it dies (Linux: prctl(2), PR_SET_PDEATHSIG). Else do nothing."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def process_started_at() -> float:
    """When this process was started, seconds since the epoch: before the interpreter and its imports."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rsplit(b")", 1)[1].split()[19])
        with open("/proc/uptime") as file:
            uptime = float(file.read().split()[0])
    except OSError:
        return time.time()
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
