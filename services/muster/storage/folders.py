"""Folders as descriptors, so that what is done in one is done there, whatever its name means a moment later.

Where others write too, no name below the root is followed that is a link, at whatever moment it was made one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from muster.storage.errors import NotAFile

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def opened_folder(root: Path, key: str, links: bool, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder `key` below `root`, made first where that is asked for.

    Raises OSError, and without `links` NotAFile where a link or a file is on the way.
    """
    path = root / key
    if make:
        make_folder(path if links else root)
    folder = os.open(path, _FOLDER) if links else _descend(root, PurePosixPath(key).parts, make, path)
    try:
        yield folder
    finally:
        os.close(folder)


def make_folder(folder: Path) -> None:
    """mkdir -p whose every new name is flushed to disk."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    parent = os.open(folder.parent, _FOLDER)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _descend(root: Path, names: tuple[str, ...], make: bool, path: Path) -> int:
    folder = os.open(root, _FOLDER)
    try:
        for name in names:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=folder)
                    os.fsync(folder)
            below = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = below
    except NotADirectoryError as error:
        os.close(folder)
        raise NotAFile(f"{path}: what leads to it is no folder; remove it") from error
    except BaseException:
        os.close(folder)
        raise
    return folder
