"""The queue and the nodes put together from rows and the operator's report, for one caller. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from muster.api.core.access import named
from muster.api.core.callers import Principal
from muster.api.core.waits.live import LiveJob, time_or
from muster.words.fleet import FleetReport, NodeReport
from muster.words.status import Phase


def queue_documents(
    jobs: Iterable[LiveJob],
    quotas: Mapping[str, dict[str, Any]],
    caller: Principal,
    starts: Mapping[str, float | None],
    positions: Mapping[int, int] | None = None,
) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of queued jobs and, for each project in `quotas`, its waiting jobs and the jobs that hold
    nodes.

    `starts` maps queued jobs' ids to the seconds until they are expected to start, None where that is not known.
    `positions` maps the `seq` of every queued job to its position; if it is None, `jobs` holds all queued jobs."""
    jobs = list(jobs)
    queue = sorted((job for job in jobs if job.phase == Phase.QUEUED), key=lambda job: (-job.priority, job.seq))
    if positions is None:
        positions = {job.seq: position for position, job in enumerate(queue, start=1)}
    waiting: dict[str, list[dict[str, Any]]] = {}
    holding: dict[str, list[dict[str, Any]]] = {}
    processes = Counter[str]()
    for job in queue:
        if caller.role_in(job.project) is not None and job.seq in positions:
            waiting.setdefault(job.project, []).append(_waiting(job, positions[job.seq], starts.get(job.id)))
    for job in jobs:
        if job.nodes and caller.role_in(job.project) is not None:
            holding.setdefault(job.project, []).append(_holding(job))
            processes[job.project] += job.processes
    items = []
    for project, quota in sorted(quotas.items()):
        holders = sorted(holding.get(project, ()), key=lambda each: (-each["gpus"], -each["nodes"], each["name"]))
        gpus = sum(each["gpus"] for each in holders)
        summary = {"waiting": waiting.get(project, []), "holding": holders, "gpus": gpus, "gangs": len(holders)}
        items.append({"project": project, **summary, "processes": processes[project], "quota": quota})
    return len(positions), items


def _waiting(job: LiveJob, position: int, start: float | None) -> dict[str, Any]:
    return {
        "position": position,
        "id": job.id,
        "name": job.name,
        "owner": job.owner,
        "priority": job.priority,
        "nodes": job.nodes_min,
        "gpus": job.nodes_min * job.gpus_per_node,
        "since": job.time("queuedAt"),
        "code": str(job.status.get("code", "")),
        "because": str(job.status.get("because", "")),
        "startsInSeconds": start,
    }


def _holding(job: LiveJob) -> dict[str, Any]:
    attempts = job.status.get("attempts") or [{}]
    return {
        "id": job.id,
        "name": job.name,
        "owner": job.owner,
        "phase": job.phase,
        "nodes": len(job.nodes),
        "gpus": len(job.nodes) * job.gpus_per_node,
        "since": time_or(attempts[-1].get("createdAt"), job.created_at),
        "etaSeconds": job.expected_end(time.time()),
    }


def node_documents(report: FleetReport, jobs: Iterable[LiveJob], caller: Principal) -> Iterator[dict[str, Any]]:
    """Yield each node with who holds and who avoids it. For jobs that the caller may not see, even the project is
    hidden."""
    holders: dict[str, list[dict[str, Any]]] = {}
    avoiders: dict[str, list[dict[str, Any]]] = {}
    for job in jobs:
        who = named(caller, job.project, job.id, job.name)
        seen = who["id"] is not None
        for name, workers in Counter(job.nodes).items():
            used = {"workers": workers, "gpus": workers * job.gpus_per_node}
            holders.setdefault(name, []).append(who | used)
        for entry in job.status.get("excludedNodes") or ():
            why = {"until": time_or(entry.get("until"), 0.0), "why": str(entry.get("why", "")) if seen else None}
            avoiders.setdefault(str(entry.get("node")), []).append(who | why)
    for node in report.nodes:
        yield _node(node, holders.get(node.name, []), avoiders.get(node.name, []))


def _node(node: NodeReport, holders: list[dict[str, Any]], avoided: list[dict[str, Any]]) -> dict[str, Any]:
    document = node.model_dump(mode="json", by_alias=True, exclude={"others_cpus"})
    free = node.gpus - node.others_gpus - sum(each["gpus"] for each in holders)
    return document | {"freeGpus": max(0, free), "heldBy": holders, "avoidedBy": avoided}
