"""Four thousand jobs at once: all are handed over, each once, and the list stays whole. Speed: benchmarks/api.py."""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, document, platform, until

from muster.api.core.events.types import EventType, NewEvent
from muster.api.core.jobs import repository
from muster.recipe.document import parse_job
from muster.words.base import dump
from muster.words.names import DEFAULT_PROJECT
from muster.words.status import JobStatus

JOBS, BY_HTTP = 4_000, 100


async def store(here: Platform, count: int) -> list[str]:
    """As submissions leave them. What is tested is what comes after."""
    spec, status = dump(parse_job(document()).spec), dump(JobStatus(code="Submitted"))
    created = NewEvent(EventType.JOB_CREATED, 1.0, "submitted")
    uids = [str(uuid.uuid4()) for _ in range(count)]
    jobs = [
        repository.NewJob(
            id=uid,
            namespace="default",
            name=f"job-{number}",
            project=DEFAULT_PROJECT,
            owner="",
            labels={"tenth": str(number % 10)},
            spec=spec,
            priority=0,
            created_at=1.0,
            status=status,
        )
        for number, uid in enumerate(uids)
    ]
    async with here.services.database.write() as session:
        await repository.insert(session, [(job, created) for job in jobs])
    return uids


async def walk(here: Platform, **filters: Any) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    while True:
        page = await here.get("/jobs", limit=500, **filters, **cursor)
        items += page["items"]
        if page["nextCursor"] is None:
            return items
        cursor = {"cursor": page["nextCursor"]}


@pytest.mark.slow
@pytest.mark.long
async def test_four_thousand_jobs(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", mirror_seconds=0.2) as here:
        stored = await store(here, JOBS - BY_HTTP)
        made = await asyncio.gather(*(here.submit(f"http-{number}") for number in range(BY_HTTP)))
        uids = stored + [job["id"] for job in made]

        async def all_there() -> bool:
            return here.cluster.version() >= JOBS and not await waiting(here)

        await until(all_there, "the hand-over of all", seconds=600, every=0.5)
        in_cluster = await asyncio.to_thread(here.cluster.jobs)
        assert sorted(job.metadata.uid for job in in_cluster) == sorted(uids)
        listed = await walk(here)
        assert sorted(item["id"] for item in listed) == sorted(uids)
        assert len(await walk(here, label="tenth=3")) == (JOBS - BY_HTTP) // 10
        began = time.process_time()
        why = await here.get(f"/jobs/{uids[-1]}/why")
        assert why["queue"]["queued"] == JOBS
        assert time.process_time() - began < 30, "a bound for a query that walks everything several times"
        assert {work.failures for work in here.services.background.works} == {0}


async def waiting(here: Platform) -> int:
    """Rows that are still to be handed over."""
    text = (await here.client.get("/metrics")).text
    return int(float(text.partition("\nmuster_api_relay_waiting ")[2].split()[0]))
