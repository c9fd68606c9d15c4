"""`/fleet`: nodes by pool, who waits for what, what projects hold and spend, what was recovered."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, Request
from fastapi.responses import Response

from muster.charts import goodput
from muster.web import api, fleet_view
from muster.web.api import ServicesDependency
from muster.web.rendering import page
from muster.web.session import Visitor

router = APIRouter(include_in_schema=False)

WAITING_MAX = 100  # shown of the queue


@router.get("/fleet")
async def show_fleet(request: Request, services: ServicesDependency, visitor: Visitor) -> Response:
    now = time.time()
    seen, jobs = await asyncio.gather(
        api.overview(services, visitor, WAITING_MAX),
        api.recent_jobs(services, visitor, now - fleet_view.DAY_SECONDS),
    )
    queues = seen.queues
    spending = await api.spending(services, visitor, [each["project"] for each in queues["items"]])
    waiting = [(each["project"], job) for each in queues["items"] for job in each["waiting"]]
    return page(
        request,
        "fleet.html",
        visitor,
        current="fleet",
        nodes=seen.nodes,
        pools=fleet_view.pools(seen.nodes["items"]),
        queues=queues,
        waiting=sorted(waiting, key=lambda each: int(each[1]["position"]))[:WAITING_MAX],
        waiting_by_project=seen.waiting,
        spending=spending,
        recoveries=fleet_view.recoveries(jobs, now),
        parts=goodput.parts(fleet_view.time_spent(status for _, _, status in jobs)),
        counted=len(jobs),
    )
