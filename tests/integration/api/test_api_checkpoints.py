"""Commits are inspected, pinned and unpinned through the API: in folders, and on S3 servers of both kinds."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, document, platform
from tests.s3_servers import Missing, S3Server, moto_server, rclone_server

from muster.storage.pins import pin, pinned
from muster.storage.store import Store
from muster.words.address import parse_address
from muster.words.checkpoint import commit_key
from muster.words.data_report import DATA_REPORT_KEY
from muster.words.samples import samples_key


@pytest.fixture(params=["folder", "moto", "rclone"])
async def folder(request: pytest.FixtureRequest, here: Platform, tmp_path: Path, monkeypatch: Any) -> Any:
    """(job, its folder's address): the job has commits of steps 20 (best) and 40."""
    with contextlib.ExitStack() as stack:
        server: S3Server | None = None
        if request.param == "moto":
            server = stack.enter_context(moto_server())
        elif request.param == "rclone":
            try:
                server = stack.enter_context(rclone_server(tmp_path / "rclone"))
            except Missing as missing:
                pytest.skip(reason=str(missing))
        for name, value in server.environment().items() if server else ():
            monkeypatch.setenv(name, value)
        uri = f"s3://{server.bucket}/team nlp" if server else None
        uid = (await here.submit("base", **({"checkpoint": {"uri": uri}} if uri else {})))["id"]
        made = (
            here.commit(uid, 10, best=True, metrics={"loss": 4.0}),
            here.commit(uid, 20, best=True, metrics={"loss": 3.0}),
            here.commit(uid, 40),
        )
        for path in made:
            if server:
                server.client().upload_file(str(path), server.bucket, f"team nlp/{uid}/commits/{path.name}")
        base = uri or here.state.checkpoints.resolve().as_uri()
        yield uid, f"{base}/{uid}"


async def test_a_commit_is_inspected_and_pinned(here: Platform, folder: tuple[str, str]) -> None:
    uid, uri = folder
    path = f"/jobs/{uid}/checkpoints"
    found = await here.get(f"{path}/40")
    assert (found["step"], found["jobUid"], found["pinned"]) == (40, uid, False)
    assert found["uri"] == f"{uri}/commits/step-00000040.json"
    assert [file["key"] for file in found["files"]] == ["a", "b"]
    assert (await here.get(f"{path}/last"))["step"] == 40
    assert (await here.get(f"{path}/best"))["step"] == 20
    assert [item["best"] for item in (await here.get(path))["items"]] == [False, True, False]
    assert [(await here.get(f"{path}/{step}"))["best"] for step in (10, 20, 40)] == [False, True, False]

    async def post(what: str) -> Any:
        reply = await here.client.post(f"/api/v1{path}/{what}")
        return reply.status_code, reply.json()

    assert await post("20:pin") == (200, {"step": 20, "pinned": True, "changed": True})
    assert await post("20:pin") == (200, {"step": 20, "pinned": True, "changed": False})
    store = here.services.commits.store(parse_address(uri))
    assert pinned(store) == {20}, "where retention looks for it"
    assert [item["pinned"] for item in (await here.get(path))["items"]] == [False, True, False]
    assert await post("20:unpin") == (200, {"step": 20, "pinned": False, "changed": True})
    assert await post("20:unpin") == (200, {"step": 20, "pinned": False, "changed": False})
    assert pinned(store) == frozenset()
    for refused in (await post("30:pin"), await post("99:pin")):
        assert (refused[0], refused[1]["code"]) == (404, "checkpoint_not_found")
    status, told = await post("20:keep")
    detail = "A checkpoint knows no action 'keep'; there are POST …:pin, :unpin, :export."
    assert (status, told["detail"]) == (404, detail)
    assert (await here.client.get(f"/api/v1{path}/20:pin")).status_code == 405
    assert (await post("x:pin"))[1]["code"] == "invalid_parameter"


async def test_a_pin_that_retention_was_faster_than_is_refused_and_leaves_nothing(
    here: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = (await here.submit())["id"]
    here.commit(uid, 20)
    store = here.services.commits.store(parse_address((await here.get(f"/jobs/{uid}/checkpoints"))["uri"]))

    def too_late(store: Store, step: int) -> bool:
        store.delete(commit_key(step))
        return pin(store, step)

    monkeypatch.setattr("muster.api.core.checkpoints.routes.pin", too_late)
    reply = await here.client.post(f"/api/v1/jobs/{uid}/checkpoints/20:pin")
    assert (reply.status_code, reply.json()["code"]) == (404, "checkpoint_not_found")
    assert "the retention policy removed it" in reply.json()["detail"]
    assert pinned(store) == frozenset()


async def test_a_commit_that_can_not_be_read_is_told_with_its_reason(here: Platform) -> None:
    uid = (await here.submit())["id"]
    assert (await here.client.get(f"/api/v1/jobs/{uid}/checkpoints/last")).json()["code"] == "checkpoint_not_found"
    here.commit(uid, 20)
    torn = here.state.checkpoints / uid / "commits" / "step-00000060.json"
    torn.write_text('{"torn')
    reply = await here.client.get(f"/api/v1/jobs/{uid}/checkpoints/60")
    assert (reply.status_code, reply.json()["code"]) == (409, "checkpoint_unusable")
    assert "it is no JSON" in reply.json()["detail"]
    assert (await here.get(f"/jobs/{uid}/checkpoints/last"))["step"] == 20


async def test_storage_that_fails_is_told_apart_from_storage_that_refuses(
    here: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moto_server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        uid = (await here.submit("nobody", checkpoint={"uri": "s3://nobodys-bucket/x"}))["id"]
        reply = await here.client.get(f"/api/v1/jobs/{uid}/checkpoints/20")
        assert (reply.status_code, reply.json()["code"]) == (409, "checkpoint_unusable")
        assert "the bucket does not exist" in reply.json()["detail"]
    monkeypatch.setenv("MUSTER_S3_RETRY_SECONDS", "0.2")
    uid = (await here.submit("gone", checkpoint={"uri": "s3://another-bucket/x"}))["id"]
    reply = await here.client.post(f"/api/v1/jobs/{uid}/checkpoints/20:pin")
    assert (reply.status_code, reply.json()["code"]) == (503, "storage_unavailable")


async def test_pins_need_the_right_to_write(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", auth=True) as here:
        token = (tmp_path / "state" / "admin-token").read_text().strip()
        admin = {"Authorization": f"Bearer {token}"}
        made = await here.client.post("/api/v1/jobs", json=document(), headers=admin)
        uid = made.json()["id"]
        here.commit(uid, 20)
        other = await here.client.post("/api/v1/tokens", json={"name": "reader", "scopes": ["read"]}, headers=admin)
        reader = {"Authorization": f"Bearer {other.json()['token']}"}
        path = f"/api/v1/jobs/{uid}/checkpoints/20"
        assert (await here.client.get(path)).status_code == 401
        assert (await here.client.get(path, headers=reader)).status_code == 200
        assert (await here.client.post(f"{path}:pin", headers=reader)).status_code == 403
        assert (await here.client.post(f"{path}:pin", headers=admin)).status_code == 200


async def test_the_report_of_the_data_is_shown_once_it_is_there(here: Platform) -> None:
    uid = (await here.submit())["id"]
    reply = await here.client.get(f"/api/v1/jobs/{uid}/data")
    assert (reply.status_code, reply.json()["code"]) == (404, "data_report_not_found")
    folder = here.state.checkpoints / uid
    folder.mkdir(parents=True, exist_ok=True)
    report = {"sequenceLength": 64, "samplesPerEpoch": 3, "samplesPerStep": 1, "sources": [], "warnings": ["few"]}
    (folder / DATA_REPORT_KEY).write_text(json.dumps(report))
    assert await here.get(f"/jobs/{uid}/data") == {**report, "shown": []}
    (folder / DATA_REPORT_KEY).write_text("{")
    assert "is damaged" in (await here.client.get(f"/api/v1/jobs/{uid}/data")).json()["detail"]


async def test_what_the_model_wrote_is_shown_newest_last(here: Platform) -> None:
    uid = (await here.submit("writes"))["id"]
    assert await here.get(f"/jobs/{uid}/samples") == {"items": [], "total": 0}
    folder = here.state.checkpoints / uid / "samples"
    folder.mkdir(parents=True)
    for step in (0, 200, 400):
        kept = {"step": step, "attempt": 1, "at": 1.8e9, "samples": [{"prompt": "a", "text": "b", "finished": True}]}
        (folder.parent / samples_key(step)).write_text(json.dumps(kept))
    (folder / "notes.txt").write_text("no samples")
    found = await here.get(f"/jobs/{uid}/samples", limit=2)
    assert ([each["step"] for each in found["items"]], found["total"]) == ([200, 400], 3)
    assert found["items"][0]["samples"] == [{"prompt": "a", "text": "b", "finished": True}]
    (folder.parent / samples_key(400)).write_text("{")
    assert [each["step"] for each in (await here.get(f"/jobs/{uid}/samples"))["items"]] == [0, 200]
    # A job that links to what another one wrote would have the API read it out.
    (folder.parent / samples_key(200)).rename(here.state.checkpoints / "of-another.json")
    (folder.parent / samples_key(200)).symlink_to(here.state.checkpoints / "of-another.json")
    assert [each["step"] for each in (await here.get(f"/jobs/{uid}/samples"))["items"]] == [0]
