"""Output of a worker's ranks: one log for all of them, the end of each rank's in memory, and when each last wrote.

The lines of all ranks but the worker's first begin with `[rank N] `. On one machine the log is a file that nobody
rotates, so only the beginning of a flood is written to it, and its end when it is over: a program that writes 10 GB
fills no disk.
"""

from __future__ import annotations

import io
import os
import selectors
import stat
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.worker.names import rank_mark

# Ten times what a long training with a progress bar writes. Half of it would still hold any error's beginning; a
# machine with a hundred old jobs can hold a hundred times this.
FILE_BYTES_MAX = 256 * 2**20
TAIL_BYTES = 128 * 1024  # of each rank in memory: a traceback of compiled code has some 20 KB
TAIL_OF_FLOOD_BYTES = 32 * 1024
BLOCK_BYTES = 64 * 1024
LINE_BYTES_MAX = 64 * 1024  # a longer line (a progress bar, binary data) is passed on in pieces
DRAIN_SECONDS_MAX = 2.0  # for what is in the pipes when all ranks are gone


@dataclass
class _OutputStream:
    rank: int
    mark: bytes
    wrote_at: float
    tail: bytearray = field(default_factory=bytearray)
    closed: threading.Event = field(default_factory=threading.Event)
    piece: bytes = b""  # of a line that is not over
    in_line: bool = False  # its beginning was passed on


class _LossyFile(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError:
            return len(data)
        return len(data) if written is None else written


def survive_full_log() -> None:
    """Replace standard output and error by streams that lose what the log's disk does not take: a launcher that ends by
    an error of its log would leave no exit record, and take its ranks with it."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is not None:  # it was closed before we began
            file = io.BufferedWriter(_LossyFile(descriptor, "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(file, "utf-8", "backslashreplace", line_buffering=True))


class BoundedLog:
    """The worker's log. Of a flood into a file it keeps the beginning, and the end when it is over."""

    def __init__(self, sink: int, file_bytes_max: int) -> None:
        self._sink, self._room = sink, file_bytes_max if _is_file(sink) else None
        self._dropped = 0
        self._flood_tail = bytearray()

    def finish(self) -> None:
        """Write the end of a flood."""
        if self._dropped:
            words = f"\nmuster: {self._dropped:,} bytes of output were left out here; these are the last:\n"
            self._write(words.encode() + bytes(self._flood_tail))

    def append(self, data: bytes) -> None:
        """Write what a rank wrote, as far as there is room for it."""
        if self._room is None:
            self._write(data)
            return
        head, data = data[: self._room], data[self._room :]
        self._room -= len(head)
        self._write(head)
        if not data:
            return
        if not self._dropped:
            self._write(
                b"\nmuster: the program writes more than is kept of its log; the rest is left out until its end\n"
            )
        self._dropped += len(data)
        self._flood_tail += data
        if len(self._flood_tail) > 2 * TAIL_OF_FLOOD_BYTES:
            del self._flood_tail[:-TAIL_OF_FLOOD_BYTES]

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._sink, data) :]
        except OSError:  # a full disk: the program must not end for its log
            return


class RankOutput:
    """Reader of the ranks' pipes, in a thread of its own."""

    def __init__(self, ranks: Sequence[int], sink: int = 1, file_bytes_max: int = FILE_BYTES_MAX) -> None:
        self._log = BoundedLog(sink, file_bytes_max)
        self._streams: dict[int, _OutputStream] = {}
        self._selector = selectors.DefaultSelector()
        self.writers: dict[int, int] = {}
        """Descriptors for the ranks to write to."""
        now = time.time()
        for rank in ranks:
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self._streams[rank] = _OutputStream(rank, rank_mark(rank).encode() if rank != ranks[0] else b"", now)
            self._selector.register(reader, selectors.EVENT_READ, self._streams[rank])
            self.writers[rank] = writer
        self._wake, self._woken = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ, None)

    def start(self) -> None:
        """Begin to read, once the ranks have their ends of the pipes."""
        for writer in self.writers.values():
            os.close(writer)
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Pass on what is left. A daemon that still holds a pipe is not waited for."""
        os.write(self._woken, b"\0")
        self._thread.join(DRAIN_SECONDS_MAX)

    def wrote_at(self, rank: int) -> float:
        """Return when the rank last wrote, in seconds since the epoch; its start before that."""
        return self._streams[rank].wrote_at

    def tail(self, rank: int, wait_seconds: float = 0.0) -> str:
        """Return the end of what the rank wrote. With `wait_seconds`, wait that long for a rank that has ended to be
        read to its end: not longer, for a process that it left running may still hold the pipe."""
        self._streams[rank].closed.wait(wait_seconds)
        return bytes(self._streams[rank].tail).decode(errors="replace")

    def _run(self) -> None:
        ending = False
        while True:
            ready = self._selector.select(0.0 if ending else None)
            for key, _ in ready:
                if key.data is None:
                    self._selector.unregister(self._wake)
                    ending = True
                else:
                    self._read(key.fd, key.data)
            if ending and not ready:
                break
        for stream in self._streams.values():
            self._flush(stream)
        self._log.finish()

    def _read(self, descriptor: int, stream: _OutputStream) -> None:
        try:
            data = os.read(descriptor, BLOCK_BYTES)
        except BlockingIOError:
            return
        if not data:  # the program closed its outputs, and may run on
            self._selector.unregister(descriptor)
            os.close(descriptor)
            stream.closed.set()
            return
        stream.wrote_at = time.time()
        stream.tail += data
        if len(stream.tail) > 2 * TAIL_BYTES:
            del stream.tail[:-TAIL_BYTES]
        if not stream.mark:
            self._log.append(data)
            return
        whole, end, stream.piece = (stream.piece + data).rpartition(b"\n")
        if end:
            self._put(stream, whole + end)
        if len(stream.piece) > LINE_BYTES_MAX:
            self._flush(stream)

    def _flush(self, stream: _OutputStream) -> None:
        piece, stream.piece = stream.piece, b""
        if piece:
            self._put(stream, piece)

    def _put(self, stream: _OutputStream, text: bytes) -> None:
        ended = text.endswith(b"\n")
        body = text[:-1] if ended else text
        marked = (b"" if stream.in_line else stream.mark) + body.replace(b"\n", b"\n" + stream.mark)
        stream.in_line = not ended
        self._log.append(marked + b"\n" if ended else marked)


def _is_file(descriptor: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:
        return False
