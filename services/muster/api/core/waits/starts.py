"""Expected starts of queued jobs, from the expected ends of the jobs that hold nodes. Pure.

Jobs are taken in the order of the queue: one that comes earlier gets the nodes that are free first, and nobody knows
how long it keeps them. So only those have an expected start for which the nodes that are left have one; all else is
unknown, and said to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.api.core.access import named
from muster.api.core.callers import Principal
from muster.api.core.waits.live import LiveJob
from muster.words.fleet import FleetReport, NodeReport
from muster.words.status import Phase
from muster.words.text import duration, plural

# Reasons of a wait that ends when nodes are free. A wait for a quota or an admission ends by other things.
_FOR_NODES = frozenset(("AwaitingCapacity", "BehindEarlierGang"))
_HOLDERS_NAMED_MAX = 3


@dataclass(frozen=True)
class ExpectedStart:
    """Start of a queued job: in how many seconds, None where that is unknown; and the jobs that hold the nodes which
    it could use."""

    seconds: float | None
    holders: tuple[LiveJob, ...]


def expected_starts(report: FleetReport, jobs: Iterable[LiveJob], now: float) -> dict[str, ExpectedStart]:
    """Return the expected start of each queued job that waits for nodes, by its id. `jobs` are the live ones that hold
    nodes, and the beginning of the queue."""
    jobs = list(jobs)
    holders: dict[str, list[LiveJob]] = {}
    for job in jobs:
        for node in set(job.nodes):
            holders.setdefault(node, []).append(job)
    queue = sorted((job for job in jobs if job.phase == Phase.QUEUED), key=lambda job: (-job.priority, job.seq))
    for_others: set[str] = set()  # nodes that jobs before this one get
    starts = {}
    for job in queue:
        if job.status.get("code") not in _FOR_NODES or (job.spec.get("gang") or {}).get("shareNodes"):
            continue
        fitting = [node for node in report.nodes if not node.unfit and node.gpus >= job.gpus_per_node]
        free = {
            node.name: math.inf if node.name in for_others else _free_in(node, holders.get(node.name, ()), job, now)
            for node in fitting
        }
        chosen = _earliest(fitting, free, job.nodes_min)
        for_others.update(chosen)
        seconds = max((free[name] for name in chosen), default=math.inf)
        names = {each.id: each for node in fitting for each in holders.get(node.name, ())}
        # Nodes that are free and are not given to it are kept from it by something else.
        starts[job.id] = ExpectedStart(seconds if 0 < seconds < math.inf else None, tuple(names.values()))
    return starts


def _free_in(node: NodeReport, holders: Sequence[LiveJob], job: LiveJob, now: float) -> float:
    """Return in how many seconds the node has room for a worker of the job."""
    ends = sorted((_or_never(each.expected_end(now)), each.gpus_per_node) for each in holders)
    if not job.gpus_per_node:  # a worker without GPUs has a node to itself
        return ends[-1][0] if ends else 0.0
    free = node.gpus - node.others_gpus - sum(gpus for _, gpus in ends)
    if free >= job.gpus_per_node:
        return 0.0
    for seconds, gpus in ends:
        free += gpus
        if free >= job.gpus_per_node:
            return seconds
    return math.inf


def _or_never(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _earliest(nodes: Sequence[NodeReport], free: Mapping[str, float], count: int) -> list[str]:
    """Return the names of `count` nodes of one pool, of the pool in which they are free first; none if no pool has so
    many."""
    pools: dict[str, list[str]] = {}
    for node in nodes:
        pools.setdefault(node.pool, []).append(node.name)
    chosen = [sorted(names, key=free.__getitem__)[:count] for names in pools.values() if len(names) >= count]
    return min(chosen, key=lambda names: free[names[-1]], default=[])


def holder_documents(start: ExpectedStart, caller: Principal, now: float) -> list[dict[str, Any]]:
    """Return the holders as `why` shows them, the largest first. When a job ends that the caller may not see is hidden
    like its name."""
    documents = []
    for job in sorted(start.holders, key=lambda job: (-len(job.nodes) * job.gpus_per_node, -len(job.nodes), job.seq)):
        who = named(caller, job.project, job.id, job.name)
        documents.append(
            {
                **who,
                "nodes": len(job.nodes),
                "gpus": len(job.nodes) * job.gpus_per_node,
                "etaSeconds": job.expected_end(now) if who["id"] else None,
            }
        )
    return documents


def wait_words(start: ExpectedStart, holders: Sequence[Mapping[str, Any]], ahead: int) -> str:
    """Say when the holders end and the job starts, as far as that is known. `ahead` jobs come before it."""
    soonest = sorted(holders, key=lambda each: _or_never(each["etaSeconds"]))
    words = [_holder_words(each) for each in soonest[:_HOLDERS_NAMED_MAX]]
    if more := len(holders) - len(words):
        words.append(f"{plural(more, 'more job')} hold{'s' if more == 1 else ''} nodes")
    if start.seconds is not None:
        words.append(f"so this job is expected to start in about {duration(start.seconds)}")
    elif ahead:
        words.append(f"{plural(ahead, 'job')} in the queue before this one: when it starts is not known")
    else:
        words.append("when this job starts is not known")
    return "; ".join(words)


def _holder_words(holder: Mapping[str, Any]) -> str:
    amount = plural(holder["gpus"], "GPU") if holder["gpus"] else plural(holder["nodes"], "node")
    if holder["job"] is None:
        return f"a job of another project holds {amount}"
    left = holder["etaSeconds"]
    end = "says no time of its end yet" if left is None else f"is expected to end in {duration(left)}"
    return f"{holder['job']}, which holds {amount}, {end}"
