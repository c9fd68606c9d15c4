"""Folders and files that only their user may read, whoever made them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_OTHERS = 0o077  # group and everybody else


def make_private_folder(path: Path, ours: Path) -> None:
    """Make sure that the folder is there and, if it is empty or holds the file `ours`, that its mode is 0700.

    Any other folder may be shared for a good reason (somebody may name /tmp), and keeps its mode.
    Raises OSError where it can't be made.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if _is_open(path) and (ours.exists() or not any(path.iterdir())):
        path.chmod(0o700)


def make_private_database(path: Path) -> None:
    """Make sure that the SQLite file is there with mode 0600; SQLite gives its journals the mode of the file.

    A file that is there is not opened: closing it would end the locks of all of this process's connections to it, and
    what they commit then could be lost (https://sqlite.org/howtocorrupt.html, 2.2).
    Raises OSError where none can be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    for file in (path, *(path.with_name(path.name + journal) for journal in ("-wal", "-shm", "-journal"))):
        if file.exists() and _is_open(file):
            file.chmod(0o600)


def _is_open(path: Path) -> bool:
    """Return whether others have access to it and we may change that."""
    status = path.stat()
    return status.st_uid == os.geteuid() and bool(status.st_mode & _OTHERS)
