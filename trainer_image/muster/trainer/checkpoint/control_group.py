"""Control group of the ranks: it connects their upload processes to rank 0's, and makes the few decisions of a save
that all ranks must agree on.

It is a process group of its own, so that its messages never come between the collectives of training.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from typing import Any

from muster.trainer.parallel.groups import groups


@dataclass(frozen=True)
class MeetingPoint:
    """Address of rank 0's upload process; `listener` is its socket, on rank 0 only, and outlives that process."""

    host: str
    port: int
    token: str
    listener: socket.socket | None


class ControlGroup:
    """Small decisions of all ranks. Collective: every rank makes the same calls in the same order."""

    def __init__(self) -> None:
        everyone = groups()
        self.rank, self.world_size, self.speaks = everyone.rank, everyone.world, everyone.speaks
        self._group = everyone.control()

    def any(self, mine: bool) -> bool:
        """Return whether it is true on some rank."""
        return self._group.any(mine)

    def gather(self, mine: Any) -> list[Any]:
        """Each rank's value, JSON types, in order of rank."""
        return self._group.gather(mine)

    def close(self) -> None:
        self._group.close()

    def meeting_point(self) -> MeetingPoint:
        """Open a port on rank 0, and return its address on every rank."""
        listener, mine = None, None
        if self.rank == 0:
            host = os.environ.get("MASTER_ADDR", "127.0.0.1")
            listener = _listen(host)
            mine = {"host": host, "port": listener.getsockname()[1], "token": secrets.token_hex(16)}
        chosen = self.gather(mine)[0]
        return MeetingPoint(chosen["host"], chosen["port"], chosen["token"], listener)


def _listen(host: str) -> socket.socket:
    """A free port: on the address itself where that is this machine's, on all addresses where it is a service's
    name."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    try:
        return socket.create_server((host, 0), family=family, backlog=1024)
    except OSError:
        return socket.create_server(("", 0), family=family, backlog=1024)
