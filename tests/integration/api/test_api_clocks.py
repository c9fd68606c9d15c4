"""A process whose own clock is an hour off: what it deletes and tells goes by the clock of the database."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.api.platform import Platform, platform, until
from tests.integration.api.postgres import PostgresServer
from tests.integration.api.test_api_files import begin

from muster.api.data.files import service
from muster.api.data.files.arrivals import FilePlaces, drop_expired
from muster.api.webhooks.waits import notify_of_waits
from muster.words.status import Phase

pytestmark = pytest.mark.postgres
HOOKS = "/api/v1/projects/default/webhooks"
HOUR = 3_600.0


@pytest.fixture
async def shared(tmp_path: Path, postgres: PostgresServer, migrated: str) -> AsyncIterator[Platform]:
    url = postgres.url(postgres.new_database(migrated))
    async with platform(tmp_path / "state", database_url=url, webhook_networks=["127.0.0.0/8"]) as running:
        yield running


@pytest.mark.parametrize(("ahead", "lives", "dropped"), [(HOUR, HOUR / 2, False), (-HOUR, -1.0, True)])
async def test_an_upload_is_dropped_when_its_time_is_over(
    shared: Platform, monkeypatch: pytest.MonkeyPatch, ahead: float, lives: float, dropped: bool
) -> None:
    await shared.no_more_housekeeping()  # which would drop it, too
    monkeypatch.setattr(service, "UPLOAD_SECONDS", lives)
    place = (await begin(shared)).headers["location"]
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead)
    gone = await drop_expired(shared.services.database, shared.services[FilePlaces])
    assert gone == ([place.rpartition("/")[2]] if dropped else [])


async def test_a_wait_is_long_when_it_has_been_long(shared: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = {"name": "hook", "url": "http://127.0.0.1:9/", "kinds": ["job.waits_long"], "waitSeconds": HOUR / 2}
    assert (await shared.client.post(HOOKS, json=hook)).status_code == 201
    uid = (await shared.submit("llama"))["id"]
    await shared.handed_over(uid)
    shared.operate(uid, phase=Phase.QUEUED, code="AwaitingCapacity", because="needs 8 GPUs", since=time.time() - 90)

    async def seen() -> bool:
        return bool((await shared.get(f"/jobs/{uid}"))["status"]["code"] == "AwaitingCapacity")

    async def told(ahead: float) -> int:
        with monkeypatch.context() as clock:
            real = time.time
            clock.setattr(time, "time", lambda: real() + ahead)
            await notify_of_waits(shared.services.database)
        return len((await shared.get("/projects/default/webhooks/hook/deliveries"))["items"])

    await until(seen, "the mirror")
    assert await told(HOUR) == 0
    assert (await shared.client.patch(f"{HOOKS}/hook", json={"waitSeconds": 60})).status_code == 200
    assert await told(-HOUR) == 1
