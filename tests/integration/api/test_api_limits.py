"""Bodies that no honest client sends, and requests that a browser is tricked into."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, document, platform

from muster.api.core.submission import steps
from muster.api.sweeps.examples import EXAMPLE_SWEEP

JSON, YAML = {"content-type": "application/json"}, {"content-type": "application/yaml"}

_BILLION = b"a0: &a0 [x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 11)
)
UNREADABLE: dict[str, tuple[bytes, dict[str, str]]] = {
    "not json": (b'{"a": ', JSON),
    "not utf-8": (b'{"a": "\xff"}', JSON),
    "not a number": (b'{"a": NaN}', JSON),
    "a huge number": (b'{"a": 1' + b"0" * 5000 + b"}", JSON),
    "more than 64 bits": (b'{"a": 9223372036854775808}', JSON),
    "deep json": (b"[" * 100_000 + b"]" * 100_000, JSON),
    "nul": (rb'{"a": "\u0000"}', JSON),
    "half a surrogate": (rb'{"a": "\ud800"}', JSON),
    "not yaml": (b"a: [", YAML),
    "deep yaml": (b"[" * 100_000 + b"]" * 100_000, YAML),
    "yaml that builds objects": (b"!!python/object/apply:os.system ['true']", YAML),
    "yaml of a billion": (_BILLION, YAML),
    "yaml that contains itself": (b"a: &a [*a]", YAML),
    "yaml with a number as key": (b"1: x", YAML),
    "empty": (b"", JSON),
}


@pytest.fixture
async def local(tmp_path: Path) -> Any:
    async with platform(tmp_path / "state") as here:
        yield here


@pytest.mark.parametrize("name", UNREADABLE)
async def test_an_unreadable_body_is_refused(local: Platform, name: str) -> None:
    body, headers = UNREADABLE[name]
    reply = await local.client.post("/api/v1/jobs", content=body, headers=headers)
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_document"), reply.text
    assert len(reply.text) < 2_000


@pytest.mark.parametrize(
    "body", [b"[]", b'"text"', b"null", b"17", b"{}", b'{"spec": null}', b'{"metadata": 3, "spec": []}']
)
async def test_a_body_of_the_wrong_shape_is_refused(local: Platform, body: bytes) -> None:
    reply = await local.client.post("/api/v1/jobs", content=body, headers=JSON)
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_job")


@pytest.mark.parametrize("media_type", ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded", None])
async def test_other_content_types_are_refused(local: Platform, media_type: str | None) -> None:
    headers = {"content-type": media_type} if media_type else {}
    reply = await local.client.post("/api/v1/jobs", content=json.dumps(document()).encode(), headers=headers)
    assert (reply.status_code, reply.json()["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_refused(local: Platform, chunked: bool) -> None:
    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 100_000

    content = chunks() if chunked else b" " * 2_000_000
    reply = await local.client.post("/api/v1/jobs", content=content, headers=JSON)
    assert (reply.status_code, reply.json()["code"]) == (413, "body_too_large")
    assert "1,000,000 bytes" in reply.json()["detail"]


@pytest.mark.parametrize(
    "labels", [{"a" * 400: "x"}, {"a": "x" * 64}, {str(n): "x" for n in range(65)}, {"": "x"}, {"a": 1}, ["a"]]
)
async def test_labels_that_kubernetes_would_refuse_are_refused(local: Platform, labels: Any) -> None:
    wanted = document()
    wanted["metadata"]["labels"] = labels
    reply = await local.client.post("/api/v1/jobs", json=wanted)
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_job")


async def test_a_gang_of_a_billion_nodes_is_refused_at_once(local: Platform) -> None:
    reply = await local.client.post("/api/v1/jobs", json=document(gang={"nodes": {"min": 1, "max": 10**12}}))
    assert reply.json()["errors"][0]["path"] == "spec.gang.nodes.max"


@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        ("/jobs?phse=Running", "query.phse"),
        ("/jobs?limit=0", "query.limit"),
        ("/jobs?limit=x", "query.limit"),
        ("/jobs?name=%00", "query.name"),
        ("/jobs?phase=%00", "query.phase.0"),
        ("/jobs?phase=running", "query.phase.0"),
        ("/jobs?label=x", "query.label"),
        ("/jobs/%00", "path.job_id"),
        ("/jobs/x/events?type=nonsense", "query.type.0"),
        ("/jobs/x/metrics?points=0", "query.points"),
        ("/jobs/x/logs?worker=-1", "query.worker"),
    ],
)
async def test_a_bad_parameter_is_named(local: Platform, path: str, parameter: str) -> None:
    reply = await local.client.get(f"/api/v1{path}")
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_parameter"), reply.text
    assert reply.json()["errors"][0]["path"] == parameter


async def test_a_misspelt_dry_run_submits_nothing(local: Platform) -> None:
    reply = await local.client.post("/api/v1/jobs?dryrun=true", json=document())
    assert reply.json()["errors"] == [{"path": "query.dryrun", "message": "unknown parameter", "didYouMean": "dryRun"}]
    assert (await local.get("/jobs"))["items"] == []


async def test_a_job_is_judged_off_the_event_loop(local: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judging looks on disks for what a job names; trials of a sweep are judged off the event loop, too."""
    threads: list[int] = []

    def noted(judge: Any) -> Any:
        def judged(*arguments: Any) -> Any:
            threads.append(threading.get_ident())
            return judge(*arguments)

        return judged

    for name in ("state_problems", "limit_problems", "_source_warning"):
        monkeypatch.setattr(steps, name, noted(getattr(steps, name)))
    job = document()
    rates = {"training.optimizer.lr": {"values": [0.001, 0.002, 0.003]}}
    sweep = {**copy.deepcopy(EXAMPLE_SWEEP), "sweep": {"parameters": rates, "search": "grid", "concurrency": 2}}
    for path, body, judged in (
        ("/jobs?dryRun=true", job, 1),
        ("/jobs", job, 1),
        ("/jobs:estimate", job, 1),
        ("/sweeps", sweep, 1),  # of trials that differ by numbers alone one is judged
    ):
        threads.clear()
        reply = await local.client.post(f"/api/v1{path}", json=body)
        assert reply.is_success, reply.text
        assert len(threads) >= 3 * judged, path
        assert threading.get_ident() not in threads, path


