"""A backup made while the API served, and a PostgreSQL that crashes or fails over: docs/operations.md is true."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import text
from tests.integration.api.people import settle
from tests.integration.api.platform import Platform, document, frames, platform, served, until
from tests.integration.api.postgres import PostgresServer, postgres_server, standby_of
from tests.polling import WAIT_SECONDS_MAX

from muster.api.core.database.db import Database
from muster.api.core.database.migrate import migrate
from muster.api.core.errors import ApiError
from muster.api.core.settings import ApiSettings
from muster.words.status import Phase

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


async def told(here: Platform, headers: dict[str, str]) -> dict[str, Any]:
    """What the API knows: jobs with their phases and events, projects, people, tokens, uploaded files."""

    async def ask(path: str) -> Any:
        reply = await here.client.get(f"/api/v1{path}", headers=headers)
        assert reply.status_code == 200, reply.text
        return reply.json()

    jobs = (await ask("/jobs?limit=500"))["items"]
    events = {job["id"]: (await ask(f"/jobs/{job['id']}/events"))["items"] for job in jobs}
    lists = {path: (await ask(f"/{path}"))["items"] for path in ("projects", "people", "files")}
    return {"jobs": [(job["id"], job["name"], job["phase"]) for job in jobs], "events": events, **lists}


async def lived(here: Platform, name: str, headers: dict[str, str]) -> str:
    made = await here.client.post("/api/v1/jobs", json=document(name), headers=headers | {"Idempotency-Key": name})
    uid = str(made.json()["id"])

    async def has(phase: str | None) -> bool:
        job = (await here.client.get(f"/api/v1/jobs/{uid}", headers=headers)).json()
        return bool(job["handedOver"] if phase is None else job["status"]["phase"] == phase)

    await until(lambda: has(None), "the hand-over")
    here.operate(uid, phase=Phase.SUCCEEDED, code="Done", because="done", finished_at=1.0, since=1.0)
    await until(lambda: has("Succeeded"), "its end")
    return uid


async def brought_back(state: Path, headers: dict[str, str], before: dict[str, Any], uid: str, **options: Any) -> None:
    """What was known at the backup is known, the job that came after it is read from the cluster, and a request of
    before it makes no second job."""
    async with platform(state, auth=True, **options) as here:

        async def imported() -> bool:
            return (await here.client.get(f"/api/v1/jobs/{uid}", headers=headers)).status_code == 200

        await until(imported, "the job that is in the cluster alone")
        after = await told(here, headers)
        assert [job for job in after["jobs"] if job[0] != uid] == before["jobs"]
        assert {key: after["events"][key] for key in before["events"]} == before["events"]
        assert [after[each] for each in ("projects", "people", "files")] == [
            before[each] for each in ("projects", "people", "files")
        ]
        again = await here.client.post(
            "/api/v1/jobs", json=document("first"), headers=headers | {"Idempotency-Key": "first"}
        )
        assert (again.headers["idempotency-replayed"], again.json()["id"]) == ("true", before["jobs"][0][0])
        assert len(here.cluster.jobs()) == len(after["jobs"])


@pytest.mark.postgres
async def test_a_dump_of_postgresql_brings_everything_back(
    tmp_path: Path, postgres: PostgresServer, migrated: str
) -> None:
    name, other = postgres.new_database(migrated), postgres.new_database()
    async with platform(tmp_path / "state", auth=True, database_url=postgres.url(name)) as here:
        people = await settle(here, tmp_path / "state")
        await lived(here, "first", people.admin)
        before = await told(here, people.admin)
        dump = await asyncio.to_thread(postgres.tool, "pg_dump", "-d", name, "--format=custom")
        late = await lived(here, "late", people.admin)
    await asyncio.to_thread(postgres.tool, "pg_restore", "-d", other, "--exit-on-error", stdin=dump)
    await brought_back(tmp_path / "state", people.admin, before, late, database_url=postgres.url(other))


async def test_a_copy_of_sqlite_brings_everything_back(tmp_path: Path) -> None:
    """By the command of the documentation."""
    (command,) = re.findall(r'"(import sqlite3; .*)"\n', OPERATIONS.read_text())
    state = tmp_path / "state"
    async with platform(state, auth=True) as here:
        people = await settle(here, state)
        await lived(here, "first", people.admin)
        before = await told(here, people.admin)
        command = command.replace("/state/", f"{state}/").replace("/tmp/muster.db", f"{tmp_path}/copy.db")
        await asyncio.to_thread(subprocess.run, [sys.executable, "-c", command], check=True)
        late = await lived(here, "late", people.admin)
        database = here.state.database
    for path in state.glob(f"{database.name}*"):
        path.unlink()
    (tmp_path / "copy.db").rename(database)
    await brought_back(state, people.admin, before, late)


@pytest.mark.long
@pytest.mark.postgres
async def test_a_postgresql_that_crashes_under_load_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with postgres_server(durable=True) as server:

        async def crash() -> None:
            await asyncio.to_thread(server.crash)
            await asyncio.sleep(0.5)  # not a wait: how long it is away
            await asyncio.to_thread(server.start)

        await survived(tmp_path / "state", server.url(server.new_database()), [crash] * 3)


@pytest.mark.long
@pytest.mark.postgres
async def test_a_standby_that_is_promoted_under_load_has_everything(tmp_path: Path) -> None:
    """By the address of the documentation, which names both servers: what was answered lies on both, and the API goes
    on with whichever takes writes."""
    with postgres_server(durable=True) as primary, standby_of(primary) as standby:
        primary.sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
        primary.sql("SELECT pg_reload_conf()")
        streams = "SELECT sync_state FROM pg_stat_replication"
        await until(lambda: asyncio.to_thread(lambda: primary.sql(streams) == "sync"), "a synchronous standby")
        name = primary.new_database()

        async def fail_over() -> None:
            await asyncio.to_thread(primary.crash)
            await asyncio.sleep(0.5)  # not a wait: how long nobody takes writes
            await asyncio.to_thread(standby.sql, "SELECT pg_promote()")

        (query,) = re.findall(r"postgresql://\S+?/muster(\?host=\S+)", OPERATIONS.read_text())
        hosts = query.replace("db-a", str(primary.folder)).replace("db-b", str(standby.folder))
        alone = query.replace("db-a", str(standby.folder)).replace("db-b", str(standby.folder))
        await refused_by_one_that_takes_no_writes(f"postgresql://postgres@/{name}{alone}")
        await survived(tmp_path / "state", f"postgresql://postgres@/{name}{hosts}", [fail_over])


async def refused_by_one_that_takes_no_writes(url: str) -> None:
    database = Database(ApiSettings(database_url=url).database, 2.0)
    with pytest.raises(ApiError) as refused:
        async with database.read() as session:
            await session.execute(text("SELECT 1"))
    assert refused.value.code == "database_unavailable"
    await database.close()


async def survived(state: Path, url: str, outages: list[Callable[[], Awaitable[None]]]) -> None:
    """Clients submit and a reader follows a job through each outage: nothing that was answered is lost or doubled."""
    made = dict[str, str]()
    database = Database(ApiSettings(database_url=url).database, 60.0)
    await migrate(database)  # however slow the disk is
    await database.close()
    async with served(state, database_url=url, database_timeout_seconds=10.0) as (here, _):
        ended = asyncio.Event()

        async def submit(client: int) -> None:
            number = 0
            while not ended.is_set():
                name = f"job-{client}-{number}"
                reply = await here.client.post(
                    "/api/v1/jobs", json=document(name), headers={"Idempotency-Key": name}, timeout=120
                )
                if reply.status_code == 201:
                    made[name], number = reply.json()["id"], number + 1
                else:
                    assert reply.json()["code"] == "database_unavailable", reply.text
                await asyncio.sleep(0.02)  # not a wait: the pace of the load

        async def more(than: int) -> None:
            async def there() -> bool:
                for client in clients:
                    if client.done():
                        client.result()
                return len(made) > than

            await until(there, "more jobs")

        watched = (await here.submit("watched"))["id"]
        heard: list[int] = []
        following = asyncio.create_task(follow(here, watched, heard))
        clients = [asyncio.create_task(submit(client)) for client in range(3)]
        for outage in outages:
            await more(len(made) + 5)
            await outage()
        await more(len(made) + 5)
        ended.set()
        await asyncio.gather(*clients)

        async def recovered() -> bool:
            return all(work.failing_since is None for work in here.services.background.works)

        await until(recovered, "the work beside the requests to go on")
        await here.finish(watched)
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            await following
        listed = {job["name"]: job["id"] for job in (await here.get("/jobs", limit=500))["items"]}
        assert listed == made | {"watched": watched}

        async def handed_over() -> bool:
            return {job.metadata.uid for job in here.cluster.jobs()} == set(listed.values())

        await until(handed_over, "the hand-over of all")
        numbers = [event["id"] for event in (await here.get(f"/jobs/{watched}/events"))["items"]]
        assert heard == numbers == list(range(1, len(numbers) + 1))
        for uid in made.values():
            assert (await here.events(uid)).count("job.created") == 1


async def follow(here: Platform, uid: str, heard: list[int]) -> None:
    """All events of the job over streams that end: each goes on after the last id."""
    while True:
        headers = {"Last-Event-ID": str(heard[-1])} if heard else {}
        with contextlib.suppress(httpx2.TransportError):
            async with here.client.stream(
                "GET", f"/api/v1/jobs/{uid}/events", params={"follow": "true"}, headers=headers
            ) as reply:
                if reply.status_code == 200:
                    async for frame in frames(reply):
                        if frame.event == "end":
                            return
                        heard.append(int(frame.id))
        await asyncio.sleep(0.05)  # not a wait: a reader pauses before it connects again
