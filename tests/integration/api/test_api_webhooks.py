"""Webhooks against a receiver with a socket of its own: signed, at least once, whatever the receiver does."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import text
from tests.integration.api.openai_house import chat_file, models_file
from tests.integration.api.platform import Platform, platform, until
from tests.integration.api.webhook_receiver import Receiver, receiver

from muster.api.core.events import repository as events
from muster.api.core.events.types import EventType, NewEvent
from muster.api.tenants.projects.accounting import CountedUsage
from muster.api.webhooks import delivering, sending
from muster.api.webhooks.budgets import notify_of_budgets
from muster.api.webhooks.delivering import DeliverySender
from muster.api.webhooks.reach import NetworkReach
from muster.api.webhooks.service import WebhookServices
from muster.api.webhooks.waits import notify_of_waits
from muster.plan.usage import usage
from muster.words.quotas import MonthSpent, ProjectQuota, Quota, Spent
from muster.words.status import Phase

HOOKS = "/api/v1/projects/default/webhooks"
LOOPBACK = ["127.0.0.0/8"]


@pytest.fixture
def hears() -> Iterator[Receiver]:
    with receiver() as there:
        yield there


@pytest.fixture
async def house(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Platform]:
    monkeypatch.setattr(delivering, "BACKOFF_SECONDS", 0.0)  # refused, a message is due again at once
    options = {"database_url": database_url, "base_models_file": models_file(tmp_path)}
    async with platform(tmp_path / "state", webhook_networks=LOOPBACK, **options) as here:
        yield here


async def make(here: Platform, url: str, name: str = "hook", **more: Any) -> str:
    """The secret."""
    reply = await here.client.post(HOOKS, json={"name": name, "url": url, **more})
    assert reply.status_code == 201, reply.text
    return str(reply.json()["secret"])


async def told(here: Platform, hears: Receiver, path: str, count: int = 1) -> list[dict[str, Any]]:
    async def ask() -> Any:
        await send_due(here)
        found = hears.heard(path)
        return found if len(found) >= count else None

    return await until(ask, f"{count} messages at {path}")


async def send_due(here: Platform) -> None:
    """Do a round of the deliveries now, and see its messages off, instead of waiting for the next round."""
    deliveries = here.services[WebhookServices].deliveries
    await deliveries.step()
    await asyncio.gather(*deliveries._sending, return_exceptions=True)


async def settled(here: Platform, name: str = "hook") -> list[dict[str, Any]]:
    """Its messages, oldest first, once none waits any more."""

    async def ask() -> Any:
        await send_due(here)
        items = (await here.get(f"/projects/default/webhooks/{name}/deliveries"))["items"]
        return items if items and all(item["status"] != "waiting" for item in items) else None

    return list(reversed(await until(ask, "the end of all deliveries")))


def verify(message: dict[str, Any], secret: str) -> None:
    """By a library that is not ours. Raises for a wrong signature."""
    client = openai.OpenAI(api_key="none")
    client.webhooks.verify_signature(message["body"], message["headers"], secret=secret)


async def test_a_job_that_ends_is_told_once_and_signed(house: Platform, hears: Receiver) -> None:
    secret = await make(house, f"{hears.url}/ok/end")
    await make(house, f"{hears.url}/ok/other", "other", kinds=["job.cancelled"])
    job = await house.submit("llama")
    await house.finish(job["id"], Phase.FAILED)
    (message,) = await told(house, hears, "/ok/end")
    verify(message, secret)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        verify({**message, "body": message["body"].replace("llama", "lama")}, secret)
    body = json.loads(message["body"])
    assert (body["type"], body["data"]["project"]) == ("job.failed", "default")
    assert body["data"]["job"] == {"id": job["id"], "name": "llama", "owner": "admin"}
    assert body["data"]["event"]["type"] == "job.failed"
    assert body["data"]["text"] == "llama has failed (project default, admin): done"
    (delivery,) = await settled(house)
    assert (delivery["id"], delivery["status"]) == (message["headers"]["webhook-id"], "delivered")
    assert ([attempt["status"] for attempt in delivery["attempts"]], delivery["body"]) == ([204], message["body"])
    assert hears.heard("/ok/other") == []


@pytest.mark.both_databases
async def test_a_secret_is_shown_once_and_lies_nowhere_in_clear(house: Platform, hears: Receiver) -> None:
    url = f"{hears.url}/ok/T00/hidden-path"
    secret = await make(house, url)
    shown = [
        (await house.client.get(HOOKS)).text,
        (await house.client.get(f"{HOOKS}/hook")).text,
        (await house.client.patch(f"{HOOKS}/hook", json={"enabled": False})).text,
        (await house.client.get("/api/v1/audit")).text,
    ]
    assert secret not in "".join(shown)
    assert "hidden-path" not in shown[-1], "the path of an address is a password to some services"
    async with house.services.database.read() as session:
        rows = str((await session.execute(text("SELECT * FROM webhooks"))).all())
    assert secret not in rows
    assert secret.removeprefix("whsec_") not in rows
    again = await house.client.post(HOOKS, json={"name": "hook", "url": url})
    assert (again.status_code, again.json()["code"]) == (409, "webhook_exists")


@pytest.mark.both_databases
async def test_a_rotated_secret_signs_beside_the_old_one_while_they_overlap(house: Platform, hears: Receiver) -> None:
    old = await make(house, f"{hears.url}/ok/rotated")
    new = (await house.client.post(f"{HOOKS}/hook:rotate")).json()["secret"]
    assert (await house.client.post(f"{HOOKS}/hook:test")).json()["status"] == "delivered"
    (both,) = hears.heard("/ok/rotated")
    verify(both, old)
    verify(both, new)
    newest = (await house.client.post(f"{HOOKS}/hook:rotate", json={"overlapHours": 0})).json()["secret"]
    await house.client.post(f"{HOOKS}/hook:test")
    alone = hears.heard("/ok/rotated")[-1]
    verify(alone, newest)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        verify(alone, new)


@pytest.mark.both_databases
async def test_what_is_refused_is_sent_again_under_its_id_until_it_is_taken(house: Platform, hears: Receiver) -> None:
    await make(house, f"{hears.url}/500/2", kinds=["job.succeeded"])
    await house.finish((await house.submit())["id"])
    messages = await told(house, hears, "/500/2", 3)
    assert len({message["headers"]["webhook-id"] for message in messages}) == 1
    assert len({message["body"] for message in messages}) == 1
    (delivery,) = await settled(house)
    assert [attempt["status"] for attempt in delivery["attempts"]] == [500, 500, 204]
    count = house.services.metrics.registry.get_sample_value

    async def counted() -> bool:
        return count("muster_api_webhook_attempts_total", {"outcome": "delivered"}) == 1.0

    await until(counted, "its count")
    assert count("muster_api_webhook_attempts_total", {"outcome": "retried"}) == 2.0
    assert count("muster_api_webhook_seconds_count") == 3.0


@pytest.mark.both_databases
async def test_what_waits_is_measured_but_not_of_a_webhook_that_is_off(house: Platform, hears: Receiver) -> None:
    await make(house, f"{hears.url}/500/1", kinds=["job.cancelled"])
    deliveries, count = house.services[WebhookServices].deliveries, house.services.metrics.registry.get_sample_value
    await _cancelled(house)
    await send_due(house)  # it is given up now, not while we measure
    async with house.services.database.write() as session:
        await session.execute(
            text("UPDATE webhook_deliveries SET status = 'waiting', next_at = 9e12, created_at = created_at - 3600")
        )
    await deliveries.measure()
    assert count("muster_api_webhook_waiting") == 1.0
    assert 3600 <= (count("muster_api_webhook_oldest_seconds") or 0.0) < 3700
    await house.client.patch(f"{HOOKS}/hook", json={"enabled": False})
    await deliveries.measure()
    assert (count("muster_api_webhook_waiting"), count("muster_api_webhook_oldest_seconds")) == (0.0, 0.0)


@pytest.mark.both_databases
async def test_a_message_is_given_up_after_its_time_and_may_be_replayed(house: Platform, hears: Receiver) -> None:
    await make(house, f"{hears.url}/500/1")
    await house.client.patch(f"{HOOKS}/hook", json={"kinds": ["job.cancelled"]})
    await _cancelled(house)
    async with house.services.database.write() as session:
        await session.execute(text("UPDATE webhook_deliveries SET give_up_at = 0"))
    (given_up,) = await _until_failed(house)
    count = house.services.metrics.registry.get_sample_value
    await house.services[WebhookServices].deliveries.measure()
    assert count("muster_api_webhook_attempts_total", {"outcome": "given_up"}) == 1.0
    assert (count("muster_api_webhook_waiting"), count("muster_api_webhook_oldest_seconds")) == (0.0, 0.0)
    replay = f"{HOOKS}/hook/deliveries/{given_up['id']}:replay"
    assert (await house.client.post(replay)).json()["status"] == "waiting"
    (delivered,) = await settled(house)
    assert (delivered["id"], delivered["status"]) == (given_up["id"], "delivered")
    unknown = await house.client.post(f"{HOOKS}/hook/deliveries/msg_none:replay")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "delivery_not_found")


async def _cancelled(here: Platform) -> None:
    """A message that waits, for the receiver is off while it is written."""
    job = await here.submit("gone")
    await here.handed_over(job["id"])
    async with here.services.database.write() as session:
        await events.append(session, job["id"], [NewEvent(EventType.JOB_CANCELLED, time.time(), "told to")])
        await session.execute(text("UPDATE webhook_deliveries SET give_up_at = 0"))


async def _until_failed(here: Platform) -> list[dict[str, Any]]:
    async def ask() -> Any:
        await send_due(here)
        return (await here.get("/projects/default/webhooks/hook/deliveries", status="failed"))["items"]

    return list(await until(ask, "a message that is given up"))


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("500", 500, "answered 500"),
        ("redirect", 302, "a redirect, which is not followed"),
        ("skewed", 401, "s ahead of the API's, and signatures are taken for 300 s: set the clocks"),
        ("busy", 503, "answered 503"),
        ("never", None, "no answer within 0.5 s"),
    ],
)
async def test_what_a_receiver_does_wrong_is_said(
    tmp_path: Path, hears: Receiver, monkeypatch: pytest.MonkeyPatch, path: str, status: int | None, words: str
) -> None:
    if path == "never":
        monkeypatch.setattr(sending, "SEND_SECONDS_MAX", 0.5)
    async with platform(tmp_path / "state", webhook_networks=LOOPBACK) as here:
        await make(here, f"{hears.url}/{path}")
        delivery = (await here.client.post(f"{HOOKS}/hook:test")).json()
    (attempt,) = delivery["attempts"]
    assert (delivery["status"], attempt["status"]) == ("failed", status)
    assert words in attempt["error"]


async def test_a_body_of_ten_gigabytes_is_not_read(tmp_path: Path, hears: Receiver) -> None:
    async with platform(tmp_path / "state", webhook_networks=LOOPBACK) as here:
        await make(here, f"{hears.url}/huge")
        assert (await here.client.post(f"{HOOKS}/hook:test")).json()["status"] == "delivered"

        async def left() -> bool:
            return hears.sent_bytes is not None

        await until(left, "the receiver to see that its reader has gone")
    assert (hears.sent_bytes or 0) < 64 << 20  # what two sockets hold at most


async def test_a_receiver_that_is_not_there_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with platform(tmp_path / "state", webhook_networks=LOOPBACK) as here:
        await make(here, f"http://127.0.0.1:{port}/")
        (attempt,) = (await here.client.post(f"{HOOKS}/hook:test")).json()["attempts"]
    assert (attempt["status"], attempt["error"]) == (
        None,
        "no connection or no answer of HTTP: ClientConnectorError",
    )


def _resolves(monkeypatch: pytest.MonkeyPatch, answers: list[str]) -> None:
    """Names resolve to each of these in turn, and to the last from then on."""

    def resolve(host: str, port: Any, *_: Any, **__: Any) -> list[Any]:
        address = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


async def test_a_name_that_leads_home_later_is_refused_when_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with platform(tmp_path / "state") as here:
        _resolves(monkeypatch, ["8.8.8.8", "127.0.0.1"])
        await make(here, "https://hooks.example/x")
        (attempt,) = (await here.client.post(f"{HOOKS}/hook:test")).json()["attempts"]
    assert attempt["status"] is None
    assert attempt["error"] == (
        "hooks.example is an address of this machine or of a private network, which an administrator may allow "
        "(MUSTER_API_WEBHOOK_NETWORKS)"
    )


async def test_the_address_that_was_checked_is_the_one_that_is_told(
    tmp_path: Path, hears: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is resolved once more would lead elsewhere, where nobody answers."""
    async with platform(tmp_path / "state", webhook_networks=LOOPBACK) as here:
        _resolves(monkeypatch, ["127.0.0.1", "127.0.0.1", "127.0.0.2"])
        await make(here, f"http://hooks.example:{hears.port}/ok/checked")
        assert (await here.client.post(f"{HOOKS}/hook:test")).json()["status"] == "delivered"
    assert hears.heard("/ok/checked")[0]["headers"]["host"] == f"hooks.example:{hears.port}"


