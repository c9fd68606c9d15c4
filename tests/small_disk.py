"""A disk of a few megabytes that really gets full: a tmpfs that only the processes started on it have."""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil


class Missing(Exception):
    """No such disk can be had here, and why; a reason to skip."""


@dataclass(frozen=True)
class SmallDisk:
    """at: the folder over which it lies for a program that `command` starts."""

    at: Path
    size_bytes: int

    def command(self, words: list[str]) -> list[str]:
        """Raises Missing."""
        if (why := _why_not()) is not None:
            raise Missing(why)
        disk = ["--size", str(self.size_bytes), "--tmpfs", str(self.at)]
        return ["bwrap", "--bind", "/", "/", *disk, "--dev-bind", "/dev", "/dev", "--die-with-parent", *words]

    def seen_by(self, process: subprocess.Popen[str]) -> Path:
        """The disk, from outside. process: of `command`."""
        return Path(f"/proc/{child_of(process).pid}/root{self.at}")


def child_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The program that was started on the disk. process: of `SmallDisk.command`."""
    return psutil.Process(process.pid).children()[0]


def fill(folder: Path) -> None:
    """Leave not one byte; `free` takes it back."""
    size = 1 << 20
    with (folder / "fill").open("ab", buffering=0) as file:
        while size:
            try:
                file.write(b"x" * size)
            except OSError:
                size //= 2


def free(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        (folder / "fill").unlink()


@functools.cache
def _why_not() -> str | None:
    if shutil.which("bwrap") is None:
        return "there is no bwrap to mount a small disk with"
    probe = ["bwrap", "--bind", "/", "/", "--size", "65536", "--tmpfs", "/mnt", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"bwrap can't mount a small disk: {done.stderr.strip()}" if done.returncode else None
