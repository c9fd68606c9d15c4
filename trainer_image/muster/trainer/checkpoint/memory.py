"""Anonymous shared memory that another process can be handed: it lives as long as somebody holds it, and leaves no
file."""

from __future__ import annotations

import contextlib
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
        take_pages(memoryview(self.map))

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view is still held somewhere; it goes with its holder
            self.map.close()
        os.close(self.descriptor)


def take_pages(view: memoryview) -> None:
    """Have the kernel give all pages of `view` at once: one by one, as they are written, costs more than the writing.
    Other threads run meanwhile. Older kernels refuse, and nothing is lost."""
    if not len(view):
        return
    start = ctypes.addressof(ctypes.c_char.from_buffer(view))
    page = start - start % mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(start + len(view) - page), _MADV_POPULATE_WRITE)
