"""Who did what is written with what was done, and never changed; and nobody asks without end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from tests.integration.api.people import People, bearer, settle
from tests.integration.api.platform import platform

from muster.api.core.errors import ApiError
from muster.api.tenants.rates import RateLimits


@pytest.fixture
async def people(tmp_path: Path, database_url: str) -> AsyncIterator[People]:
    async with platform(tmp_path / "state", database_url=database_url, auth=True) as here:
        yield await settle(here, tmp_path / "state")


async def lines(people: People, who: str = "admin", **wanted: Any) -> list[dict[str, Any]]:
    reply = await people.ask(who, "GET", "/audit", params=wanted)
    assert reply.status_code == 200, reply.text
    items: list[dict[str, Any]] = reply.json()["items"]
    return items


@pytest.mark.both_databases
async def test_who_did_what_is_told_with_before_and_after(people: People) -> None:
    job = people.jobs["nlp"]
    await people.ask("nlp-maintainer", "POST", f"/jobs/{job}:suspend")
    await people.ask("nlp-maintainer", "POST", f"/jobs/{job}:suspend")  # changes nothing, and is no line
    await people.ask("nlp-member", "POST", f"/jobs/{job}:cancel")  # is refused, and is none
    await people.give("nlp", "nlp-viewer", "member")
    runs = {"suspend": False, "cancel": False}
    told = [
        (line["action"], line["person"], line["before"], line["after"])
        for line in await lines(people, project="nlp")
        if line["subject"] in (job, "nlp-viewer")
    ]
    assert told == [
        ("member.changed", "admin", {"role": "viewer"}, {"role": "member"}),
        ("job.suspend_requested", "nlp-maintainer", runs, runs | {"suspend": True}),
        ("job.submitted", "nlp-owner", None, {"name": "nlp-job", "namespace": "nlp"}),
        ("member.changed", "admin", None, {"role": "viewer"}),
    ]  # fmt: skip
    (made, *_) = await lines(people, action="token.made")
    assert (made["address"], set(made["after"])) == ("127.0.0.1", {"name", "person", "scopes"})


@pytest.mark.both_databases
async def test_the_audit_is_read_by_whom_it_concerns_and_by_pages(people: People) -> None:
    assert {line["project"] for line in await lines(people, "nlp-maintainer")} == {"nlp"}
    assert await lines(people, "nlp-member") == []
    everything = await lines(people, limit=1000)
    one_by_one, cursor = [], None
    while True:
        asked = {"limit": 3} | ({"cursor": cursor} if cursor else {})
        page = (await people.ask("admin", "GET", "/audit", params=asked)).json()
        one_by_one += page["items"]
        cursor = page["nextCursor"]
        if not cursor:
            break
    assert one_by_one == everything
    assert "muster_" not in str(everything)


@pytest.mark.both_databases
@pytest.mark.parametrize("change", ["UPDATE audit SET person = 'x'", "DELETE FROM audit"])
async def test_the_database_changes_no_line(people: People, change: str) -> None:
    with pytest.raises((DBAPIError, ApiError), match=r"only ever added to|database_unavailable"):
        async with people.here.services.database.write() as session:
            await session.execute(text(change))
    assert len(await lines(people)) > 0


async def test_a_token_that_asks_too_often_waits(tmp_path: Path) -> None:
    limits = {"requests_burst": 30, "requests_per_second": 0.001}
    async with platform(tmp_path / "state", auth=True, **limits) as here:
        admin = bearer((tmp_path / "state" / "admin-token").read_text().strip())
        made = await here.client.post("/api/v1/tokens", json={"name": "other"}, headers=admin)
        replies = [await here.client.get("/api/v1/me", headers=admin) for _ in range(31)]
        refused = replies[-1]
        assert ({reply.status_code for reply in replies[:29]}, refused.status_code) == ({200}, 429)
        assert int(refused.headers["retry-after"]) > 0
        other = await here.client.get("/api/v1/me", headers=bearer(made.json()["token"]))
        assert other.status_code == 200, "each token has a bucket of its own"


@pytest.mark.both_databases
async def test_a_parameter_of_one_value_is_given_once(people: People) -> None:
    for path in ("/audit?project=nlp&project=cv", "/jobs?project=nlp&project=cv", "/jobs?limit=1&limit=2"):
        assert (await people.ask("admin", "GET", path)).status_code == 422, path
    lists = "/jobs?label=a%3Db&label=c%3Dd&phase=Queued&phase=Running"
    assert (await people.ask("admin", "GET", lists)).status_code == 200


def test_a_bucket_fills_again() -> None:
    limits = RateLimits(per_second=2.0, burst=2)
    assert [limits.take("a", 0.0) for _ in range(3)] == [0.0, 0.0, 0.5]
    assert limits.take("a", 0.5) == 0.0
    assert limits.take("a", 0.5) == 0.5
    assert [limits.take("a", 100.0) for _ in range(3)] == [0.0, 0.0, 0.5], "never fuller than full"
