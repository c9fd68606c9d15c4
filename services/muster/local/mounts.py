"""Mounts: a process sees every file system read-only but for some folders, and so does all that it starts (Linux 5.12).

Landlock and seccomp leave out modes and times of files, which their owner may change also where he may not open them.
On a read-only mount nobody changes them. It takes a mount namespace: root has one with CAP_SYS_ADMIN, others by way of
a user namespace, which some distributions and most containers refuse (mount_namespaces(7), mount_setattr(2)).
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same numbers on all architectures but Alpha
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOVE_FROM_EMPTY_PATH, _MOVE_TO_EMPTY_PATH = 0x4, 0x40
_READ_ONLY: Final = 1


def available() -> bool:
    """Return whether this machine lets a process of ours have its own mounts."""
    return sys.platform.startswith("linux") and _is_possible(())


def protect(folders: Sequence[int]) -> bool:
    """Make all that this process sees read-only but for these folders, opened as descriptors, none of which lies in
    another. False where the machine refuses that, or this process has several threads: then nothing has changed."""
    if not sys.platform.startswith("linux") or len(os.listdir("/proc/self/task")) > 1 or not _is_possible(folders):
        return False
    _protect(folders)
    return True


def _is_possible(folders: Sequence[int]) -> bool:
    """Tried in a child, for no step of it can be taken back."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _protect(folders)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _protect(folders: Sequence[int]) -> None:
    """Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNS):
        _check(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS))
        # Everybody stays who he is. A process without privileges may map itself alone, and groups once they are fixed.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    # What is mounted on the machine later is seen here too, and nothing that is done here is seen there.
    _check(libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None))
    copy = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE | _AT_EMPTY_PATH
    places = [_opened_here(folder) for folder in folders]
    copies = [_check(libc.syscall(_OPEN_TREE, place, b"", ctypes.c_uint(copy))) for place in places]
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY)  # struct mount_attr: set, clear, propagation, user namespace
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _check(libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", ctypes.c_uint(_AT_RECURSIVE), attributes, size))
    move = ctypes.c_uint(_MOVE_FROM_EMPTY_PATH | _MOVE_TO_EMPTY_PATH)
    for place, writable in zip(places, copies, strict=True):
        _check(libc.syscall(_MOVE_MOUNT, writable, b"", place, b"", move))
        os.close(writable)
        os.close(place)


def _opened_here(folder: int) -> int:
    """The same folder in the mounts of this process: what was opened before lies in those that it had."""
    place = os.open(os.readlink(f"/proc/self/fd/{folder}"), os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    if not os.path.samestat(os.fstat(place), os.fstat(folder)):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return place


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