async def test_wrong_webhooks_are_refused_with_the_place(house: Platform) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"url": "https://169.254.169.254/latest"}, "url"),
        ({"url": "https://metadata.google.internal/"}, "url"),
        ({"url": "https://[fe80::1]/"}, "url"),
        ({"url": "https://10.0.0.1/"}, "url"),
        ({"url": "https://[::ffff:10.0.0.1]/"}, "url"),
        ({"url": "https://[64:ff9b::a00:1]/"}, "url"),
        ({"url": "http://8.8.8.8/"}, "url"),
        ({"url": "https://2130706433/"}, "url"),
        ({"url": "https://0x7f.1/"}, "url"),
        ({"url": "https://user@example.com/"}, "url"),
        ({"url": "https://example.com\\@10.0.0.1/"}, "url"),
        ({"url": "ftp://example.com/"}, "url"),
        ({"url": "https://example.com:99999/"}, "url"),
        ({"kinds": ["job.exploded"]}, "kinds[0]"),
        ({"kinds": []}, "kinds"),
        ({"preset": "teams"}, "preset"),
        ({"waitSeconds": 1}, "waitSeconds"),
        ({"name": "Hook"}, "name"),
        ({"secret": "whsec_mine"}, "secret"),
    ]
    for fields, place in wrong:
        body = {"name": "hook", "url": "https://8.8.8.8/x", **fields}
        reply = await house.client.post(HOOKS, json=body)
        assert (reply.status_code, reply.json()["code"]) == (422, "invalid_webhook"), (fields, reply.text)
        assert reply.json()["errors"][0]["path"] == place, (fields, reply.text)
    assert (await house.client.get(HOOKS)).json()["items"] == []


