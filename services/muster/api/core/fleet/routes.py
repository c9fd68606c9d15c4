"""`/queues` and `/nodes`: who waits, for how long and why, who holds what, and how the nodes are."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.callers import Caller, Principal, Scope, needs
from muster.api.core.database.tables import JobRow
from muster.api.core.fleet.schemas import NodeList, Queues
from muster.api.core.fleet.views import node_documents, queue_documents
from muster.api.core.http.openapi import example_reply, problems
from muster.api.core.projects import quota_of, visible
from muster.api.core.services import Services, ServicesDependency
from muster.api.core.waits.estimates import QUEUED, StartEstimates, fleet_report, live_jobs
from muster.api.core.waits.live import LiveJob
from muster.words.base import dump
from muster.words.fleet import FleetReport
from muster.words.times import rfc3339

router = APIRouter(tags=["fleet"], dependencies=[Depends(needs(Scope.READ))])

_AT = rfc3339(1_795_000_000.0)
_WAITING: dict[str, Any] = {
    "position": 3,
    "id": "6d4b4c1e-5b6e-4a0e-9a3e-0c8f7c1f2a11",
    "name": "chat-sft",
    "owner": "ann",
    "priority": 0,
    "nodes": 2,
    "gpus": 16,
    "since": _AT,
    "code": "ProjectLimit",
    "because": "gang needs 16 GPUs, 8 of the 64 that project nlp may hold are left; held by nlp/base (56 GPUs)",
    "startsInSeconds": None,
}
_HOLDING: dict[str, Any] = {
    "id": "0c2c31c1-96f9-4f3c-8a39-5b2f9a0f4d11",
    "name": "base",
    "owner": "bob",
    "phase": "Running",
    "nodes": 7,
    "gpus": 56,
    "since": _AT,
    "etaSeconds": 720.0,
}
_QUEUES: dict[str, Any] = {
    "asOf": _AT,
    "queued": 5,
    "items": [
        {
            "project": "nlp",
            "waiting": [_WAITING],
            "holding": [_HOLDING],
            "gpus": 56,
            "gangs": 1,
            "processes": 56,
            "quota": {"gpus": 64, "person": {}},
        }
    ],
}
_NODES: dict[str, Any] = {
    "asOf": _AT,
    "note": "",
    "items": [
        {
            "name": "ip-10-0-3-7",
            "pool": "spot-a",
            "capacity": "spot",
            "instanceType": "p5.48xlarge",
            "gpus": 8,
            "freeGpus": 0,
            "othersGpus": 0,
            "cpus": 190.0,
            "memoryBytes": 2_000_000_000_000,
            "unfit": "EC2 takes this node back",
            "notices": [{"kind": "spot_notice", "at": _AT, "message": "EC2 takes this node back", "source": "imds"}],
            "heldBy": [{"project": "another project", "id": None, "job": None, "workers": 1, "gpus": 8}],
            "avoidedBy": [],
        }
    ],
}


@router.get(
    "/queues",
    response_model=Queues,
    summary="Show the queue and who holds which nodes",
    responses={200: example_reply(_QUEUES, "Each project that the caller sees"), **problems()},
)
async def read_queues(services: ServicesDependency, caller: Caller) -> JSONResponse:
    """Returns the queue in its order, with the reason why each job waits and since when, and the running jobs of each
    project."""
    async with services.database.read() as session:
        quotas = await _quotas(session, caller)
        jobs = await live_jobs(session)
    starts = {job_id: start.seconds for job_id, start in (await services[StartEstimates].of(services)).items()}
    queued, items = queue_documents(jobs, quotas, caller, starts)
    return JSONResponse({"asOf": rfc3339(time.time()), "queued": queued, "items": items})


@router.get(
    "/nodes",
    response_model=NodeList,
    summary="List the nodes and who holds them",
    responses={200: example_reply(_NODES, "Nodes, by name"), **problems()},
)
async def read_nodes(services: ServicesDependency, caller: Caller) -> JSONResponse:
    """Returns the nodes as the operator last reported them: pool, capacity, free resources, holders and problems. Jobs
    that the caller may not see are shown as `another project`."""
    report, note = await fleet_report(services)
    async with services.database.read() as session:
        jobs = await live_jobs(session) if report is not None else []
    return JSONResponse(_nodes(report, note, jobs, caller))


@dataclass(frozen=True)
class FleetOverview:
    """The answers of both routes, of the queue only its beginning; and how many wait, by their project."""

    nodes: dict[str, Any]
    queues: dict[str, Any]
    waiting: Mapping[str, int]


async def overview(services: Services, caller: Principal, waiting_max: int) -> FleetOverview:
    """Return the queues and nodes for a page. Only the beginning of a long queue is read: nobody looks at more, and
    reading all of it takes seconds."""
    report, note = await fleet_report(services)
    async with services.database.read() as session:
        quotas = await _quotas(session, caller)
        queue = await session.execute(
            select(JobRow.seq, JobRow.project).where(QUEUED).order_by(JobRow.priority.desc(), JobRow.seq)
        )
        positions = {seq: (position, project) for position, (seq, project) in enumerate(queue, start=1)}
        seen = {seq: project for seq, (_, project) in positions.items() if caller.role_in(project) is not None}
        jobs = await live_jobs(session, list(seen)[:waiting_max])
    places = {seq: position for seq, (position, _) in positions.items()}
    starts = {job_id: start.seconds for job_id, start in (await services[StartEstimates].of(services)).items()}
    queued, items = queue_documents(jobs, quotas, caller, starts, places)
    queues = {"asOf": rfc3339(time.time()), "queued": queued, "items": items}
    return FleetOverview(_nodes(report, note, jobs, caller), queues, Counter(seen.values()))


def _nodes(report: FleetReport | None, note: str, jobs: list[LiveJob], caller: Principal) -> dict[str, Any]:
    if report is None:
        return {"asOf": None, "note": note, "items": []}
    return {"asOf": rfc3339(report.at), "note": note, "items": list(node_documents(report, jobs, caller))}


async def _quotas(session: AsyncSession, caller: Principal) -> dict[str, dict[str, Any]]:
    """Return the quotas of the projects that the caller may see."""
    return {row.name: dump(quota_of(row)) for row in await visible(session, caller)}
