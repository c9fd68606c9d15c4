"""Projects, people, roles: what a job may name, whose it is, and what becomes of what was open when a role is gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text, update
from tests.integration.api.people import People, bearer, settle
from tests.integration.api.platform import Platform, document, frames, platform, served, until
from tests.polling import WAIT_SECONDS_MAX

from muster.api.core.database.tables import TokenRow
from muster.api.tenants.authentication import CallerAuthentication
from muster.api.tenants.projects.quotas import QuotaWriter
from muster.recipe.document import JobSpec, parse_job
from muster.words.names import Label
from muster.words.quotas import ProjectQuota, Quota, read_quotas

ENV = {"runtime": {"env": [{"name": "WANDB_PROJECT", "value": "apollo"}, {"name": "HF_TOKEN", "value": "hf_1"}]}}


@pytest.fixture
async def people(tmp_path: Path) -> AsyncIterator[People]:
    async with platform(tmp_path / "state", auth=True) as here:
        yield await settle(here, tmp_path / "state")


def values(job: dict[str, Any]) -> list[str]:
    return [each["value"] for each in job["spec"]["runtime"]["env"]]


async def test_values_of_variables_are_their_owners_alone(people: People) -> None:
    made = (await people.submit("nlp-owner", "apollo", **ENV)).json()
    shown = {}
    for who in ("nlp-owner", "nlp-member", "nlp-maintainer", "admin"):
        reply = await people.ask(who, "GET", f"/jobs/{made['id']}")
        shown[who] = values(reply.json())
    assert shown.pop("nlp-owner") == ["apollo", "***"]
    assert set(map(tuple, shown.values())) == {("***", "***")}
    suspended = await people.ask("nlp-maintainer", "POST", f"/jobs/{made['id']}:suspend")
    assert values(suspended.json()) == ["***", "***"]


async def test_a_clone_by_somebody_else_says_what_must_be_filled_in(people: People) -> None:
    made = (await people.submit("nlp-owner", "apollo", **ENV)).json()
    place = f"/jobs/{made['id']}:clone"
    own = await people.ask("nlp-owner", "POST", place, json={})
    assert (own.status_code, values(own.json())) == (201, ["apollo", "***"])
    refused = await people.ask("nlp-member", "POST", place, json={})
    paths = [fault["path"] for fault in refused.json()["errors"]]
    assert (refused.status_code, paths) == (422, ["spec.runtime.env[0].value", "spec.runtime.env[1].value"])
    assert "put the real value in its place" in refused.json()["errors"][0]["message"]
    filled = {"spec": {"runtime": {"env": [{"name": "WANDB_PROJECT", "value": "mine"}]}}}
    cloned = await people.ask("nlp-member", "POST", place, json=filled)
    assert (cloned.status_code, cloned.json()["metadata"]["owner"]) == (201, "nlp-member")
    async with people.here.services.database.read() as session:
        stored = (await session.execute(text("SELECT spec FROM jobs WHERE owner = 'nlp-member'"))).scalar_one()
    assert "apollo" not in stored
    assert "hf_1" not in stored


async def test_a_job_carries_project_and_owner_into_the_cluster(people: People) -> None:
    made = (await people.submit("cv-owner", "seen")).json()
    assert (made["metadata"]["project"], made["metadata"]["owner"]) == ("cv", "cv-owner")
    assert made["metadata"]["namespace"] == "cv"
    people.here.client.headers.update(people.admin)
    await people.here.handed_over(made["id"])
    labels = people.here.cluster.get(made["id"]).metadata.labels
    assert labels == {Label.PROJECT: "cv", Label.OWNER: "cv-owner"}


async def test_nobody_says_whose_a_job_is(people: People) -> None:
    body = document("mine")
    body["metadata"]["labels"] = {Label.OWNER: "nlp-owner", "team": "x"}
    made = (await people.ask("nlp-member", "POST", "/jobs", json=body)).json()
    assert (made["metadata"]["owner"], made["metadata"]["labels"]) == ("nlp-member", {"team": "x"})


async def test_lists_tell_of_ones_own_projects_and_filter(people: People) -> None:
    async def names(who: str, **filters: str) -> list[str]:
        reply = await people.ask(who, "GET", "/jobs", params=filters)
        return sorted(item["name"] for item in reply.json()["items"])

    assert await names("nlp-viewer") == ["nlp-job"]
    assert await names("nlp-viewer", project="cv") == []
    assert await names("admin") == ["cv-job", "nlp-job"]
    assert await names("admin", project="cv", owner="cv-owner") == ["cv-job"]
    assert await names("admin", owner="nobody") == []


async def test_a_token_of_one_project_opens_no_other_of_its_person(people: People) -> None:
    await people.give("cv", "nlp-owner", "maintainer")
    people.headers["bound"] = bearer((await people.token("nlp-owner", "nlp", "write"))["token"])
    assert (await people.ask("nlp-owner", "GET", f"/jobs/{people.jobs['cv']}")).status_code == 200
    assert (await people.ask("bound", "GET", f"/jobs/{people.jobs['cv']}")).status_code == 404
    assert (await people.submit("bound", "there", "cv")).json()["code"] == "project_not_found"
    wider = {"name": "wider", "allProjects": True}
    people.headers["manages"] = bearer((await people.token("nlp-owner", "nlp"))["token"])
    assert (await people.ask("manages", "POST", "/tokens", json=wider)).status_code == 403
    me = (await people.ask("bound", "GET", "/me")).json()
    assert (me["person"], me["project"], me["roles"]) == ("nlp-owner", "nlp", {"nlp": "member"})


async def test_nobody_makes_a_token_that_acts_as_somebody_else(people: People) -> None:
    async def make(who: str, **wanted: Any) -> tuple[int, str]:
        reply = await people.ask(who, "POST", "/tokens", json={"name": "t", "project": "nlp", **wanted})
        return reply.status_code, reply.json().get("code", "")

    await people.ask("admin", "PUT", "/people/robot", json={"kind": "service"})
    assert await make("nlp-maintainer", person="nlp-owner") == (403, "forbidden")
    assert await make("nlp-maintainer", person="admin") == (403, "forbidden")
    assert await make("nlp-maintainer", person="robot") == (403, "forbidden"), "not a member of the project yet"
    assert await make("admin", person="robot") == (422, "invalid_token")
    await people.give("nlp", "robot", "member")
    assert await make("nlp-maintainer", person="robot") == (201, "")
    assert await make("nlp-member", person="robot") == (403, "forbidden")
    assert await make("admin", person="nobody") == (404, "person_not_found")
    owners = (await people.token("nlp-owner", "nlp"))["id"]
    rotated = await people.ask("nlp-maintainer", "POST", f"/tokens/{owners}:rotate", json={})
    assert rotated.status_code == 403, "its successor would be shown to another than its person"


async def test_a_token_rotates_itself(people: People) -> None:
    made = await people.token("nlp-maintainer", "nlp", "admin")
    people.headers["old"] = bearer(made["token"])
    with_overlap = await people.ask("old", "POST", f"/tokens/{made['id']}:rotate", json={"overlapHours": 1})
    assert with_overlap.status_code == 201
    assert (await people.ask("old", "GET", "/jobs")).status_code == 200
    people.headers["new"] = bearer(with_overlap.json()["token"])
    again = await people.ask("new", "POST", f"/tokens/{with_overlap.json()['id']}:rotate")
    assert (again.status_code, again.json()["scopes"], again.json()["person"]) == (201, ["admin"], "nlp-maintainer")
    assert (await people.ask("new", "GET", "/jobs")).status_code == 401


@pytest.mark.parametrize("scope", ["read", "write"])
async def test_a_token_of_a_day_does_not_renew_itself(people: People, scope: str) -> None:
    """Or whoever stole it would have one for good, and its person none."""
    body = {"name": "day", "person": "nlp-owner", "project": "nlp", "scopes": [scope], "expiresInDays": 1}
    made = (await people.ask("admin", "POST", "/tokens", json=body)).json()
    people.headers["day"] = bearer(made["token"])
    refused = await people.ask("day", "POST", f"/tokens/{made['id']}:rotate")
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    rotated = await people.ask("admin", "POST", f"/tokens/{made['id']}:rotate")
    assert (rotated.status_code, rotated.json()["expiresAt"]) == (201, made["expiresAt"])


async def test_a_token_that_has_ended_has_no_successor(people: People) -> None:
    """It would end when its token has, and so open nothing: a 201 would say otherwise."""
    body = {"name": "day", "project": "nlp", "person": "nlp-owner", "expiresInDays": 1}
    made = (await people.ask("admin", "POST", "/tokens", json=body)).json()
    async with people.here.services.database.write() as session:
        (await session.get_one(TokenRow, made["id"])).expires_at = 1.0
    refused = await people.ask("admin", "POST", f"/tokens/{made['id']}:rotate")
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_token")
    assert "`muster tokens create NAME`" in refused.json()["detail"]


async def test_somebody_who_is_disabled_opens_nothing(people: People) -> None:
    assert (await people.ask("admin", "PUT", "/people/nlp-owner", json={"disabled": True})).status_code == 200
    assert (await people.ask("nlp-owner", "GET", "/jobs")).status_code == 401
    own = await people.ask("admin", "PUT", "/people/admin", json={})
    assert (own.status_code, own.json()["code"]) == (422, "invalid_person")


async def test_a_job_of_another_project_is_no_beginning(people: People) -> None:
    """By its id it could be named from anywhere."""
    people.here.commit(people.jobs["cv"], 20)
    spec = document()["spec"]["training"] | {"model": {"from": {"job": people.jobs["cv"]}}}
    reply = await people.submit("nlp-member", "thief", training=spec)
    assert reply.json()["errors"][0]["message"].startswith("there is no job")
    own = await people.submit("cv-member", "heir", training=spec)
    assert own.status_code == 201, own.text


LIMITS = {
    "serviceAccount": "nlp-trainer",
    "checkpointPrefix": "s3://ckpt/nlp",
    "dataPrefixes": ["s3://data/nlp"],
    "endpoints": ["https://hub.example"],
    "gangSizes": [1, 2],
    "instanceTypes": ["p5.48xlarge"],
    "images": ["registry.example/nlp:*"],
}


async def test_a_job_keeps_within_its_projects_limits(people: People) -> None:
    assert (await people.ask("admin", "PUT", "/projects/nlp", json={"limits": LIMITS})).status_code == 200
    data = {"train": [{"source": "s3://data/nlp2/x.jsonl"}], "sequenceLength": 256}
    out: dict[str, Any] = {
        "training": document()["spec"]["training"] | {"data": data},
        "gang": {"nodes": {"min": 1, "max": 4}, "instanceTypes": ["p4d.24xlarge"]},
        "checkpoint": {"uri": "s3://ckpt/nlp2"},
        "runtime": {
            "serviceAccountName": "admin",
            "image": "evil",
            "env": [{"name": "E", "value": "https://else.example/x"}],
        },
    }
    wrong = await people.submit("nlp-member", "out", **out)
    assert {fault["path"] for fault in wrong.json()["errors"]} == {
        "spec.runtime.serviceAccountName", "spec.checkpoint.uri", "spec.training.data.train[0].source",
        "spec.runtime.env[0].value", "spec.gang.nodes", "spec.gang.instanceTypes", "spec.runtime.image",
    }  # fmt: skip
    assert all("project 'nlp'" in fault["message"] for fault in wrong.json()["errors"])
    inside = await people.submit("nlp-member", "inside", checkpoint={}, runtime={"image": "registry.example/nlp:7"})
    assert inside.status_code == 201, inside.text
    spec = inside.json()["spec"]
    assert spec["checkpoint"]["uri"] == "s3://ckpt/nlp"
    assert (spec["runtime"]["serviceAccountName"], spec["gang"]["instanceTypes"]) == ("nlp-trainer", ["p5.48xlarge"])


async def test_a_namespace_is_one_projects(people: People) -> None:
    async def put(name: str, **wanted: Any) -> tuple[int, str]:
        reply = await people.ask("admin", "PUT", f"/projects/{name}", json=wanted)
        return reply.status_code, reply.json().get("code", "")

    assert await put("third", namespace="nlp") == (409, "namespace_taken")
    assert await put("third", namespace="default") == (409, "namespace_taken")
    assert await put("nlp", namespace="other") == (422, "invalid_project")
    assert await put("Nlp") == (422, "invalid_parameter")
    assert await put("nl\u0440") == (422, "invalid_parameter"), "a Cyrillic letter that looks like p"
    elsewhere = document("elsewhere")
    elsewhere["metadata"]["namespace"] = "cv"
    for who in ("nlp-member", "admin"):
        refused = await people.ask(who, "POST", "/jobs", json=elsewhere)
        assert refused.json()["errors"][0]["path"] == "metadata.namespace", refused.text


async def test_names_that_look_alike_are_refused(people: People) -> None:
    for name in ("\u0430nn", "Ann", "ann ", "-ann"):
        assert (await people.ask("admin", "PUT", f"/people/{name}", json={})).status_code == 422, name


async def test_a_share_of_nothing_and_a_limit_below_nothing_are_refused(people: People) -> None:
    """So that shares never sum to nothing; a limit or a budget of zero is one, by which nothing begins."""
    for quota in ({"weight": 0}, {"weight": -1}, {"gpus": -1}, {"moneyPerMonth": -0.01}, {"person": {"gangs": -1}}):
        refused = await people.ask("admin", "PUT", "/projects/nlp", json={"limits": {"quota": quota}})
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_project"), quota
        assert next(iter(quota)) in refused.json()["errors"][0]["path"]
    none = {"gpus": 0, "gpuHoursPerMonth": 0, "moneyPerMonth": 0}
    taken = await people.ask("admin", "PUT", "/projects/nlp", json={"limits": {"quota": none}})
    assert {name: taken.json()["limits"]["quota"][name] for name in none} == none


async def test_a_project_with_jobs_is_not_deleted(people: People) -> None:
    refused = await people.ask("admin", "DELETE", "/projects/nlp")
    assert (refused.status_code, refused.json()["code"]) == (409, "project_in_use")
    await people.ask("admin", "PUT", "/projects/empty", json={})
    await people.give("empty", "nlp-member", "member")
    people.headers["gone"] = bearer((await people.token("nlp-member", "empty"))["token"])
    assert (await people.ask("admin", "DELETE", "/projects/empty")).status_code == 204
    assert (await people.ask("gone", "GET", "/jobs")).status_code == 401


async def test_a_job_made_in_a_projects_namespace_is_its_own(people: People) -> None:
    """Whoever goes round the API: the namespace decides, which the cluster guards, and not what a label says."""
    spec: JobSpec = parse_job(document()).spec
    labels = {Label.PROJECT: "cv", Label.OWNER: "somebody"}
    made = people.here.cluster.create("round", "nlp", spec, labels)

    async def look(who: str) -> int:
        return (await people.ask(who, "GET", f"/jobs/{made.metadata.uid}")).status_code

    async def seen() -> bool:
        return await look("nlp-viewer") == 200

    await until(seen, "the import")
    assert (await look("nlp-viewer"), await look("cv-viewer")) == (200, 404)


@pytest.mark.parametrize(
    ("loss", "stream"),
    [
        *((loss, stream) for loss in ("revoked", "role", "disabled") for stream in ("events", "logs")),
        ("expired", "logs"),
    ],
)
async def test_a_stream_ends_when_its_reader_may_read_no_more(tmp_path: Path, loss: str, stream: str) -> None:
    async with served(tmp_path / "state", auth=True) as (here, _):
        people = await settle(here, tmp_path / "state")
        token = await people.token("nlp-viewer", "nlp", "read")
        job = people.jobs["nlp"]
        address = f"/api/v1/jobs/{job}/{stream}?follow=true"
        async with here.client.stream("GET", address, headers=bearer(token["token"])) as reply:
            assert reply.status_code == 200
            told = asyncio.create_task(_all(reply))
            if loss == "revoked":
                await people.ask("admin", "DELETE", f"/tokens/{token['id']}")
            elif loss == "role":
                await people.ask("admin", "DELETE", "/projects/nlp/members/nlp-viewer")
            elif loss == "expired":
                await expire(here, token["id"])
            else:
                await people.ask("admin", "PUT", "/people/nlp-viewer", json={"disabled": True})
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                kinds = await told
        assert "end" not in kinds, "the job has not ended: its reader is sent away"
        again = await here.client.get(address, headers=bearer(token["token"]))
        assert again.status_code == (404 if loss == "role" else 401)


async def expire(here: Platform, token: str) -> None:
    """Let the token's time be up."""
    async with here.services.database.write() as session:
        await session.execute(update(TokenRow).where(TokenRow.id == token).values(expires_at=time.time() - 1))
    here.services[CallerAuthentication].callers.forget()


