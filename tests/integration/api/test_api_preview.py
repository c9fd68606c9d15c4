"""A dry run asks the operator what would become of the job, and tells each caller what they may know."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.integration.api.people import People, settle
from tests.integration.api.platform import Platform, document, platform, until
from tests.polling import WAIT_SECONDS_MAX

from muster.api.core.submission import operator_previews
from muster.operator.local.nodes import VirtualNodes
from muster.operator.local.world import LocalWorld
from muster.operator.preview import PreviewHandler
from muster.operator.server import HttpReply, HttpRequest, LoopLiveness, serve_pages
from muster.recipe.document import JobSpec
from muster.words.preview import PATH
from muster.words.status import CheckpointStatus, GangStatus, Phase

TOKEN = "a-token-of-some-length"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operator take its time, which the API gives up after some seconds."""
    monkeypatch.setattr(operator_previews, "SECONDS_MAX", WAIT_SECONDS_MAX)


@contextlib.asynccontextmanager
async def operator(here: Platform) -> AsyncIterator[str]:
    """Two nodes with 4 GPUs each, and the server of an operator that looks at the platform's own jobs."""
    world = LocalWorld(here.state.root, VirtualNodes(2, 4), (), JobSpec, reads_only=True)
    previews = PreviewHandler(lambda: TOKEN, JobSpec)
    server = serve_pages(LoopLiveness(), "127.0.0.1", 0, {}, {PATH: previews})
    url = f"http://127.0.0.1:{server.server_address[1]}"
    here.state.operator.write_text(json.dumps({"pid": 1, "url": url}))
    here.state.webhook_token.write_text(TOKEN)
    try:
        with previews.opened(world):
            yield url
    finally:
        world.close()
        server.shutdown()
        server.server_close()


def wanted(project: str, **spec: Any) -> dict[str, Any]:
    body = document("urgent", **({"priority": 5, "gang": {"nodes": 2, "gpusPerNode": 4}} | spec))
    body["metadata"]["labels"] = {"muster.dev/project": project}
    return body


