"""Anonymous shared memory that another process can be handed: it lives as long as somebody holds it, and leaves no
file."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)


class SharedMemory:
    """`size` bytes, at least; `descriptor` may be sent to another process, which maps it with `attach`."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self.map = mmap.mmap(descriptor, max(size, 1))

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """Raises OSError where memory is short. Bytes are zero."""
        descriptor = os.memfd_create("muster-checkpoint", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(size, 1))
        return cls(descriptor, size)

    @classmethod
    def attach(cls, descriptor: int, size: int) -> SharedMemory:
        return cls(descriptor, size)

    def view(self, size: int) -> memoryview:
        return memoryview(self.map)[:size]

    def populate(self) -> None:
        """Take every page now, so that the first save does not wait for them. Other threads run meanwhile."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(max(self.size, 1)), _MADV_POPULATE_WRITE)

    def close(self) -> None:
        try:
            self.map.close()
        except BufferError:  # a view is still held somewhere; it goes with its holder
            pass
        os.close(self.descriptor)