async def test_a_request_that_began_in_time_is_finished_and_the_next_is_not(tmp_path: Path) -> None:
    """A body may take a while to come: whoever sends it is judged when it begins."""
    async with served(tmp_path / "state", auth=True) as (here, _):
        people = await settle(here, tmp_path / "state")
        token = await people.token("nlp-owner", "nlp", "write")
        body = json.dumps(document("slow")).encode()

        async def slowly() -> AsyncIterator[bytes]:
            yield body[:50]
            await until(judged, "the request to be judged")
            await expire(here, token["id"])
            yield body[50:]

        async def judged() -> bool:
            return token["id"] in here.services[CallerAuthentication].token_uses

        headers = bearer(token["token"]) | {"content-type": "application/json"}
        sent = await here.client.post("/api/v1/jobs", content=slowly(), headers=headers)
        assert sent.status_code == 201, sent.text
        again = await here.client.post("/api/v1/jobs", content=body, headers=headers)
        assert (again.status_code, again.json()["code"]) == (401, "unauthorized")


async def _all(reply: Any) -> list[str]:
    return [frame.event async for frame in frames(reply)]


async def test_limits_are_written_down_for_who_goes_round_the_api_once_they_change(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    await people.here.services.background.stop()  # which writes them, too
    written: list[dict[str, str]] = []

    async def write_limits(entries: dict[str, str]) -> None:
        written.append(entries)

    services = people.here.services
    monkeypatch.setattr(services.cluster, "write_limits", write_limits)
    writer = QuotaWriter(services.database, services.cluster, dict)
    await writer.step()
    await people.ask("admin", "PUT", "/projects/nlp", json={"limits": {"gangSizes": [1, 2]}})
    for _ in range(2):
        await writer.step()
    first = {"_default.project": "default", "cv.project": "cv", "nlp.project": "nlp"}
    assert [each for each in written if each] == [first, first | {"nlp.gangSizes": "1\n2"}]


async def test_what_a_project_may_hold_reaches_the_operator_also_when_it_is_gone(people: People) -> None:
    await people.here.services.background.stop()  # which hands them over, too

    async def put(limits: dict[str, Any]) -> dict[str, Any]:
        reply = await people.ask("admin", "PUT", "/projects/nlp", json={"limits": limits})
        assert reply.status_code == 200, reply.text
        return dict(reply.json()["limits"])

    def told() -> dict[str, ProjectQuota]:
        return read_quotas(people.here.cluster.quotas(), {})[0]

    writer = QuotaWriter(people.here.services.database, people.here.services.cluster, dict)
    quota = {"gpus": 8, "queuedJobs": 5, "person": {"gangs": 1}}
    assert (await put({"quota": quota}))["quota"] == quota | {"preempts": False}
    await writer.step()
    assert told() == {"nlp": ProjectQuota(gpus=8, person=Quota(gangs=1))}
    await put({"quota": {"queuedJobs": 5}})
    await writer.step()
    assert told() == {}
    await put({"quota": {"gangs": 0}})
    await QuotaWriter(people.here.services.database, people.here.services.cluster, dict).step()  # of another process
    assert told() == {"nlp": ProjectQuota(gangs=0)}
    refused = await people.ask("admin", "PUT", "/projects/nlp", json={"limits": {"quota": {"gpus": -1, "gpu": 1}}})
    assert [fault["path"] for fault in refused.json()["errors"]] == ["limits.quota.gpus", "limits.quota.gpu"]


@pytest.mark.parametrize(
    ("quota", "whose"),
    [({"queuedJobs": 2}, "Project 'nlp'"), ({"person": {"queuedJobs": 2}}, "Nlp-owner in project 'nlp'")],
)
async def test_a_full_queue_takes_no_further_job(people: People, quota: dict[str, Any], whose: str) -> None:
    """The owner's first job is queued already."""
    await people.ask("admin", "PUT", "/projects/nlp", json={"limits": {"quota": quota}})
    both = await asyncio.gather(*(people.submit("nlp-owner", name) for name in ("second", "third")))
    assert sorted(reply.status_code for reply in both) == [201, 409]
    (refused,) = (reply.json() for reply in both if reply.status_code == 409)
    assert (refused["code"], refused["detail"]) == (
        "queue_full",
        f"{whose} has 2 queued jobs and may have 2: submit again when one has begun.",
    )
    dry = await people.ask("nlp-owner", "POST", "/jobs", params={"dryRun": "true"}, json=document("fourth"))
    assert [each["code"] for each in dry.json()["refusals"]] == ["queue_full"]
    others = await people.submit("nlp-member", "theirs")
    assert others.status_code == (201 if "person" in quota else 409)
