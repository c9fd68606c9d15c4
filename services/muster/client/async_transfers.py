"""Transfers for programs with asyncio: in a thread alongside the loop, which a cancellation ends too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from muster.client.async_connection import AsyncConnection
from muster.client.connection import Connection
from muster.client.transfers import FileTransfers, Progress

T = TypeVar("T")


class _TransferCancelled(Exception):
    """Whoever asked does not wait any more."""


async def transferred(
    connection: AsyncConnection, work: Callable[[FileTransfers, Progress], T], progress: Progress
) -> T:
    """Run `work` with transfers of the same server. When cancelled, it stops at the next report of `progress`;
    the next try resumes from there."""
    cancelled = threading.Event()

    def report(done: int, total: int) -> None:
        if cancelled.is_set():
            raise _TransferCancelled
        progress(done, total)

    def carry_out() -> T:
        with (
            Connection(connection.server, connection.exchange.patience_seconds) as own,
            FileTransfers(own) as transfers,
        ):
            return work(transfers, report)

    try:
        return await asyncio.to_thread(carry_out)
    except asyncio.CancelledError:
        cancelled.set()
        raise
