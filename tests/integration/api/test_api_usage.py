"""Usage over the API: right across attempts and sizes, as JSON and CSV, and kept when the job's record is deleted."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, platform, until

from muster.api.tenants.projects.accounting import UsageAccounting, spent_of
from muster.api.tenants.projects.quotas import QuotaWriter
from muster.words.months import month_of, month_range
from muster.words.quotas import ProjectQuota, read_quotas
from muster.words.status import Attempt, Phase

HOUR = 3600.0
BEGAN = month_range("2026-03")[0] + 5 * HOUR
PRICES = {"types": {"big": {"gpus": 8, "onDemand": 40.0, "spot": 10.0}}}


def attempt(number: int, since: float, until: float | None, **more: Any) -> Attempt:
    end = None if until is None else BEGAN + until * HOUR
    known = {"workers": 2, "gpus_per_worker": 8, "instance_type": "big", "capacity": "spot", "outcome": "failed"}
    return Attempt(number=number, created_at=BEGAN + since * HOUR, ended_at=end, **known | more)


@pytest.fixture
async def used(tmp_path: Path, database_url: str) -> Any:
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps(PRICES))
    async with platform(tmp_path / "state", database_url=database_url, prices_file=prices) as here:
        yield here


async def usage(here: Platform, **asked: Any) -> Any:
    return await here.get("/projects/default/usage", **asked or {"month": "2026-03"})


async def hours(here: Platform, expected: float) -> Any:
    """The usage, once it has come to so many GPU-hours."""

    async def ask() -> Any:
        found = await usage(here)
        return found if found["total"]["gpuHours"] == pytest.approx(expected) else None

    return await until(ask, f"{expected} GPU-hours")


async def test_what_was_used_is_counted_as_soon_as_the_rows_are_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round after the first would be much later."""
    monkeypatch.setattr("muster.api.tenants.registration.ACCOUNTING_SECONDS", 1e9)

    async with platform(tmp_path / "state") as here:

        async def shown() -> bool:
            return 'muster_api_project_gpu_hours{project="default"} 0.0' in (await here.client.get("/metrics")).text

        assert await until(shown, "the first count")


@pytest.mark.both_databases
async def test_attempts_sizes_and_a_deleted_job(used: Platform) -> None:
    """3 h on two nodes (a third of it lost), then 2 h on one: 64 GPU-hours, 8 node-hours at 10 instead of 40."""
    uid = (await used.submit("sft"))["id"]
    await used.handed_over(uid)
    first = attempt(1, 0, 3, seconds={"productive": 2 * HOUR, "lost": HOUR})
    used.operate(uid, phase=Phase.RUNNING, attempts=(attempt(1, 0, None, outcome="running"),))
    used.operate(uid, phase=Phase.RUNNING, attempts=(first, attempt(2, 4, 6, workers=1, outcome="resized")))
    told = await hours(used, 64.0)
    want = {
        "nodeHours": 8.0,
        "cost": 80.0,
        "saved": 240.0,
        "lostGpuHours": 16.0,
        "lostCost": 20.0,
        "unpricedHours": 0.0,
    }
    for group in (told["total"], *told["lines"], *told["people"], *told["months"]):
        assert {key: pytest.approx(group[key]) for key in want} == want
    assert [(line["month"], line["job"], line["name"], line["person"]) for line in told["lines"]] == [
        ("2026-03", uid, "sft", "admin")
    ]
    await used.finish(uid)
    used.cluster.remove(uid)
    assert (await used.client.delete(f"/api/v1/jobs/{uid}")).status_code == 204
    assert (await used.client.get(f"/api/v1/jobs/{uid}")).status_code == 404
    assert (await usage(used))["lines"] == told["lines"]
    table = await used.client.get("/api/v1/projects/default/usage?month=2026-03", headers={"accept": "text/csv"})
    assert table.headers["content-type"].startswith("text/csv")
    (line,) = csv.DictReader(io.StringIO(table.text))
    assert (line["project"], line["job"], float(line["gpuHours"]), float(line["cost"])) == ("default", uid, 64.0, 80.0)
    forced = await used.client.get("/api/v1/projects/default/usage?month=2026-03&format=csv")
    assert forced.text == table.text


@pytest.mark.both_databases
async def test_a_living_gang_counts_until_now_and_a_removed_one_no_longer(used: Platform) -> None:
    uid = (await used.submit("lives"))["id"]
    await used.handed_over(uid)
    began = time.time() - HOUR
    living = Attempt(number=1, created_at=began, workers=2, gpus_per_worker=8, instance_type="unheard-of")
    used.operate(uid, phase=Phase.RUNNING, attempts=(living,))

    async def counted() -> Any:
        since = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(began - HOUR))}Z"
        return (found := await usage(used, since=since))["lines"] and found

    told = await until(counted, "the living gang")
    assert told["total"]["gpuHours"] == pytest.approx(16.0, rel=0.05)
    assert told["total"]["unpricedHours"] == pytest.approx(2.0, rel=0.05)
    assert any("no on-demand price of unheard-of" in note for note in told["notes"])
    assert any("held nodes at the time of this report" in note for note in told["notes"])
    used.cluster.remove(uid)  # by force, so that nobody says that its attempt ended

    async def closed() -> Any:
        found = await counted()
        return not any("held nodes" in note for note in found["notes"]) and found

    ended = await until(closed, "the end of its usage")
    assert (await counted())["total"] == ended["total"], "nothing is added any more"


