"""A job is deleted when it has ended, and its commits when nobody needs them."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, document, platform, until
from tests.polling import WAIT_SECONDS_MAX

from muster.api.core.jobs import removal
from muster.api.core.jobs.retention import drop_left, drop_old
from muster.words.status import Phase


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the cluster take its time to let go of a job."""
    monkeypatch.setattr(removal, "GONE_SECONDS", WAIT_SECONDS_MAX)


async def delete(here: Platform, uid: str, **asked: str) -> tuple[int, str]:
    reply = await here.client.delete(f"/api/v1/jobs/{uid}", params=asked)
    return reply.status_code, reply.json()["code"] if reply.content else ""


async def gone(here: Platform, uid: str, **asked: str) -> tuple[int, str]:
    """Delete, with an operator that removes the object when it is marked."""

    async def operate() -> None:
        async def marked() -> bool:
            return here.cluster.get(uid).metadata.deletion_timestamp is not None

        await until(marked, "the mark")
        here.cluster.remove(uid)

    removed = asyncio.create_task(operate())
    answer = await delete(here, uid, **asked)
    removed.cancel()
    await asyncio.gather(removed, return_exceptions=True)
    return answer


async def finished(here: Platform, name: str) -> str:
    uid: str = (await here.submit(name))["id"]
    await here.finish(uid)
    return uid


async def test_a_job_goes_with_its_record_and_logs_and_leaves_its_commits(here: Platform) -> None:
    uid = await finished(here, "done")
    commit = here.commit(uid, 20)
    log = here.state.worker(uid, 1, 0) / "log"
    log.parent.mkdir(parents=True)
    log.write_text("a line\n")
    assert await gone(here, uid) == (204, "")
    assert await delete(here, uid) == (404, "job_not_found")
    assert (log.exists(), commit.exists()) == (False, True)
    (line, *_) = (await here.get("/audit", subject=uid))["items"]
    assert (line["action"], line["before"]["name"]) == ("job.deleted", "done")
    await here.submit("after")  # and the mirror does not bring it back
    assert [job["name"] for job in (await here.get("/jobs"))["items"]] == ["after"]


@pytest.mark.both_databases
async def test_the_history_of_old_jobs_is_dropped_and_their_record_stays(here: Platform) -> None:
    old, young, live = [(await here.submit(name))["id"] for name in ("old", "young", "live")]
    for uid in (old, young, live):
        await here.handed_over(uid)
        log = here.state.worker(uid, 1, 0)
        log.mkdir(parents=True)
        (log / "log").write_text("a line\n")
    for uid, finished_at in ((old, 1_000.0), (young, 3_000.0)):
        here.operate(uid, phase=Phase.SUCCEEDED, code="Done", because="done", finished_at=finished_at, since=1.0)
        await here.phase(uid, "Succeeded")
    kept = {uid: await here.events(uid) for uid in (young, live)}
    database, layout = here.services.database, here.state
    assert await drop_old(database, layout, before=2_000.0) == [old]
    assert await drop_old(database, layout, before=2_000.0) == []
    assert await here.events(old) == ["job.succeeded"]
    assert {uid: await here.events(uid) for uid in (young, live)} == kept
    assert [(layout.jobs / uid).exists() for uid in (old, young, live)] == [False, True, True]
    assert (await here.get(f"/jobs/{old}"))["status"]["phase"] == "Succeeded"
    assert len((await here.get("/jobs"))["items"]) == 3


async def test_history_is_kept_for_as_many_days_as_are_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.api.app.HOUSEKEEPING_SECONDS", 0.05)
    async with platform(tmp_path / "state", history_days=2) as here:
        young, old = [(await here.submit(name))["id"] for name in ("young", "old")]
        for uid, days in ((young, 1.9), (old, 2.1)):
            await here.handed_over(uid)
            at = time.time() - days * 86_400
            here.operate(uid, phase=Phase.SUCCEEDED, code="Done", because="done", finished_at=at, since=1.0)
            await here.phase(uid, "Succeeded")

        async def dropped() -> bool:
            return await here.events(old) == ["job.succeeded"]

        await until(dropped, "the old job's history to be dropped by itself")
        assert "job.created" in await here.events(young)


@pytest.mark.both_databases
async def test_the_logs_of_old_jobs_go_where_another_replica_has_dropped_their_events(here: Platform) -> None:
    old, young, live = [(await here.submit(name))["id"] for name in ("old", "young", "live")]
    for uid, finished_at in ((old, 1_000.0), (young, 3_000.0)):
        await here.handed_over(uid)
        here.operate(uid, phase=Phase.SUCCEEDED, code="Done", because="done", finished_at=finished_at, since=1.0)
        await here.phase(uid, "Succeeded")
    database, layout = here.services.database, here.state
    assert await drop_old(database, layout, before=2_000.0) == [old]
    for uid in (old, young, live, "of-no-job"):
        (layout.jobs / uid / "logs").mkdir(parents=True, exist_ok=True)
        os.utime(layout.jobs / uid, (1_500.0, 1_500.0))
    assert await drop_old(database, layout, before=2_000.0) == []
    await drop_left(database, layout, before=2_000.0)
    assert [(layout.jobs / uid).exists() for uid in (old, young, live, "of-no-job")] == [False, True, True, True]


async def test_a_job_that_has_not_ended_stays(here: Platform) -> None:
    uid = (await here.submit("lives"))["id"]
    assert await delete(here, uid) == (409, "job_live")


@pytest.mark.both_databases
async def test_commits_that_are_pinned_or_needed_stay(here: Platform) -> None:
    uid = await finished(here, "base")
    commit = here.commit(uid, 20)
    assert (await here.client.post(f"/api/v1/jobs/{uid}/checkpoints/20:pin")).status_code == 200
    assert await delete(here, uid, checkpoints="true") == (409, "job_needed")
    await here.client.post(f"/api/v1/jobs/{uid}/checkpoints/20:unpin")
    training: dict[str, Any] = document()["spec"]["training"] | {"model": {"from": {"job": "base"}}}
    heir = (await here.submit("heir", training=training))["id"]
    refused = await here.client.delete(f"/api/v1/jobs/{uid}", params={"checkpoints": "true"})
    assert (refused.status_code, "heir" in refused.json()["detail"]) == (409, True)
    await here.finish(heir)
    assert await gone(here, uid, checkpoints="true") == (204, "")
    assert not commit.exists()


async def test_a_job_that_the_cluster_keeps_is_kept_here(here: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, its next status would bring it back as a job that somebody else made."""
    uid = await finished(here, "kept")
    with monkeypatch.context() as impatient:
        impatient.setattr(removal, "GONE_SECONDS", 0.05)
        assert await delete(here, uid) == (409, "job_leaving")
    assert (await here.get(f"/jobs/{uid}"))["status"]["phase"] == "Succeeded"
    assert await gone(here, uid) == (204, "")
