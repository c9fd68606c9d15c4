"""Small files that one process writes and others read, also in folders that a job may write: a FIFO, a device or a link
in their place hangs and misleads nobody."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from pathlib import Path

BYTES_MAX = 4_000_000


class NotRegular(FileNotFoundError):
    """A link, a FIFO, a device or a socket lies there. Whoever reads a file treats it as none: it is not the file's."""


def read_regular(path: Path, bytes_max: int = BYTES_MAX) -> bytes:
    """The whole file. Raises OSError also where it is no regular file, or larger than `bytes_max`."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise OSError(f"{path} is larger than {bytes_max} bytes")
    return content


def open_regular(path: Path) -> int:
    """A descriptor to read from, opened without waiting. Raises OSError, NotRegular for anything but a regular file."""
    return _regular(path, os.O_RDONLY)


def open_to_append(path: Path) -> int:
    """A descriptor of the file, made if it is not there. Raises OSError, NotRegular for anything but a regular file."""
    return _regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def write_whole(path: Path, text: str) -> None:
    """Replace the file in one step, so that a reader sees the old or the new text and never a part. Raises OSError.

    Where a job may write too, it can neither guess the name that is written to nor have put a link there.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "w") as file:
            file.write(text)
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def _regular(path: Path, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a FIFO that nobody reads, or a socket
            raise NotRegular(error.errno, "is not a regular file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular(errno.EINVAL, "is not a regular file", str(path))
    return descriptor
