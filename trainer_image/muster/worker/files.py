"""Small files that one process writes and others read, as muster.storage.small_files has them: a link or a FIFO in
their place misleads nobody, and a reader sees a whole file or none."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import uuid
from typing import Any

BYTES_MAX = 4_000_000


def read_regular(path: str, bytes_max: int = BYTES_MAX) -> bytes:
    """Return the whole file. Raises OSError, also for anything but a regular file and for one of over `bytes_max`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(errno.EINVAL, "is not a regular file", path)
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise OSError(f"{path} is larger than {bytes_max} bytes")
    return content


def read_document(path: str) -> dict[str, Any] | None:
    """Return the JSON object in the file; None where there is none that can be read."""
    try:
        document = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def write_whole(path: str, text: str) -> None:
    """Replace the file in one step. Raises OSError."""
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name}.{uuid.uuid4().hex}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "w") as file:
            file.write(text)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def write_document(path: str, document: dict[str, Any]) -> None:
    """Replace the file by the document, keys without a value left out. Raises OSError."""
    write_whole(path, json.dumps({name: value for name, value in document.items() if value is not None}))
