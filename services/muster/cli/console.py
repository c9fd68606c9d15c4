"""A console that obeys nobody's text: job names, log lines and what a model wrote come from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from muster.words.text import readable


class SafeConsole(Console):
    """Prints a dot for each control character of a text. Colours and cursor moves of rich's own are no text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=readable(segment.text))
