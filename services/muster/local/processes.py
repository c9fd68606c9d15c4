"""Is a process held by job control? Asked of a rank that has fallen silent, by whoever shares its machine."""

from __future__ import annotations


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped (SIGSTOP, a debugger) while its parent is not. False where Linux's /proc is
    not.

    A machine or a session that is paused stops parent and child alike, and is no fault of the one rank.
    """
    state, parent = _state(pid)
    return state in "Tt" and _state(parent)[0] not in "Tt"


def _state(pid: int) -> tuple[str, int]:
    """State letter and parent, of proc_pid_stat(5); `?` for a process that is not there."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rsplit(b")", 1)[1].split()[:2]
    except (OSError, ValueError, IndexError):
        return "?", 0
    return state.decode(), int(parent)
