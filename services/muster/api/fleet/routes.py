"""`/queues` and `/nodes`: who waits, for how long and why, who holds what, and how the nodes are."""

from __future__ import annotations

import time
from typing import Any

import structlog
from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.auth import Caller, Scope, needs
from muster.api.fleet.schemas import NodeList, Queues
from muster.api.fleet.views import LiveJob, node_documents, queue_documents
from muster.api.openapi import problems, shown
from muster.api.projects import service as projects
from muster.api.projects.quotas import quota_of
from muster.api.services import Services, ServicesDependency
from muster.api.tables import JobRow
from muster.contract.base import dump
from muster.contract.fleet import SILENT_SECONDS, FleetReport
from muster.contract.times import rfc3339

log = structlog.get_logger("muster.api.fleet")
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
}
_HOLDING: dict[str, Any] = {
    "id": "0c2c31c1-96f9-4f3c-8a39-5b2f9a0f4d11",
    "name": "base",
    "owner": "bob",
    "phase": "Running",
    "nodes": 7,
    "gpus": 56,
    "since": _AT,
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
    responses={200: shown(_QUEUES, "Each project that the caller sees"), **problems()},
)
async def read_queues(services: ServicesDependency, caller: Caller) -> JSONResponse:
    """Jobs in the order of the queue, why each waits and since when, and what runs, project by project."""
    async with services.database.read() as session:
        rows = await projects.visible(session, caller)
        quotas = {row.name: dump(quota_of(row)) for row in rows}
        jobs = await _live(session)
    queued, items = queue_documents(jobs, quotas, caller)
    return JSONResponse({"asOf": rfc3339(time.time()), "queued": queued, "items": items})


@router.get(
    "/nodes",
    response_model=NodeList,
    summary="List the nodes and who holds them",
    responses={200: shown(_NODES, "Nodes, by name"), **problems()},
)
async def read_nodes(services: ServicesDependency, caller: Caller) -> JSONResponse:
    """Nodes as the operator last told of them: pool, capacity, what is free, by whom they are held, and what is wrong
    with them. Jobs that the caller may not see are named `another project`."""
    report, note = await _report(services)
    if report is None:
        return JSONResponse({"asOf": None, "note": note, "items": []})
    async with services.database.read() as session:
        jobs = await _live(session)
    items = list(node_documents(report, jobs, caller))
    return JSONResponse({"asOf": rfc3339(report.at), "note": note, "items": items})


async def _report(services: Services) -> tuple[FleetReport | None, str]:
    """The operator's newest report, and what to say of it."""
    try:
        report = await services.cluster.nodes()
    except Exception as error:  # of the cluster's client, or a report of a newer Muster
        log.warning("what the operator tells of nodes can't be read", error=f"{type(error).__name__}: {error}"[:500])
        return None, "what the operator tells of the nodes can't be read now; the API's log says why"
    if report is None:
        return None, "the operator has told nothing of its nodes yet: is it running, and of this version?"
    age = time.time() - report.at
    return (
        report,
        f"the operator last told of its nodes {age:.0f} s ago: is it running?" if age > SILENT_SECONDS else "",
    )


async def _live(session: AsyncSession) -> list[LiveJob]:
    """The live jobs of all projects: positions and what is free hang on those of others too."""
    columns = [getattr(JobRow, name) for name in LiveJob.__dataclass_fields__ if hasattr(JobRow, name)]
    rows = await session.execute(select(*columns).where(JobRow.live.is_(True)))
    return [LiveJob(*row) for row in rows]
