"""Muster for programs with threads.

Written from `async_muster.py` by `tools/generate_client.py`; change that file.
"""

from __future__ import annotations

from typing import Any

from muster.client.address import server_for
from muster.client.connection import Connection
from muster.client.exchange import PATIENCE_SECONDS
from muster.client.files import Files
from muster.client.jobs import Jobs
from muster.client.sweeps import Sweeps


class Muster:
    """One server. Use as a context manager, or close it. Threads may share it.

    It is found as the command line finds it: `server`, else MUSTER_SERVER, else the `muster up` of this machine; with
    `token`, else MUSTER_TOKEN, else the sign-in of `muster login`, else the token's file. Requests that may have been
    lost are sent again for `patience_seconds`. Raises MusterError.
    """

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        transport: Any = None,
    ) -> None:
        """`transport` is httpx's, for tests and for proxies of one's own."""
        self.connection = Connection(server_for(server, token), patience_seconds, transport=transport)
        self.jobs = Jobs(self.connection)
        self.files = Files(self.connection)
        self.sweeps = Sweeps(self.connection)

    def __enter__(self) -> Muster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.connection.close()

    def __repr__(self) -> str:
        return f"Muster({self.connection.server.url!r})"
