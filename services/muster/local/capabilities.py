"""Capabilities: a process of root gives up all of root's privileges, for itself and all it starts (capabilities(7)).

Root without them is an ordinary user who owns root's files. Nothing changes for a process that has none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys

_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _CLEAR_ALL = 38, 23, 24, 47, 4
_VERSION_3 = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def give_up() -> None:
    """Drop all capabilities: bounding, ambient, permitted, effective and inheritable. For this thread and those that it
    starts from now on. Other systems than Linux have none. Raises OSError."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(OSError, ValueError):
        # RDMA pins memory. CAP_IPC_LOCK lets root pin any amount, so root's processes get that as a limit instead.
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):  # a program with capabilities of its own brings none back
        raise OSError(ctypes.get_errno(), "no_new_privs")
    capability = 0
    while libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:  # a number that the kernel doesn't know is an error
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused to whoever has none anyway
        capability += 1
    libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    if libc.capset(ctypes.byref(_Header(_VERSION_3, 0)), (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
