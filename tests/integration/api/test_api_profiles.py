"""Traces of a job are asked for by who may act on it while it trains, and listed and fetched by who may see it."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.integration.api.platform import Platform

from muster.words.base import dump_json
from muster.words.profiles import REQUEST_KEY, Profile, ProfileFile, ProfileRequest, RankProfile
from muster.words.status import GangStatus, Phase

TRACE = bytes(range(256)) * 20_000  # more than one block


async def running(here: Platform, nodes: int = 1, **spec: Any) -> tuple[str, Path]:
    """A job that the operator says is running, in its second attempt, and its checkpoint folder."""
    uid = (await here.submit("trains", gang={"nodes": nodes}, **spec))["id"]
    await here.handed_over(uid)
    here.operate(
        uid,
        phase=Phase.RUNNING,
        code="Running",
        because="trains",
        attempt=2,
        gang=GangStatus(wanted=nodes, ready=nodes),
    )
    await here.phase(uid, "Running")
    return uid, here.state.checkpoints / uid


async def ask(here: Platform, uid: str, **order: Any) -> httpx2.Response:
    return await here.client.post(f"/api/v1/jobs/{uid}/profiles", json=order)


def serve(folder: Path, rank: int = 0, fault: str = "") -> str:
    """Do as the trainer does: write what the last request came to. Returns the profile's name."""
    asked = ProfileRequest.model_validate_json((folder / REQUEST_KEY).read_text())
    begun = Profile(**asked.model_dump(exclude={"at"}), step=121, at=1.8e9)
    at = folder / begun.key("profile.json")
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_text(dump_json(begun))
    name = f"rank-{rank}.trace.json.gz"
    (at.parent / name).write_bytes(TRACE)
    files = () if fault else (ProfileFile(name=name, bytes=len(TRACE)),)
    done = RankProfile(rank=rank, steps=asked.steps, files=files, fault=fault)
    (at.parent / f"rank-{rank}.json").write_text(dump_json(done))
    return at.parent.name


async def test_a_profile_is_asked_for_listed_and_fetched(here: Platform) -> None:
    uid, folder = await running(here, nodes=2)
    assert await here.get(f"/jobs/{uid}/profiles") == {"uri": f"{folder.as_uri()}/profiles", "items": [], "asked": None}
    reply = await ask(here, uid, steps=7, ranks=[1, 0, 1])
    assert reply.status_code == 202, reply.text
    asked = reply.json()
    assert (asked["attempt"], asked["steps"], asked["ranks"]) == (2, 7, [0, 1])
    assert json.loads((folder / REQUEST_KEY).read_text()) == asked

    name = serve(folder, rank=0)
    (found,) = (await here.get(f"/jobs/{uid}/profiles"))["items"]
    assert (found["id"], found["name"], found["complete"]) == (asked["id"], "attempt-2-step-00000121", False)
    second = await ask(here, uid)
    assert (second.status_code, second.json()["code"]) == (409, "profile_under_way"), "one at a time"
    serve(folder, rank=1, fault="RuntimeError: no profiler here")
    (found,) = (await here.get(f"/jobs/{uid}/profiles"))["items"]
    assert found["complete"]
    assert [(each["rank"], each["files"], each["fault"]) for each in found["done"]] == [
        (0, [{"name": "rank-0.trace.json.gz", "bytes": len(TRACE)}], ""),
        (1, [], "RuntimeError: no profiler here"),
    ]

    url = f"/api/v1/jobs/{uid}/profiles/{name}/rank-0.trace.json.gz"
    whole = await here.client.get(url)
    assert (whole.status_code, whole.content) == (200, TRACE)
    rest = await here.client.get(url, headers={"range": "bytes=1048577-"})
    assert (rest.status_code, rest.content) == (206, TRACE[1_048_577:])
    assert (await ask(here, uid)).status_code == 202, "the first is complete"


