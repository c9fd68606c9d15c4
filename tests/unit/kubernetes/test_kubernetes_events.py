"""Events: told at once where there is little to tell; in a burst fewer of them tell all the same."""

import asyncio
from typing import Any, cast

from tests.polling import WAIT_SECONDS_MAX
from tests.unit.core.seen import observed
from tests.unit.kubernetes.making import JOB_UID, job_item

from muster.kube.client import ApiClient
from muster.operator.core.observed import ObservedJob
from muster.operator.kubernetes.events import EventWriter
from muster.operator.kubernetes.render import SiteSettings
from muster.operator.kubernetes.world import KubernetesWorld
from muster.operator.pacing import EVENT_WRITES_BURST
from muster.recipe.document import JobSpec


class Server:
    """enough: how many events a test waits for."""

    def __init__(self, enough: int) -> None:
        self.made: list[dict[str, Any]] = []
        self._enough, self.told = enough, asyncio.Event()

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.made.append(body)
        if len(self.made) >= self._enough:
            self.told.set()
        return body


def job(number: int) -> ObservedJob:
    return observed(uid=f"u{number}", name=f"job-{number}")


async def told_by(teller: EventWriter, server: Server) -> None:
    task = asyncio.create_task(teller.run())
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        await server.told.wait()
    task.cancel()


async def test_a_few_are_told_one_by_one_and_at_once() -> None:
    server = Server(5)
    teller = EventWriter(cast(ApiClient, server), "me")
    for number in range(5):
        teller.tell(job(number), "Starting", "4 workers start")
    await told_by(teller, server)
    assert {(body["reason"], body["note"], body["type"]) for body in server.made} == {
        ("Starting", "4 workers start", "Normal")
    }


async def test_in_a_burst_what_is_bad_comes_first() -> None:
    server = Server(EVENT_WRITES_BURST + 2)
    teller = EventWriter(cast(ApiClient, server), "me")
    for number in range(EVENT_WRITES_BURST + 1):
        teller.tell(job(number), "Starting", "4 workers start")
    teller.tell(job(EVENT_WRITES_BURST + 1), "Hang", "no step", bad=True)
    await told_by(teller, server)
    assert [body["reason"] for body in server.made[:2]] == ["Hang", "Starting"]


async def test_of_a_burst_everything_is_told_in_fewer_events() -> None:
    count = EVENT_WRITES_BURST + 20
    server = Server(count)
    teller = EventWriter(cast(ApiClient, server), "me")
    for reason in ("Starting", "Running", "Succeeded"):
        for number in range(count):
            teller.tell(job(number), reason, f"{reason} it is")
    await told_by(teller, server)
    for body in server.made:
        assert all(f"{reason}: {reason} it is" in body["note"] for reason in ("Starting", "Running", "Succeeded"))
        assert (body["reason"], body["type"]) == ("Succeeded", "Normal")


async def test_what_is_bad_is_told_as_bad_and_what_is_long_in_several() -> None:
    server = Server(2)
    teller = EventWriter(cast(ApiClient, server), "me")
    teller.tell(job(0), "Hang", "x" * 800, bad=True)
    teller.tell(job(0), "Running", "again")
    teller.tell(job(0), "Succeeded", "y" * 800)
    await told_by(teller, server)
    first, second = server.made
    assert (first["type"], first["reason"]) == ("Warning", "Hang")
    assert "Running: again" in first["note"]
    assert (second["type"], second["reason"], second["note"]) == ("Normal", "Succeeded", "y" * 800)


class StatusServer(Server):
    """Takes statuses, too."""

    async def patch(self, path: str, body: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {"metadata": job_item(version=8)["metadata"]}

    async def put(self, path: str, body: dict[str, Any], accept: str = "") -> dict[str, Any]:
        return {"metadata": job_item(version=9)["metadata"]}


async def test_a_job_that_can_not_be_read_is_told_of() -> None:
    server = StatusServer(1)
    events = EventWriter(cast(ApiClient, server), "me")
    world = KubernetesWorld(
        cast(ApiClient, server), "muster-system", SiteSettings(image="trainer"), JobSpec, on_refusal=events.refused
    )
    item = job_item()
    world.job_cache.keep(item | {"spec": item["spec"] | {"gang": {"nodes": "four"}}})
    assert await world.observe(JOB_UID, fresh=False) is None
    await told_by(events, server)
    (event,) = server.made
    assert (event["reason"], event["type"], event["regarding"]["uid"]) == ("InvalidSpec", "Warning", JOB_UID)
    assert "gang.nodes" in event["note"]
