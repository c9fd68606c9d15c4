"""A log's lines as its page shows them: those of one rank. Pure."""

from __future__ import annotations

import re

from muster.words.names import rank_mark

_ANY_RANK = re.compile(re.escape(rank_mark(0)).replace("0", "[0-9]+"))


def of_rank(text: str, rank: int, first_rank: int) -> str:
    """The lines of one of a worker's ranks, without its mark. Those without any are its first rank's or launcher's."""
    lines, mark = text.split("\n"), rank_mark(rank)
    if rank == first_rank:
        return "\n".join(line for line in lines if not _ANY_RANK.match(line))
    chosen = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
    return "\n".join([*chosen, ""] if chosen else [])