async def test_slack_is_told_in_its_own_form(house: Platform, hears: Receiver) -> None:
    await make(house, f"{hears.url}/ok/slack", preset="slack", kinds=["job.failed"])
    job = await house.submit("llama")
    await house.handed_over(job["id"])
    async with house.services.database.write() as session:
        failed = NewEvent(EventType.JOB_FAILED, time.time(), "<!channel> a & b")
        await events.append(session, job["id"], [failed])
    (message,) = await told(house, hears, "/ok/slack")
    assert json.loads(message["body"]) == {
        "text": "llama has failed (project default, admin): &lt;!channel&gt; a &amp; b"
    }


@pytest.mark.both_databases
async def test_openais_library_takes_what_is_told_of_a_fine_tuning_job(
    house: Platform, hears: Receiver, tmp_path: Path
) -> None:
    """Of a job that did not come by /v1/fine_tuning such a receiver is told nothing."""
    secret = await make(house, f"{hears.url}/ok/openai", preset="openai")
    await house.finish((await house.submit("plain"))["id"])
    asked = {"model": "tiny", "training_file": chat_file(tmp_path, examples=20)}
    made = (await house.client.post("/v1/fine_tuning/jobs", json=asked)).json()["id"]
    await house.finish(made.removeprefix("ftjob-"))
    (message,) = await told(house, hears, "/ok/openai")
    client = openai.OpenAI(api_key="none", webhook_secret=secret)
    event = client.webhooks.unwrap(message["body"], message["headers"])
    assert (event.type, event.object, event.data.id) == ("fine_tuning.job.succeeded", "event", made)


