"""Small files that one process writes and others read, also in folders that a job may write: a FIFO, a device or a link
in their place hangs and misleads nobody."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from pathlib import Path

BYTES_MAX = 4_000_000


def read_regular(path: Path, bytes_max: int = BYTES_MAX) -> bytes:
    """The whole file. Raises OSError also where it is no regular file, or larger than `bytes_max`."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise OSError(f"{path} is larger than {bytes_max} bytes")
    return content


def open_regular(path: Path) -> int:
    """A descriptor to read from, opened without waiting. Raises OSError for anything but a regular file."""
    return _regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), path)


def open_to_append(path: Path) -> int:
    """A descriptor of the file, made if it is not there. Raises OSError for anything but a regular file."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    return _regular(os.open(path, flags, 0o644), path)


def write_whole(path: Path, text: str) -> None:
    """Replace the file in one step, so that a reader sees the old or the new text and never a part. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        beside.write_text(text)
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def _regular(descriptor: int, path: Path) -> int:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor
