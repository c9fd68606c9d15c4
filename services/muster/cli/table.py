"""Columns without lines, for terminals and pipes; quick enough for tens of thousands of rows, page after page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

GAP = "  "
WRAP_WIDTH_MIN = 20  # a narrower last column is not wrapped: one word per line is harder to read than an overflow


@dataclass(frozen=True)
class StyledCell:
    """A cell in a style of rich, such as `bold red`."""

    text: str
    style: str


Cell = str | StyledCell


class TextTable:
    """Rows of cells, for `Console.print`. The last cell of a row may have several lines.

    Columns are as wide as their widest cell. On a terminal the last column is wrapped, or each row `cut` to one line;
    in a pipe neither is done, so that `grep` finds whole rows.
    """

    def __init__(self, *columns: str, header: bool = True, widths: Sequence[int] = (), cut: bool = False) -> None:
        """`columns` are the titles; `>` before one aligns its column to the right. `widths` are those of the page
        before."""
        self._cut = cut
        self._titles = [column.removeprefix(">") for column in columns]
        self._right = [column.startswith(">") for column in columns]
        self._rows: list[Sequence[Cell]] = [[StyledCell(title, "bold") for title in self._titles]] if header else []
        self.widths = [max(widths[i] if widths else 0, _width(title)) for i, title in enumerate(self._titles)]

    def add_row(self, *cells: Cell) -> None:
        assert len(cells) == len(self._titles), "a cell per column"
        self._rows.append(cells)
        for index, cell in enumerate(cells):
            self.widths[index] = max(self.widths[index], _width(_text(cell)))

    def fits(self, width: int) -> bool:
        """Return whether the last column has room for some words in lines of this width."""
        return sum(self.widths[:-1]) + len(GAP) * (len(self.widths) - 1) + WRAP_WIDTH_MIN <= width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        indent = sum(self.widths[:-1]) + len(GAP) * (len(self.widths) - 1)
        room = options.max_width - indent if console.is_terminal else 0
        if self._cut and console.is_terminal:
            room = max(room, WRAP_WIDTH_MIN)
        for cells in self._rows:
            yield from self._line(console, cells, room if room >= WRAP_WIDTH_MIN else 0, indent)

    def _line(self, console: Console, cells: Sequence[Cell], room: int, indent: int) -> Iterator[Segment]:
        """The segments of one row: as few as its styles allow, for rich takes its time over each."""
        from rich.segment import Segment

        plain = ""
        for index, cell in enumerate(cells):
            text, last = _text(cell), index == len(cells) - 1
            space = " " * (self.widths[index] - _width(text))
            if last and not self._right[index]:
                lines = [_shortened(text, room)] if self._cut and room else _wrapped(text, room)
                text, space = f"\n{' ' * indent}".join(lines), ""
            plain += space if self._right[index] else ""
            if isinstance(cell, StyledCell) and cell.style:
                yield Segment(plain)
                yield Segment(text, console.get_style(cell.style))
                plain = ""
            else:
                plain += text
            plain += "" if last else (GAP if self._right[index] else space + GAP)
        yield Segment(plain.rstrip(" ") + "\n")


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _shortened(text: str, room: int) -> str:
    """Return the text on one line, with an ellipsis where it ends too late for the room."""
    line = " ".join(text.split())
    if _width(line) <= room:
        return line
    if line.isascii():
        return f"{line[: room - 3].rstrip()}..."
    while _width(line) > room - 3:
        line = line[:-1]
    return f"{line.rstrip()}..."


def _wrapped(text: str, room: int) -> list[str]:
    lines = text.split("\n")
    if not room:
        return lines
    return [part for line in lines for part in textwrap.wrap(line, room, break_on_hyphens=False) or [""]]