async def test_a_restart_is_told_to_who_asked_for_it(house: Platform, hears: Receiver) -> None:
    secret = await make(house, f"{hears.url}/ok/restarts", kinds=["job.restarting"])
    await make(house, f"{hears.url}/ok/ends", "ends", kinds=["job.failed"])
    job = await house.submit("llama")
    await house.handed_over(job["id"])
    house.operate(job["id"], phase=Phase.RUNNING, code="Training", because="trains", attempt=1)
    await house.phase(job["id"], Phase.RUNNING)
    house.operate(job["id"], phase=Phase.RESTARTING, code="BackingOff", because="again in 8 s")
    (message,) = await told(house, hears, "/ok/restarts")
    verify(message, secret)
    body = json.loads(message["body"])
    assert (body["type"], body["data"]["job"]["name"]) == ("job.restarting", "llama")
    assert body["data"]["text"].startswith("llama restarts (project default, admin): ")
    await house.finish(job["id"])
    assert [each["kind"] for each in await settled(house)] == ["job.restarting"]
    assert hears.heard("/ok/ends") == []


@pytest.mark.both_databases
async def test_a_long_wait_is_told_once(house: Platform, hears: Receiver) -> None:
    await make(house, f"{hears.url}/ok/waits", kinds=["job.waits_long"], waitSeconds=60)
    job = await house.submit("llama")
    await house.handed_over(job["id"])
    await notify_of_waits(house.services.database)
    house.operate(
        job["id"], phase=Phase.QUEUED, code="AwaitingCapacity", because="needs 8 GPUs", since=time.time() - 90
    )

    async def seen() -> bool:
        return bool((await house.get(f"/jobs/{job['id']}"))["status"]["code"] == "AwaitingCapacity")

    await until(seen, "the mirror")
    for _ in range(2):
        await notify_of_waits(house.services.database)
    (message,) = await told(house, hears, "/ok/waits")
    data = json.loads(message["body"])["data"]
    assert (data["phase"], data["because"], data["limitSeconds"]) == ("Queued", "needs 8 GPUs", 60.0)
    assert len(await settled(house)) == 1


