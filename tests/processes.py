"""Processes that a test reads, stops or ends, any of which may end by itself between being listed and being read.

psutil raises for a process that is gone, and for one that has ended and was not collected yet (a zombie). Here both are
simply no longer alive: they have no command line and no environment, and need no signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator

import psutil


def others() -> Iterator[psutil.Process]:
    """Every process on this machine that is alive, without this one."""
    return (process for process in psutil.process_iter() if process.pid != os.getpid() and is_alive(process))


def is_alive(process: psutil.Process) -> bool:
    """Return whether that very process still runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def command_of(process: psutil.Process) -> list[str]:
    """Return its command line, empty for one that has ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Return its environment, empty for one that has ended or is somebody else's."""
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send the signal to each that still is the process it was."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def kill(processes: Iterable[psutil.Process]) -> None:
    send(processes, signal.SIGKILL)
