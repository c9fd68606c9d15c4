"""Tells the API what nodes there are: a report is written when it changes, and now and then to say that it holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from muster.operator.pacing import NODE_REPORT_AGAIN_SECONDS, NODE_REPORT_SECONDS
from muster.words.fleet import FleetReport, NodeReport


class NodeReporter:
    """`read` gives the nodes as they are, `write` publishes a report. `on_error` is called with a write that failed."""

    def __init__(
        self,
        read: Callable[[], tuple[NodeReport, ...]],
        write: Callable[[FleetReport], Awaitable[None]],
        on_error: Callable[[Exception], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._read, self._write, self._on_error, self._now = read, write, on_error, now
        self._written: FleetReport | None = None

    async def step(self) -> None:
        """Write the report if it is due."""
        report, now = FleetReport(at=self._now(), nodes=self._read()), self._now()
        previous = self._written
        if (
            previous is not None
            and previous.nodes == report.nodes
            and 0 <= now - previous.at < NODE_REPORT_AGAIN_SECONDS
        ):
            return
        await self._write(report)
        self._written = report

    async def run(self) -> str | None:
        """Run forever. What fails is tried again in the next round."""
        while True:
            try:
                await self.step()
            except Exception as error:
                self._on_error(error)
            await asyncio.sleep(NODE_REPORT_SECONDS)
