"""Jobs that arrive together are committed together, and each of them is still answered as if it had come alone."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest
from sqlalchemy import event
from tests.integration.api.platform import Platform, document, until

from muster.api.core.submission import storing
from muster.api.core.submission.storing import JobWriter

KEY = "Idempotency-Key"


def begun_by(here: Platform) -> list[Any]:
    """Filled with each transaction that inserts jobs."""
    writes: list[Any] = []

    def note(connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO jobs "):
            writes.append(connection.get_transaction())

    event.listen(here.services.database.engine.sync_engine, "before_cursor_execute", note)
    return writes


async def post(here: Platform, name: str, key: str) -> httpx2.Response:
    return await here.client.post("/api/v1/jobs", json=document(name), headers={KEY: key})


@pytest.mark.both_databases
async def test_a_burst_is_stored_in_few_commits(here: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = begun_by(here)
    store = JobWriter._store_group

    async def when_all_have_come(self: JobWriter, group: Any) -> None:
        """A commit takes as long as the rest take to come, on whichever machine."""

        async def all_wait() -> bool:
            return len(self._waiting) + len(group) >= 40 or len(writes) > 0

        await until(all_wait, "all to wait for the first commit")
        await store(self, group)

    monkeypatch.setattr(JobWriter, "_store_group", when_all_have_come)
    replies = await asyncio.gather(*(post(here, f"job-{number}", f"key-{number}") for number in range(40)))
    assert [reply.status_code for reply in replies] == [201] * 40
    assert len(writes) < 20, "40 jobs that come at once, and each has a checkpoint of its own"
    listed = (await here.get("/jobs", limit=100))["items"]
    assert {job["name"]: job["id"] for job in listed} == {
        reply.json()["metadata"]["name"]: reply.json()["id"] for reply in replies
    }
    assert len(listed) == 40
    for job in listed[::10]:
        assert await here.events(job["id"]) == ["job.created"]
        lines = (await here.get("/audit", subject=job["id"]))["items"]
        assert [line["action"] for line in lines] == ["job.submitted"]


@pytest.mark.both_databases
async def test_one_that_is_refused_keeps_no_other_from_being_stored(here: Platform) -> None:
    taken = (await post(here, "taken", "first")).json()["id"]
    good = [(f"job-{number}", f"key-{number}") for number in range(10)]
    asked = [*good[:5], ("taken", "another"), ("taken", "first"), ("job-x", "first"), *good[5:], good[0]]
    replies = await asyncio.gather(*(post(here, name, key) for name, key in asked))
    codes = [reply.json().get("code", reply.status_code) for reply in replies]
    assert codes == [201] * 5 + ["name_taken", 201, "idempotency_key_reused"] + [201] * 6
    assert replies[6].json()["id"] == taken
    assert replies[0].json()["id"] == replies[-1].json()["id"], "the same request twice"
    assert len((await here.get("/jobs", limit=100))["items"]) == 11


@pytest.mark.both_databases
async def test_a_database_that_fails_is_told_to_all_and_stores_none(
    here: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember = storing.idempotency.remember

    async def fail(*_: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(storing.idempotency, "remember", fail)
    replies = await asyncio.gather(*(post(here, f"job-{number}", f"key-{number}") for number in range(10)))
    assert {reply.json()["code"] for reply in replies} == {"database_unavailable"}
    assert (await here.get("/jobs"))["items"] == []
    monkeypatch.setattr(storing.idempotency, "remember", remember)
    assert (await post(here, "job-0", "key-0")).status_code == 201, "what failed is not what holds the next one up"