async def test_a_budget_is_told_at_eighty_per_cent_and_when_it_is_used_up(house: Platform, hears: Receiver) -> None:
    await make(house, f"{hears.url}/ok/budget", kinds=["budget.reached"])
    quota = {"default": ProjectQuota(gpu_hours_per_month=100.0, person=Quota(money_per_month=10.0))}
    for used in (79.0, 81.0, 90.0, 120.0, 130.0):
        people = {"ann": Spent(money=used / 20), "bob": Spent(gpu_hours=used, money=used / 12)}
        spent = MonthSpent(month="2026-11", as_of=1.0, total=Spent(gpu_hours=used), people=people)
        nothing = usage([], house.services.prices, 0.0, 1.0, 1.0)
        counted = {"default": CountedUsage(nothing, spent)}
        await notify_of_budgets(house.services.database, quota, counted)
    messages = await told(house, hears, "/ok/budget", 3)
    budgets = [json.loads(message["body"])["data"]["budget"] for message in messages]
    assert sorted((each["person"] or "", each["unit"], each["percent"], each["used"]) for each in budgets) == [
        ("", "gpuHours", 80, 81.0),
        ("", "gpuHours", 100, 120.0),
        ("bob", "money", 100, 10.0),
    ]
    texts = [json.loads(message["body"])["data"]["text"] for message in messages]
    assert [words for words in texts if "bob" in words] == [
        "Budget: bob in project default has used 100 % of 10 (in the prices' currency) in 2026-11 (10)"
    ]
    assert len(await settled(house)) == 3