async def test_request_ids(local: Platform) -> None:
    given = await local.client.get("/api/v1/jobs/x", headers={"x-request-id": "from-the-caller.1"})
    assert given.headers["x-request-id"] == given.json()["requestId"] == "from-the-caller.1"
    made = [await local.client.get("/api/v1/jobs", headers={"x-request-id": bad}) for bad in ("", "a b", "x" * 500)]
    ids = {reply.headers["x-request-id"] for reply in made}
    assert len(ids) == 3
    assert all(len(request_id) == 32 for request_id in ids)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
    ],
)
async def test_a_web_page_does_not_reach_an_open_api(local: Platform, headers: dict[str, str]) -> None:
    uid = (await local.submit())["id"]
    reply = await local.client.post(f"/api/v1/jobs/{uid}:cancel", headers=headers)
    assert (reply.status_code, reply.json()["code"]) == (403, "forbidden")
    own = await local.client.post(f"/api/v1/jobs/{uid}:cancel", headers={"origin": "http://localhost:3000"})
    assert own.status_code == 200


async def test_a_mistake_of_ours_tells_nothing(local: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    from muster.api.core.jobs import routes

    async def broken(*_: Any) -> None:
        raise RuntimeError("postgresql://user:hunter2@db/secret table")

    monkeypatch.setattr(routes, "find_job", broken)
    reply = await local.client.get("/api/v1/jobs/x")
    assert (reply.status_code, reply.json()["code"]) == (500, "internal")
    assert reply.headers["content-type"] == "application/problem+json"
    assert "hunter2" not in reply.text
    assert "RuntimeError" not in reply.text


async def test_every_problem_code_is_explained(local: Platform) -> None:
    problem = (await local.client.get("/api/v1/jobs/x")).json()
    explained = await local.client.get(problem["type"])
    assert (explained.status_code, explained.json()["code"]) == (200, "job_not_found")
    assert explained.json()["advice"]
    assert (await local.client.get("/api/v1/problems/nonsense")).status_code == 404


async def test_health_and_metrics(local: Platform) -> None:
    await local.submit()
    assert (await local.client.get("/healthz")).json() == {"status": "ok"}
    ready = await local.ready()
    works = {"mirror", "relay", "housekeeping", "quotas", "accounting", "files", "chat", "sweeps", "waits"}
    works |= {"webhooks", "webhooks waiting", "evaluations"}
    assert (ready["status"], set(ready["checks"])) == ("ok", {"database", *works})
    text = (await local.client.get("/metrics")).text
    assert 'muster_api_requests_total{method="POST",route="/api/v1/jobs",status="201"} 1.0' in text
    assert "muster_api_submissions_total 1.0" in text
