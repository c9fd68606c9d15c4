"""Nodes and jobs, in the form that the pass over the queue requires."""

from __future__ import annotations

import asyncio
import time

from muster.operator.core.fleet import Fleet, FleetNode
from muster.operator.kubernetes.change_queue import ChangeQueue
from muster.operator.kubernetes.jobs import JobStore
from muster.operator.kubernetes.node_reports import node_reports
from muster.operator.kubernetes.nodes import ForeignUsage, NodeCache
from muster.operator.kubernetes.priorities import PriorityClasses
from muster.operator.kubernetes.quotas import QuotaReader
from muster.operator.kubernetes.reads import FreshReads
from muster.operator.kubernetes.slices import ResourceSlices
from muster.operator.pacing import ADMISSION_SECONDS_MAX, ADMISSION_SHARE
from muster.operator.world import FLEET
from muster.words.fleet import NodeReport
from muster.words.prices import Prices


class FleetView:
    """View of everything that admission considers, gathered from the caches.

    `limits` has the number of accelerators that the jobs of a namespace may hold together, by namespace.
    """

    def __init__(
        self,
        jobs: JobStore,
        nodes: NodeCache,
        reads: FreshReads,
        changes: ChangeQueue,
        limits: dict[str, int],
        quotas: QuotaReader,
        prices: Prices,
    ) -> None:
        self._prices = prices
        self._jobs, self._nodes, self._reads, self._limits, self._quotas = jobs, nodes, reads, limits, quotas
        self.others = ForeignUsage(lambda: changes.enqueue(FLEET))
        self.priorities = PriorityClasses(lambda: changes.enqueue(FLEET))
        self.slices = ResourceSlices(lambda: changes.enqueue(FLEET))
        self._read: tuple[float, float] = (0.0, 0.0)  # when last (monotonic), seconds that it took afresh

    def reports(self) -> tuple[NodeReport, ...]:
        """Return the reports of the nodes' state."""
        usable = {node.name: node for node in self._usable()}
        return node_reports(self._nodes.facts(), usable, self.others.reservations())

    def _usable(self) -> tuple[FleetNode, ...]:
        return self.slices.counted(self._nodes.fleet(self.others))

    async def look(self, fresh: bool, now: float) -> Fleet:
        """The fleet as it is now known. If `fresh`, jobs are read from their source instead of the cache alone."""
        ended, seconds = self._read
        if not fresh:  # a pass over a large fleet is dear; one sees to all news that came before it
            pause = min(ADMISSION_SECONDS_MAX, seconds / ADMISSION_SHARE) - (time.monotonic() - ended)
            await asyncio.sleep(max(0.0, pause))
        quotas = await self._quotas.read()
        began = time.monotonic()
        present = await self._reads.present() if fresh else None
        self._read = (time.monotonic(), time.monotonic() - began if fresh else seconds)
        jobs = (
            job
            for job in self._jobs.all()
            if (present is None or present(job)) and not (job.invalid and not job.status.gang.nodes)
        )
        summaries = tuple(job.summary for job in jobs)
        nodes, others = self._usable(), self.others.reservations()
        return Fleet(now, fresh, nodes, summaries, self._limits, quotas, others, self.priorities.values, self._prices)
