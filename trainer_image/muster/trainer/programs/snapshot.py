"""Copies of complete checkpoints on the node's disk, so that the program may delete or rewrite its own meanwhile.

A copy, not a hard link: a file that is rewritten in place would change under the link, and one that is truncated would
end a process that has it mapped. On file systems that share blocks (XFS, btrfs) the copy costs nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from muster.trainer.programs.listing import FileFacts, FileListing, UnfitFolder, look_at

_FICLONE = 0x40049409  # share the blocks of another file (ioctl_ficlone(2))
_BLOCK_BYTES = 64 << 20


class ChangedMeanwhile(Exception):
    """The checkpoint was deleted or rewritten while it was copied. The message says which file."""


@dataclass(frozen=True)
class CheckpointSnapshot:
    """A copy of a checkpoint that nobody changes any more."""

    listing: FileListing
    step: int
    folder: Path
    metrics: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    def path(self, file: FileFacts) -> Path:
        return self.folder / file.path

    def drop(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def take(watched: Path, listing: FileListing, into: Path) -> None:
    """Copy a checkpoint as it was listed. Raises ChangedMeanwhile where it is no longer as listed, before or after, and
    UnfitFolder where the disk has no room; nothing is left then."""
    root = watched if listing.entry is None else watched / listing.entry
    shutil.rmtree(into, ignore_errors=True)
    try:
        into.mkdir(parents=True)
        for file in listing.files:
            target = into / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy(root / file.path, target)
        if (now := look_at(watched, listing.entry)) is None or now.files != listing.files:
            raise ChangedMeanwhile(f"{root}: {_difference(listing, now)} while it was copied")
    except FileNotFoundError as error:
        shutil.rmtree(into, ignore_errors=True)
        raise ChangedMeanwhile(f"{error.filename} was deleted while the checkpoint was copied") from None
    except OSError as error:
        shutil.rmtree(into, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UnfitFolder(
                f"{root} takes {listing.bytes:,} bytes, and the node's disk has no room for a copy of it; let the "
                "program keep fewer checkpoints, or give the workers more disk (gang.resources.ephemeral-storage)"
            ) from None
        raise UnfitFolder(f"{root} can't be copied: {error.strerror}: {error.filename}") from None
    except BaseException:
        shutil.rmtree(into, ignore_errors=True)
        raise


def _copy(source: Path, target: Path) -> None:
    with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as read, open(target, "xb") as written:
        try:
            fcntl.ioctl(written.fileno(), _FICLONE, read.fileno())
        except OSError:
            shutil.copyfileobj(read, written, _BLOCK_BYTES)


def _difference(before: FileListing, now: FileListing | None) -> str:
    if now is None:
        return "it was deleted"
    changed = sorted({file.path for file in set(before.files) ^ set(now.files)})
    return f"{changed[0]} was changed" + (f" and {len(changed) - 1} others" if len(changed) > 1 else "")