async def plan(people: People, person: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = await people.ask(person, "POST", "/jobs", params={"dryRun": "true"}, json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()["admission"]
    return found


async def test_a_dry_run_says_who_would_make_room_as_the_caller_may_know(tmp_path: Path) -> None:
    async with platform(tmp_path / "state", auth=True) as here, operator(here):
        people = await settle(here, tmp_path / "state")
        quota = {"limits": {"quota": {"preempts": True}}}
        for project in ("nlp", "cv"):
            assert (await people.ask("admin", "PUT", f"/projects/{project}", json=quota)).status_code == 200
        next(work for work in here.services.background.works if work.name == "quotas").wake.set()
        big = await people.submit("cv-owner", "cv-big", gang={"nodes": 2, "gpusPerNode": 4})
        uid = big.json()["id"]

        async def handed_over() -> bool:
            jobs = [(await people.ask("admin", "GET", f"/jobs/{each}")).json() for each in (uid, *people.jobs.values())]
            return all(job["handedOver"] for job in jobs)

        await until(handed_over, "the hand-over")
        gang = GangStatus(wanted=2, ready=2, nodes=("local-0", "local-1"), pool="local", capacity="on-demand")
        commit = CheckpointStatus(step=1, committed_at=1_000.0, uri="file:///c")
        here.operate(uid, phase=Phase.RUNNING, attempt=1, gang=gang, since=1_000.0, checkpoint=commit)

        async def preempts() -> dict[str, Any]:
            found = await plan(people, "nlp-member", wanted("nlp"))
            return found if found["verdict"] == "preempts" else {}

        found = await until(preempts, "the quota to be known to the operator")
        assert found["allowedBy"] == "the quota of project nlp (preempts)"
        (out,) = found["evictions"]
        assert (out["project"], out["id"], out["job"]) == ("another project", None, None)
        assert (out["gpus"], out["nodes"], out["nodesKept"]) == (8, 2, 0)
        assert out["because"] == "which has priority 0 where this job has 5"
        assert out["uncommittedGpuSeconds"] > 0 < out["restartGpuSeconds"]
        assert "cv" not in json.dumps(found)
        mine = (await plan(people, "cv-member", wanted("cv")))["evictions"]
        assert [(each["project"], each["id"], each["job"]) for each in mine] == [("cv", uid, "cv-big")]
        admins = (await plan(people, "admin", wanted("nlp")))["evictions"]
        assert [(each["project"], each["job"]) for each in admins] == [("cv", "cv-big")]
        waits = await plan(people, "nlp-member", wanted("nlp", priority=0))
        assert (waits["verdict"], waits["code"]) == ("waits", "AwaitingCapacity")
        assert "held by 2 gangs of other projects 4 nodes (8 GPUs), nlp/nlp-job 2 nodes" in waits["because"]
        assert (await plan(people, "nlp-member", wanted("nlp", suspend=True)))["verdict"] == "suspended"
        assert "verdict" not in (await people.ask("admin", "GET", f"/jobs/{uid}/why")).text
        jobs = (await people.ask("admin", "GET", "/jobs")).json()["items"]
        assert "urgent" not in {job["name"] for job in jobs}


async def test_a_dry_run_does_without_an_operator_and_says_why(tmp_path: Path) -> None:
    async with platform(tmp_path / "state") as here:

        async def asked() -> dict[str, Any]:
            reply = await here.client.post("/api/v1/jobs", params={"dryRun": "true"}, json=document("alone"))
            assert reply.json()["accepted"]
            found: dict[str, Any] = reply.json()["admission"]
            return found

        assert await asked() == {
            "verdict": "unknown", "code": "", "because": "no operator runs here", "nodes": 0, "evictions": [],
            "allowedBy": None,
        }  # fmt: skip
        here.state.operator.write_text(json.dumps({"url": "http://127.0.0.1:9"}))
        assert "the operator's token can't be read" in (await asked())["because"]
        here.state.webhook_token.write_text("another")
        assert "the operator can't be reached" in (await asked())["because"]
        async with operator(here):
            here.state.webhook_token.write_text("another")
            assert (await asked())["because"] == "the operator answered 401: the bearer token is missing or wrong"
            here.state.webhook_token.write_text(TOKEN)
            assert (await asked())["verdict"] == "starts"
        refused = await here.client.post(
            "/api/v1/jobs",
            params={"dryRun": "true"},
            json=document("alone", runtime={"env": [{"name": "LD_PRELOAD", "value": "x"}]}),
        )
        assert refused.json()["admission"] is None


async def test_what_is_no_question_is_refused_and_one_that_does_not_lead_is_asked_again(tmp_path: Path) -> None:
    async with platform(tmp_path / "state") as here, operator(here) as url:
        own = {"Authorization": f"Bearer {TOKEN}"}
        wrong = {"Authorization": "Bearer other"}
        for headers, body, status in (({}, b"{}", 401), (wrong, b"{}", 401), (own, b"{}", 400), (own, b"\xff", 400)):
            reply = await asyncio.to_thread(httpx2.post, f"{url}{PATH}", content=body, headers=headers)
            assert reply.status_code == status, reply.text

        asked, idle, leads = [], PreviewHandler(lambda: TOKEN, JobSpec), PreviewHandler(lambda: TOKEN, JobSpec)
        world = LocalWorld(here.state.root, VirtualNodes(2, 4), (), JobSpec, reads_only=True)

        def service(request: HttpRequest) -> HttpReply:
            """Two replicas, of which the third request meets the one that leads."""
            asked.append(request)
            return leads(request) if len(asked) > 2 else idle(request)

        server = serve_pages(LoopLiveness(), "127.0.0.1", 0, {}, {PATH: service})
        here.state.operator.write_text(json.dumps({"url": f"http://127.0.0.1:{server.server_address[1]}"}))
        try:
            with leads.opened(world):
                plan = await here.client.post("/api/v1/jobs", params={"dryRun": "true"}, json=document("alone"))
            assert (plan.json()["admission"]["verdict"], len(asked)) == ("starts", 3)
        finally:
            world.close()
            server.shutdown()
            server.server_close()