async def test_what_can_not_be_traced_is_refused_with_its_reason(here: Platform) -> None:
    uid = (await here.submit("waits"))["id"]
    reply = await ask(here, uid)
    assert (reply.status_code, reply.json()["code"]) == (409, "job_not_running")
    assert "Job 'waits' is Queued: " in reply.json()["detail"]
    await here.finish(uid)
    reply = await ask(here, uid)
    assert (reply.status_code, reply.json()["code"]) == (409, "job_finished")
    assert reply.json()["detail"] == "Job 'waits' is Succeeded: only steps that are yet to come can be traced."

    uid, folder = await running(here)
    for order, place in (
        ({"steps": 0}, "steps"), ({"steps": 10_000}, "steps"), ({"ranks": []}, "ranks"), ({"ranks": [-1]}, "ranks[0]"),
        ({"ranks": [1]}, "ranks"), ({"ranks": list(range(9))}, "ranks"), ({"step": 5}, "step"),
    ):  # fmt: skip
        reply = await ask(here, uid, **order)
        assert (reply.status_code, reply.json()["code"]) == (422, "invalid_parameter"), order
        assert place in reply.json()["detail"], reply.text
    assert "there is no rank 1: the gang has 1" in (await ask(here, uid, ranks=[1])).json()["detail"]
    assert not (folder / REQUEST_KEY).exists()


async def test_what_a_job_wrote_beside_its_traces_is_not_served(here: Platform, tmp_path: Path) -> None:
    """Its processes may write anything there: names that lead elsewhere, links, documents that are none."""
    uid, folder = await running(here)
    await ask(here, uid)
    name = serve(folder)
    at = folder / "profiles" / name
    secret = tmp_path / "secret"
    secret.write_text("of another")
    (at / "rank-0.memory.txt").symlink_to(secret)
    (at / "rank-0.sh").write_text("not a trace")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rank-0.trace.json.gz").write_text("of another")
    (at.parent / "attempt-9-step-00000009").symlink_to(elsewhere)
    linked = await here.client.get(f"/api/v1/jobs/{uid}/profiles/attempt-9-step-00000009/rank-0.trace.json.gz")
    assert (linked.status_code, linked.json()["code"]) == (404, "profile_not_found")
    for wrong in ("rank-0.memory.txt", "rank-0.sh", "profile.json", "rank-1.trace.json.gz", "..%2f..%2fcommits"):
        reply = await here.client.get(f"/api/v1/jobs/{uid}/profiles/{name}/{wrong}")
        assert reply.status_code == 404, wrong
        assert "of another" not in reply.text
    begun = json.loads((at / "profile.json").read_text())
    (at / "profile.json").write_text(json.dumps(begun | {"name": "../..", "done": 5, "ranks": list(range(10_000))}))
    done = {"rank": 0, "files": [{"name": "../../secret", "bytes": 5}]}
    (at / "rank-0.json").write_text(json.dumps(done))
    (folder / "profiles" / "attempt-3-step-00000001").mkdir()
    (folder / "profiles" / "attempt-3-step-00000001" / "profile.json").write_text("{")
    (found,) = (await here.get(f"/jobs/{uid}/profiles"))["items"]
    assert (found["name"], found["complete"], [each["files"] for each in found["done"]]) == (name, False, [[]])


@pytest.mark.long
async def test_a_request_goes_over_s3(here: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the API writes into a bucket is what the trainer's watch finds there, and the other way round."""
    from tests.s3_servers import moto_server

    from muster.storage.opening import open_store
    from muster.trainer.train.profiling import RequestWatch
    from muster.trainer.train.tracing import keep_begun, keep_trace
    from muster.words.address import parse_address

    with moto_server() as server:
        for key, value in server.environment().items():
            monkeypatch.setenv(key, value)
        uid, _ = await running(here, checkpoint={"uri": f"s3://{server.bucket}/nlp"})
        address = f"s3://{server.bucket}/nlp/{uid}"
        asked = (await ask(here, uid)).json()
        watch = RequestWatch(address, 2)
        watch._look(open_store(parse_address(address)))
        watch.close()
        assert watch.waiting is not None
        assert watch.waiting.id == asked["id"]
        begun = Profile(**watch.waiting.model_dump(exclude={"at"}), step=9, at=1.8e9)
        path = here.state.root / "rank-0.trace.json"
        path.write_text("{}")
        keep_begun(address, begun)
        keep_trace(address, begun, RankProfile(rank=0, steps=5), (path,), None)
        (found,) = (await here.get(f"/jobs/{uid}/profiles"))["items"]
        assert (found["complete"], found["done"][0]["fault"]) == (True, "")
        url = f"/api/v1/jobs/{uid}/profiles/{found['name']}/rank-0.trace.json.gz"
        assert len((await here.client.get(url)).content) == found["done"][0]["files"][0]["bytes"]
