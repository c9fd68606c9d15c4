"""No request, however repeated, makes a second job."""

from __future__ import annotations

import asyncio
import re

import pytest
import yaml
from tests.integration.api.platform import Platform, document

from muster.api.core.idempotency import MAKES_ANEW

KEY = {"Idempotency-Key": "one-request"}


@pytest.mark.both_databases
async def test_a_repeated_request_gets_the_first_reply(here: Platform) -> None:
    first = await here.client.post("/api/v1/jobs", json=document(), headers=KEY)
    await here.handed_over(first.json()["id"])
    await here.finish(first.json()["id"])
    again = await here.client.post("/api/v1/jobs", json=document(), headers=KEY)
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json()
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers["location"] == first.headers["location"]
    assert len((await here.get("/jobs"))["items"]) == 1


# Acts on what is there, or changes nothing.
REPEATABLE = {
    "estimate_job", "cancel_job", "suspend_job", "resume_job", "pin_checkpoint", "unpin_checkpoint", "make_export",
    "inspect_job_data", "cancel_sweep", "complete_upload", "cancel_upload", "cancel_fine_tuning_job",
    "pause_fine_tuning_job", "resume_fine_tuning_job", "make_chat_completion", "make_completion",
}  # fmt: skip


async def test_a_key_is_kept_or_needless_or_refused(here: Platform) -> None:
    """And never ignored where a repetition would make another thing: a new POST has to say which it is."""
    kept, posts = set(), {}
    for path, methods in here.app.openapi()["paths"].items():
        if (post := methods.get("post")) is not None:
            posts[post["operationId"]] = path
            if any(each["name"] == "Idempotency-Key" for each in post.get("parameters", ())):
                kept.add(post["operationId"])
    assert kept | REPEATABLE | MAKES_ANEW == set(posts)
    assert len(kept) + len(REPEATABLE) + len(MAKES_ANEW) == len(posts), "each is one of them"
    for name in MAKES_ANEW:
        path = re.sub(r"{\w+}", "any", posts[name])
        refused = await here.client.post(path, json={}, headers=KEY)
        expected = 400 if path.startswith("/v1/") else 422
        assert (refused.status_code, refused.json()["errors"][0]["path"]) == (expected, "header.Idempotency-Key"), path


async def test_the_same_document_in_another_writing_is_the_same_request(here: Platform) -> None:
    await here.client.post("/api/v1/jobs", json=document(), headers=KEY)
    body = yaml.safe_dump(document(), sort_keys=True)
    again = await here.client.post("/api/v1/jobs", content=body, headers={**KEY, "content-type": "application/yaml"})
    assert (again.status_code, again.headers["idempotency-replayed"]) == (201, "true")


async def test_a_key_is_not_for_two_requests(here: Platform) -> None:
    made = (await here.client.post("/api/v1/jobs", json=document(), headers=KEY)).json()
    other = await here.client.post("/api/v1/jobs", json=document("other"), headers=KEY)
    assert (other.status_code, other.json()["code"], other.json()["jobId"]) == (
        422,
        "idempotency_key_reused",
        made["id"],
    )
    assert len((await here.get("/jobs"))["items"]) == 1


@pytest.mark.both_databases
async def test_many_at_once_with_one_key_make_one_job(here: Platform) -> None:
    replies = await asyncio.gather(*(here.client.post("/api/v1/jobs", json=document(), headers=KEY) for _ in range(10)))
    assert {reply.status_code for reply in replies} == {201}
    assert len({reply.json()["id"] for reply in replies}) == 1
    assert len(here_jobs := (await here.get("/jobs"))["items"]) == 1
    assert await here.events(here_jobs[0]["id"]) == ["job.created"]


async def test_a_refused_request_does_not_use_up_its_key(here: Platform) -> None:
    taken = (await here.submit())["id"]
    assert (await here.client.post("/api/v1/jobs", json=document(), headers=KEY)).status_code == 409
    await here.finish(taken)
    assert (await here.client.post("/api/v1/jobs", json=document(), headers=KEY)).status_code == 201


async def test_a_clone_may_be_repeated_too(here: Platform) -> None:
    uid = (await here.submit())["id"]
    replies = [await here.client.post(f"/api/v1/jobs/{uid}:clone", headers=KEY) for _ in range(2)]
    assert replies[0].json() == replies[1].json()
    other = await here.client.post(f"/api/v1/jobs/{uid}:clone", json={"name": "other"}, headers=KEY)
    assert other.json()["code"] == "idempotency_key_reused"
    assert len((await here.get("/jobs"))["items"]) == 2


async def test_a_bad_key_is_named(here: Platform) -> None:
    reply = await here.client.post("/api/v1/jobs", json=document(), headers={"Idempotency-Key": "x" * 300})
    assert (reply.status_code, reply.json()["errors"][0]["path"]) == (422, "header.Idempotency-Key")
