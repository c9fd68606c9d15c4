"""Ports for servers that are started a moment after they were told where."""

import itertools
import os
import random
import socket
from collections.abc import Iterator

# Below those that the kernel gives to whoever asks for any (Linux: 32768 on), and beside the local world's own.
_PORTS = range(12_000, 19_000)
_PARTS = 8


def _in_turn() -> Iterator[int]:
    """All ports of this process's part, again and again, from a place that chance decides. Each of pytest's processes
    has a part for itself: a server that imports torch takes its port seconds after it was found free, and of a
    thousand such servers some two wanted the same."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    mine = list(_PORTS[number % _PARTS :: _PARTS])
    first = random.SystemRandom().randrange(len(mine))
    return itertools.cycle(mine[first:] + mine[:first])


_NEXT = _in_turn()


def free_port() -> int:
    """One that nobody listens on, and that nobody gets by chance before it is used."""
    for port in itertools.islice(_NEXT, 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port among 200")
