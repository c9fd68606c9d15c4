"""Processes below the launcher: those that it started, and those that they leave running."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IS_LINUX = sys.platform.startswith("linux")


def adopt_orphans() -> None:
    """Become the parent of what our children leave running when they die (Linux: PR_SET_CHILD_SUBREAPER)."""
    if _IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_this_process() -> Callable[[], None]:
    """Return a function for a new process to call before it runs a program: it is then killed when this process dies,
    however it dies (Linux: PR_SET_PDEATHSIG). To be used from the main thread, whose end counts."""
    if not _IS_LINUX:
        return lambda: None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()  # looked up here: the new process should call C alone

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it died before we asked
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


def children_of(pids: Iterable[int]) -> set[int]:
    """Return these processes' descendants. Empty where Linux's /proc is not."""
    parents: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdecimal():
                parents.setdefault(_parent(name), []).append(int(name))
    below: set[int] = set()
    waiting = list(pids)
    while waiting:
        for child in parents.get(waiting.pop(), ()):
            if child not in below:
                below.add(child)
                waiting.append(child)
    return below


def kill_all_but(kept: Iterable[int]) -> int:
    """Kill all descendants of this process but `kept` and theirs. All are stopped first, so that none starts another
    while the rest is killed. Return how many there were."""
    spared = set(kept)
    spared |= children_of(spared)
    seen: set[int] = set()
    while new := {pid for pid in children_of([os.getpid()]) if pid not in spared and not _is_zombie(pid)} - seen:
        seen |= new
        for pid in new:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
    for pid in seen:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(seen)


def reap_orphans(kept: Iterable[int]) -> None:
    """Take the exit codes of adopted processes that ended, so that they do not stay as zombies; those of `kept` are
    somebody else's to take."""
    mine = os.getpid()
    for pid in children_of([mine]) - set(kept):
        state, parent = _stat(str(pid))
        if state == "Z" and parent == mine:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped (SIGSTOP, a debugger) while its parent is not."""
    state, parent = _stat(str(pid))
    return state in ("T", "t") and _stat(str(parent))[0] not in ("T", "t")


def is_alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    return _stat(str(pid))[0] not in ("?", "Z", "X")


def _is_zombie(pid: int) -> bool:
    return _stat(str(pid))[0] == "Z"


def _parent(pid: str) -> int:
    return _stat(pid)[1]


def _stat(pid: str) -> tuple[str, int]:
    """State letter and parent, of proc_pid_stat(5); `?` for a process that is not there."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rsplit(b")", 1)[1].split()[:2]
    except (OSError, ValueError, IndexError):
        return "?", 0
    return state.decode(), int(parent)
