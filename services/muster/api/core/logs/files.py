"""The workers' log files: pages of them, and a reader that follows them as they grow. Synchronous, for threads."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from muster.storage import numbered_folders
from muster.storage.small_files import open_regular
from muster.words.names import LOG
from muster.words.state_folder import StateFolder

PAGE_BYTES_MAX = 1_000_000
LINE_BYTES_MAX = 64_000  # a longer one is told in pieces
# A line may be as long as a job likes; half of it would lose lines behind a few megabytes of one, and twice as much
# takes a slow disk a second.
TAIL_BYTES_MAX = 64_000_000
_CHUNK_BYTES = 256_000
_POSITION = re.compile(r"(\d{1,9})/((?:\d{1,9}:\d{1,15})(?:,\d{1,9}:\d{1,15})*)?")


@dataclass(frozen=True)
class JobLogs:
    layout: StateFolder
    uid: str

    def attempts(self) -> list[int]:
        return numbered_folders.attempts(self.layout, self.uid)

    def workers(self, attempt: int) -> list[int]:
        return numbered_folders.workers(self.layout, self.uid, attempt)

    def file(self, attempt: int, worker: int) -> Path:
        return self.layout.worker(self.uid, attempt, worker) / LOG


@dataclass(frozen=True)
class LogPage:
    """A piece of a log. Offsets are in bytes of the file; `at_end` says that nothing more is in it now."""

    text: str
    offset: int
    next_offset: int
    at_end: bool


def reading(file: Path) -> BinaryIO:
    """A log to be read. A job writes in its folder: what it put there instead of its log is not read, nor waited for.

    Raises FileNotFoundError, also for what is no regular file.
    """
    return os.fdopen(open_regular(file), "rb")


def page(file: Path, offset: int, bytes_max: int = PAGE_BYTES_MAX) -> LogPage:
    """Return at most so many bytes from `offset`, by default a megabyte, ending with a whole line if there is one."""
    try:
        with reading(file) as handle:
            offset, raw = _read(handle, offset, bytes_max)
            at_end = not handle.read(1)
    except FileNotFoundError:
        return LogPage("", offset, offset, True)
    if not at_end and (cut := raw.rfind(b"\n") + 1):
        raw = raw[:cut]
    return LogPage(raw.decode(errors="replace"), offset, offset + len(raw), at_end)


def _read(handle: BinaryIO, offset: int, size: int) -> tuple[int, bytes]:
    """Read from `offset` on, or from the first line that is left, and return where it was read. The oldest part of a
    long log is dropped, which leaves a hole in the file (pod_logs)."""
    with contextlib.suppress(OSError):  # at the end; or a file system that knows of no holes
        offset = os.lseek(handle.fileno(), offset, os.SEEK_DATA)
    handle.seek(offset)
    raw = handle.read(size)
    left = raw.lstrip(b"\0")  # a hole ends at a block's border, and lines don't
    return offset + len(raw) - len(left), left


def tail_offset(file: Path, lines: int, bytes_max: int = TAIL_BYTES_MAX) -> int:
    """Return the offset at which the last `lines` lines begin, but at most `bytes_max` before the end."""
    try:
        with reading(file) as handle:
            end = handle.seek(0, 2)
            return end if lines == 0 else _begin_of_tail(handle, end, lines, max(0, end - bytes_max))
    except FileNotFoundError:
        return 0


def _begin_of_tail(handle: BinaryIO, end: int, lines: int, floor: int) -> int:
    """Looks back from the end, a chunk at a time, and not before `floor`."""
    earliest = floor  # where the first line begins that was found; `floor` is in the middle of one, or begins the file
    start = end - 1  # the last byte ends the last line, if it ends one
    while start > floor:
        stop, start = start, max(floor, start - _CHUNK_BYTES)
        handle.seek(start)
        raw = handle.read(stop - start)
        at = len(raw)
        while (at := raw.rfind(b"\n", 0, at)) >= 0:
            earliest, lines = start + at + 1, lines - 1
            if lines == 0:
                return earliest
    return 0 if floor == 0 else earliest


@dataclass(frozen=True)
class LogLine:
    """A line of a log. `position` is where a reader that was cut off goes on after it."""

    attempt: int
    worker: int
    text: str
    position: str


class LogFollower:
    """Reader of the chosen workers' logs, one attempt after the other. `worker` is None for all of them."""

    def __init__(self, logs: JobLogs, attempt: int | None, worker: int | None) -> None:
        self.logs, self.worker = logs, worker
        self.attempt = attempt  # None: no attempt has begun
        self.offsets: dict[int, int] = {}

    def start_at_tail(self, lines: int) -> None:
        if self.attempt is not None:
            self.offsets = {w: tail_offset(self.logs.file(self.attempt, w), lines) for w in self._workers()}

    def resume(self, position: str) -> None:
        """Raises ValueError for a position that this reader did not give out."""
        match = _POSITION.fullmatch(position)
        if not match:
            raise ValueError(position)
        pairs = [pair.split(":") for pair in match[2].split(",")] if match[2] else []
        self.attempt, self.offsets = int(match[1]), {int(worker): int(offset) for worker, offset in pairs}

    @property
    def position(self) -> str:
        return f"{self.attempt or 0}/" + ",".join(
            f"{worker}:{offset}" for worker, offset in sorted(self.offsets.items())
        )

    def lines(self, final: bool) -> list[LogLine]:
        """Return the lines that were added since the last call. If `final`, that includes a last line without a line
        break."""
        if self.attempt is None:
            return []
        return [line for worker in self._workers() for line in self._of(self.attempt, worker, final)]

    def next_attempt(self) -> bool:
        """Continue with the attempt after this one, if it has begun."""
        later = [number for number in self.logs.attempts() if number > (self.attempt or 0)]
        if later:
            self.attempt, self.offsets = later[0], {}
        return bool(later)

    def _workers(self) -> list[int]:
        assert self.attempt is not None
        return [self.worker] if self.worker is not None else self.logs.workers(self.attempt)

    def _of(self, attempt: int, worker: int, final: bool) -> Iterator[LogLine]:
        offset = self.offsets.get(worker, 0)
        try:
            with reading(self.logs.file(attempt, worker)) as handle:
                offset, raw = _read(handle, offset, _CHUNK_BYTES)
        except FileNotFoundError:
            return
        for piece in _pieces(raw, final and len(raw) < _CHUNK_BYTES):
            offset += len(piece)
            self.offsets[worker] = offset
            yield LogLine(attempt, worker, piece.rstrip(b"\r\n").decode(errors="replace"), self.position)


def _pieces(raw: bytes, final: bool) -> Iterator[bytes]:
    begin = 0
    while begin < len(raw):
        end = raw.find(b"\n", begin) + 1
        if end == 0:
            end = len(raw) if final or len(raw) - begin >= LINE_BYTES_MAX else 0
        if end == 0:
            return
        end = min(end, begin + LINE_BYTES_MAX)
        yield raw[begin:end]
        begin = end
