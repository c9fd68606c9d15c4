"""File systems: how much is left, and whether one has turned read-only under us (what the kernel does after errors)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from muster.words.notices import Notice, Remedy
from muster.words.signals import SignalKind

PAUSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class DiskSpace:
    bytes_free: int
    bytes_total: int
    inodes_free: int
    read_only: bool


class DiskSource:
    """Watches the file systems of these paths for space, and for having become read-only against expectation."""

    name = "disk"

    def __init__(self, paths: tuple[Path, ...], stat: Callable[[Path], os.statvfs_result] = os.statvfs) -> None:
        self.pause_seconds = PAUSE_SECONDS
        self._paths, self._stat = paths, stat
        self.spaces: dict[str, DiskSpace] = {}

    def look(self) -> tuple[Notice, ...]:
        self.spaces = {str(path): space for path in self._paths if (space := self._space(path)) is not None}
        return tuple(_turned(path) for path, space in self.spaces.items() if space.read_only)

    def acknowledge(self) -> None:
        """Do nothing: the disks are checked again anyway."""

    def _space(self, path: Path) -> DiskSpace | None:
        try:
            stat = self._stat(path)
        except OSError:
            return None
        size = stat.f_frsize
        return DiskSpace(
            stat.f_bavail * size, stat.f_blocks * size, stat.f_favail, bool(stat.f_flag & os.ST_RDONLY)
        )  # fmt: skip


def _turned(path: str) -> Notice:
    return Notice(
        kind=SignalKind.NODE_DRAIN,
        remedy=Remedy.DRAIN,
        at=time.time(),
        message=f"the file system of {path} has turned read-only",
        source="disk",
        device=path,
    )