@pytest.mark.both_databases
async def test_what_another_scheduler_never_placed_is_not_counted(used: Platform) -> None:
    ids = [(await used.submit(name))["id"] for name in ("waits", "runs")]
    for each in ids:
        await used.handed_over(each)
    used.operate(ids[0], phase=Phase.STARTING, attempts=(attempt(1, 0, None, outcome="waiting"),))
    used.operate(ids[0], phase=Phase.SUSPENDED, attempts=(attempt(1, 0, 9, outcome="suspended"),))
    used.operate(ids[1], phase=Phase.RUNNING, attempts=(attempt(1, 0, 1),))
    told = await hours(used, 16.0)
    assert [line["name"] for line in told["lines"]] == ["runs"]


REFUSED = {
    "month=2026-13": "query.month: must be a month",
    "month=2026-11&since=2026-11-01T00:00:00Z": "query.month",
    "until=2026-11-01T00:00:00Z": "query.until: needs since",
    "since=yesterday": "query.since: 'yesterday' is no time of RFC 3339",
    "since=2026-11-02T00:00:00Z&until=2026-11-01T00:00:00Z": "query.since: must be before until",
    "since=2020-11-02T00:00:00Z&until=2026-11-01T00:00:00Z": "at most 400 days",
    "format=xml": "query.format",
    "mont=2026-11": "Did you mean 'month'",
}


async def test_a_range_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    async with platform(tmp_path / "state") as here:
        for asked, fault in REFUSED.items():
            reply = await here.client.get(f"/api/v1/projects/default/usage?{asked}")
            assert (reply.status_code, reply.json()["code"]) == (422, "invalid_parameter")
            assert fault in reply.text, asked
        this_month = await here.get("/projects/default/usage")
        assert this_month["since"] == (await here.get("/projects/default/usage", month=month_of(time.time())))["since"]


async def test_a_budget_goes_to_the_operator_with_what_was_used_and_nobody_else_says_that(used: Platform) -> None:
    services, now = used.services, time.time()
    current = [False]

    told = UsageAccounting(services.database, services.prices, services.metrics, lambda: current[0])
    writer = QuotaWriter(services.database, used.services.cluster, lambda: spent_of(told.counted))

    def kept() -> ProjectQuota | None:
        return read_quotas(used.cluster.quotas(), {})[0].get("default")

    uid = (await used.submit("sft"))["id"]
    await used.handed_over(uid)
    began = max(now - HOUR, month_range(month_of(now))[0])
    known = {"workers": 2, "gpus_per_worker": 8, "instance_type": "big", "outcome": "failed"}
    used.operate(uid, phase=Phase.RUNNING, attempts=(Attempt(number=1, created_at=began, ended_at=now, **known),))

    async def counted() -> Any:
        return (await usage(used, month=month_of(now)))["lines"]

    (line,) = await until(counted, "its usage")
    await services.background.stop()  # which counts and hands over, too
    budget = {"gpuHoursPerMonth": 2 * line["gpuHours"], "person": {"moneyPerMonth": 0}}
    put = await used.client.put("/api/v1/projects/default", json={"limits": {"quota": budget}})
    assert put.status_code == 200, put.text
    await told.step()
    await writer.step()
    assert kept() is None, "a budget is not handed over before anything was counted"
    current[0] = True
    await told.step()
    await writer.step()
    quota = kept()
    assert quota is not None
    assert quota.spent is not None
    assert quota.gpu_hours_per_month == budget["gpuHoursPerMonth"]
    assert quota.spent.month == month_of(now)
    assert now <= quota.spent.as_of <= time.time()
    for amounts in (quota.spent.total, quota.spent.people["admin"]):
        assert (amounts.gpu_hours, amounts.money) == pytest.approx((line["gpuHours"], line["cost"]), rel=1e-4)
    page = (await used.client.get("/metrics")).text
    assert f'muster_api_project_cost{{project="default"}} {line["cost"]}'[:50] in page
    ratio = 'muster_api_project_budget_ratio{project="default",unit="gpu_hours",whose="project"} 0.5'
    assert ratio in page
    assert "admin" not in page, "who uses what is for those who see the project"
    as_of = quota.spent.as_of
    current[0] = False
    await told.step()
    await writer.step()
    quota = kept()
    assert quota is not None
    assert quota.spent is not None
    assert quota.spent.as_of == as_of, "while the cluster is not heard of, the operator adds what runs"
    made_up = {"spent": {"month": "2026-11", "asOf": 1.0}}
    put = await used.client.put("/api/v1/projects/default", json={"limits": {"quota": budget | made_up}})
    assert (put.status_code, put.json()["errors"][0]["message"]) == (422, "spent is counted by the API: leave it out")