async def test_what_is_not_committed_is_not_told_and_what_is_committed_is(house: Platform, hears: Receiver) -> None:
    await make(house, f"{hears.url}/ok/outbox")
    job = await house.submit("llama")
    await house.handed_over(job["id"])

    async def fail(crashes: bool) -> None:
        async with house.services.database.write() as session:
            await events.append(session, job["id"], [NewEvent(EventType.JOB_FAILED, time.time(), str(crashes))])
            if crashes:
                raise KeyError("a crash before the checkpoint")

    with pytest.raises(KeyError):
        await fail(True)
    await fail(False)
    (message,) = await told(house, hears, "/ok/outbox")
    assert json.loads(message["body"])["data"]["event"]["message"] == "False"
    assert len(await settled(house)) == 1


@pytest.mark.both_databases
async def test_two_processes_send_each_message_once(house: Platform, hears: Receiver) -> None:
    await make(house, f"{hears.url}/ok/two")
    job = await house.submit("llama")
    await house.handed_over(job["id"])
    services = house.services
    other = DeliverySender(
        services.database,
        services[WebhookServices].sealing,
        NetworkReach(services.settings.webhook_networks),
        services.metrics.webhooks,
    )
    async with services.database.write() as session:
        failed = [NewEvent(EventType.JOB_FAILED, time.time(), str(number)) for number in range(30)]
        await events.append(session, job["id"], failed)

    async def ask() -> bool:
        services[WebhookServices].deliveries.freed.set()
        await other.step()
        return len(hears.heard("/ok/two")) >= 30

    await until(ask, "30 messages")
    await settled(house)
    await other.stop()
    ids = [message["headers"]["webhook-id"] for message in hears.heard("/ok/two")]
    assert len(ids) == len(set(ids)) == 30


@pytest.mark.both_databases
async def test_a_claim_that_ran_out_is_taken_up_under_the_same_id(
    house: Platform, hears: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies between the delivery and its record: twice with one id, and never lost."""
    await make(house, f"{hears.url}/ok/died")
    record = DeliverySender._record
    died: list[str] = []

    async def dies_once(self: DeliverySender, claimed: Any, result: Any) -> None:
        if not died:
            died.append(claimed.message.id)
            return
        await record(self, claimed, result)

    monkeypatch.setattr(DeliverySender, "_record", dies_once)
    await house.finish((await house.submit())["id"])
    await told(house, hears, "/ok/died")

    async def has_died() -> bool:
        return bool(died)

    await until(has_died, "the death")
    async with house.services.database.write() as session:  # the time is up for which it is waited for
        await session.execute(text("UPDATE webhook_deliveries SET next_at = 0"))
    messages = await told(house, hears, "/ok/died", 2)
    assert [message["headers"]["webhook-id"] for message in messages] == died * 2
    (delivery,) = await settled(house)
    assert delivery["status"] == "delivered"
