"""Landlock: a process gives up, for itself and all that it starts, every file but those it names (Linux 5.13).

https://docs.kernel.org/userspace-api/landlock.html. Three system calls, which glibc has no functions for; no privilege
is needed. What is given up stays so until the process ends, whoever it runs as, also across exec. Besides files the
process gives up to look into processes outside (memory, environment) and, from Linux 6.12 on, to signal them. Root's
capabilities go round it (files by their handles, mounts, raw memory), so they are given up too (`capabilities`).
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from enum import IntFlag

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on all architectures but Alpha
_QUERY_VERSION = 1
_PATH_BENEATH = 1
_SCOPE_SIGNAL = 2
_PR_SET_NO_NEW_PRIVS = 38


class FileAccess(IntFlag):
    """LANDLOCK_ACCESS_FS_*. What a process asks of devices by ioctl is left alone: GPUs are driven by it."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13  # from version 2 on; without it no file moves from one folder to another
    TRUNCATE = 1 << 14  # from version 3 on


READ = FileAccess.EXECUTE | FileAccess.READ_FILE | FileAccess.READ_DIR
_ALL = FileAccess((1 << 15) - 1)
WRITE = _ALL & ~(FileAccess.MAKE_CHAR | FileAccess.MAKE_BLOCK)  # reading included
_OF_FILES = FileAccess.EXECUTE | FileAccess.WRITE_FILE | FileAccess.READ_FILE | FileAccess.TRUNCATE


class _RulesetAttribute(ctypes.Structure):
    _fields_ = [
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    ]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


def version() -> int:
    """Return the kernel's version of Landlock; 0 if it has none or it is switched off."""
    if not sys.platform.startswith("linux"):
        return 0
    try:
        return _call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_QUERY_VERSION))
    except OSError:
        return 0


class LandlockRules:
    """Access that a process keeps. Raises OSError where the kernel has no Landlock (see `version`)."""

    def __init__(self) -> None:
        abi = version()
        self._handled = _ALL
        if abi < 3:
            self._handled &= ~FileAccess.TRUNCATE
        if abi < 2:
            self._handled &= ~FileAccess.REFER
        attribute = _RulesetAttribute(self._handled, 0, _SCOPE_SIGNAL if abi >= 6 else 0)
        # Older kernels know a shorter structure, and take a longer one whose rest is zero.
        self._descriptor = _call(
            _CREATE_RULESET, ctypes.byref(attribute), ctypes.c_size_t(ctypes.sizeof(attribute)), ctypes.c_uint32(0)
        )

    def allow(self, descriptor: int, access: FileAccess) -> None:
        """Keep `access` to the file, or to the folder and all below it, that was opened as `descriptor` (O_PATH)."""
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            access &= _OF_FILES
        rule = _PathBeneath(access & self._handled, descriptor)
        _call(_ADD_RULE, self._descriptor, ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0))

    def enter(self) -> None:
        """Give up all the rest. Only for this thread and those that it starts from now on: call it before any other
        thread is there."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "no_new_privs")
        _call(_RESTRICT_SELF, self._descriptor, ctypes.c_uint32(0))
        os.close(self._descriptor)


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
