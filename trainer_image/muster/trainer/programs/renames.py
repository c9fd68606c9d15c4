"""Names that were renamed into a folder, as the kernel reports them (Linux: inotify(7)).

A rename is how a program says that a file or folder is whole: what is written in place looks the same half way. By
polling, the two can't be told apart.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
from pathlib import Path

_MOVED_TO, _IGNORED = 0x80, 0x8000
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_EVENT = struct.Struct("iIII")


class RenameWatch:
    """Watches one folder, also where it is removed and made again."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError where the kernel has no watch left (fs.inotify.max_user_watches)."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._folder = folder
        self._file = self._libc.inotify_init1(_NONBLOCK_CLOEXEC)
        if self._file < 0:
            raise self._failure()
        self._watch = -1
        self._inode: int | None = None
        self.follow()

    def follow(self) -> None:
        """Watch the folder that has the name now. Raises OSError, also where there is none."""
        inode = self._folder.stat().st_ino
        if inode == self._inode:
            return
        watch = self._libc.inotify_add_watch(self._file, os.fsencode(self._folder), _MOVED_TO)
        if watch < 0:
            raise self._failure()
        self._watch, self._inode = watch, inode

    def wait(self, seconds: float) -> frozenset[str]:
        """Names that came since the last call, after at most so many seconds."""
        if not select.select([self._file], [], [], seconds)[0]:
            return frozenset()
        names: set[str] = set()
        try:
            data = os.read(self._file, 1 << 16)
        except BlockingIOError:
            return frozenset()
        while data:
            watch, mask, _, length = _EVENT.unpack_from(data)
            name, data = data[_EVENT.size : _EVENT.size + length], data[_EVENT.size + length :]
            if watch == self._watch and mask & _MOVED_TO:
                names.add(os.fsdecode(name.rstrip(b"\0")))
            if watch == self._watch and mask & _IGNORED:
                self._inode = None
        return frozenset(names)

    def close(self) -> None:
        os.close(self._file)

    def _failure(self) -> OSError:
        number = ctypes.get_errno()
        return OSError(number, os.strerror(number), str(self._folder))
