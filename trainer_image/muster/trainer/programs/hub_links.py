"""Links in a program's own cache of the Hugging Face hub to what this machine's cache holds, which it may only read.

A repository in such a cache has folders of `blobs`, `snapshots` that link to them, and `refs`, small files that name
the newest revision. Its folders are made anew and its refs are copied, so that a newer revision can be downloaded
alongside the older ones; of the files themselves, only links are made.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_KINDS = ("models--*", "datasets--*", "spaces--*")


def link_repositories(machine: Path, own: Path) -> int:
    """Link the repositories that `own` lacks, each of them whole or not at all, and return their number. Raises
    OSError."""
    count = 0
    for repository in sorted(path for kind in _KINDS for path in machine.glob(kind) if path.is_dir()):
        if (own / repository.name).exists():
            continue
        partial = own / f".{repository.name}.{os.getpid()}"
        try:
            _link(repository, partial)
            partial.rename(own / repository.name)  # refused where another job of the project was first
            count += 1
        except FileExistsError:
            pass
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return count


def _link(repository: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    for entry in os.scandir(repository):
        target = folder / entry.name
        if entry.is_symlink():
            target.symlink_to(os.readlink(entry.path))
        elif not entry.is_dir():
            target.symlink_to(entry.path)
        elif entry.name == "refs":
            shutil.copytree(entry.path, target)
        else:
            _link(Path(entry.path), target)
