"""A worker's ranks share one log: the lines of all but its first rank say whose they are."""

from __future__ import annotations

import io
import sys
from typing import TextIO

from muster.words.names import rank_mark


def mark_lines(rank: int, local_rank: int) -> None:
    """Begin each line that this process writes by Python's standard output and error with `[rank N] `.

    The worker's first rank writes as it always did: its step records are read by machines.
    """
    if local_rank > 0:
        sys.stdout = MarkedLines(sys.stdout, rank_mark(rank))
        sys.stderr = MarkedLines(sys.stderr, rank_mark(rank))


class MarkedLines(io.TextIOWrapper):
    """Another text stream's buffer, with a mark at the beginning of each line.

    A line is written at once, so that lines of several processes don't mix, and only when it ends or at a flush.
    """

    def __init__(self, stream: TextIO, mark: str) -> None:
        self._stream = stream  # it would close the buffer when it goes
        self._mark = mark
        self._unfinished_line = ""
        self._in_line = False  # the beginning of a line was flushed
        super().__init__(stream.buffer, encoding=stream.encoding, errors=stream.errors, newline="\n")

    def write(self, text: str, /) -> int:
        whole, end, self._unfinished_line = (self._unfinished_line + text).rpartition("\n")
        if end:
            self._put(whole + end)
        return len(text)

    def flush(self) -> None:
        pending, self._unfinished_line = self._unfinished_line, ""
        if pending:
            self._put(pending)
        super().flush()

    def _put(self, text: str) -> None:
        ended = text.endswith("\n")
        marked = ("" if self._in_line else self._mark) + text.removesuffix("\n").replace("\n", "\n" + self._mark)
        self._in_line = not ended
        super().write(marked + "\n" * ended)
        super().flush()
