"""A sweep over the API: its trials are ordinary jobs, so many at once; losers are cancelled; nothing is done twice."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import delete
from tests.integration.api.platform import Platform, platform, until
from tests.integration.api.test_api_history import record, worker_dir

from muster.api.core.database.tables import JobRow
from muster.api.core.submission.service import SubmissionService
from muster.api.sweeps import controller
from muster.api.sweeps.controller import SweepWork
from muster.api.sweeps.examples import EXAMPLE_SWEEP
from muster.replies.sweeps import SweepDetail, SweepList
from muster.words.status import CheckpointStatus, Phase

LR = "training.optimizer.lr"


def sweep_document(name: str = "lr", **words: Any) -> dict[str, Any]:
    document = copy.deepcopy(EXAMPLE_SWEEP)
    document["metadata"] = {"name": name}
    tried = {LR: {"values": [0.001, 0.002, 0.003, 0.004]}}
    document["sweep"] = {"parameters": tried, "search": "grid", "concurrency": 2, **words}
    return document


async def create(here: Platform, **words: Any) -> dict[str, Any]:
    reply = await here.client.post("/api/v1/sweeps", json=sweep_document(**words))
    assert reply.status_code == 201, reply.text
    made: dict[str, Any] = reply.json()
    return made


async def started(here: Platform, sweep_id: str, count: int) -> list[dict[str, Any]]:
    async def ask() -> Any:
        here.services[SweepWork].wake.set()
        table = (await here.get(f"/sweeps/{sweep_id}"))["table"]
        return table if len(table) >= count else None

    found: list[dict[str, Any]] = await until(ask, f"{count} trials")
    return found


async def ended(here: Platform, sweep_id: str) -> dict[str, Any]:
    async def ask() -> Any:
        here.services[SweepWork].wake.set()
        sweep = await here.get(f"/sweeps/{sweep_id}")
        return sweep if sweep["finishedAt"] else None

    found: dict[str, Any] = await until(ask, "the sweep's end")
    return found


async def train(here: Platform, job_id: str, losses: dict[int, float], phase: Phase | None = Phase.SUCCEEDED) -> None:
    """Write evaluations as the trainer would, and a status as the operator would; None: it trains on."""
    await here.handed_over(job_id)
    lines = [record(1, step, loss, evaluation_loss=loss) for step, loss in losses.items()]
    (worker_dir(here, job_id, 1) / "steps.jsonl").write_text("\n".join(lines) + "\n")
    checkpoint = CheckpointStatus(
        step=max(losses), committed_at=1.0, uri="file:///x", best_step=min(losses, key=losses.get)
    )
    now = time.time()
    here.operate(
        job_id, phase=phase or Phase.RUNNING, checkpoint=checkpoint, attempt=1, finished_at=now if phase else None
    )


@pytest.mark.both_databases
async def test_a_sweep_runs_so_many_at_once_and_names_the_best_commit(here: Platform) -> None:
    sweep = await create(here)
    assert SweepDetail.model_validate(sweep).trials == 4
    for first, losses in ((1, ({50: 3.0, 100: 2.5}, {50: 2.0, 100: 2.2})), (3, ({50: 4.0}, {50: 3.5}))):
        table = await started(here, sweep["id"], first + 1)
        assert [trial["number"] for trial in table] == list(range(1, first + 2)), "never more than two at once"
        for trial, found in zip(table[first - 1 :], losses, strict=True):
            await train(here, trial["jobId"], found)
    done = await ended(here, sweep["id"])
    assert (done["phase"], done["live"], done["started"]) == ("Succeeded", 0, 4)
    assert [trial["value"] for trial in done["table"]] == [2.5, 2.0, 4.0, 3.5]
    assert [trial["job"] for trial in done["table"]] == [f"lr-{number}" for number in (1, 2, 3, 4)]
    job_id = done["table"][1]["jobId"]
    assert done["best"] == {
        "trial": 2,
        "parameters": {LR: 0.002},
        "value": 2.0,
        "valueStep": 50,
        "job": "lr-2",
        "commit": {"job": job_id, "step": 50},
    }
    job = await here.get(f"/jobs/{job_id}")
    assert job["metadata"]["labels"] == {"muster.dev/sweep": sweep["id"], "muster.dev/trial": "2"}
    assert job["spec"]["training"]["optimizer"]["lr"] == 0.002
    listed = SweepList.model_validate(await here.get("/sweeps", live=False)).items
    assert [(each.id, each.best_trial, each.best_value) for each in listed] == [(sweep["id"], 2, 2.0)]


@pytest.mark.both_databases
async def test_a_loser_is_cancelled_and_told_why_and_frees_its_place(here: Platform) -> None:
    sweep = await create(here, stopping={"kind": "asha", "minSteps": 50, "factor": 2}, metric={"name": "loss"})
    first, second = await started(here, sweep["id"], 2)
    await train(here, first["jobId"], {50: 2.0}, None)

    async def judged() -> Any:
        here.services[SweepWork].wake.set()
        return (await here.get(f"/sweeps/{sweep['id']}"))["table"][0]["rungs"]

    assert await until(judged, "the first verdict") == [{"step": 50, "value": 2.0, "place": 1, "of": 1, "goesOn": True}]
    await train(here, second["jobId"], {50: 3.0}, None)

    async def asked() -> Any:
        here.services[SweepWork].wake.set()
        return (await here.get(f"/jobs/{second['jobId']}"))["spec"]["cancel"]

    await until(asked, "the cancellation")
    table = (await here.get(f"/sweeps/{sweep['id']}"))["table"]
    assert (len(table), table[1]["reason"]) == (2, "place 2 of 2 at step 50; 1 went on")
    spec = (await here.get(f"/jobs/{second['jobId']}"))["spec"]
    assert spec["cancelReason"] == f"stopped by sweep {sweep['name']}: place 2 of 2 at step 50; 1 went on"
    await here.finish(second["jobId"], Phase.CANCELLED)
    assert len(await started(here, sweep["id"], 3)) == 3
    assert not (await here.get(f"/jobs/{first['jobId']}"))["spec"]["cancel"]
    last = (await here.client.post(f"/api/v1/sweeps/{sweep['id']}:cancel")).json()
    assert last["phase"] == "Stopping"
    for trial in (await here.get(f"/sweeps/{sweep['id']}"))["table"]:
        if trial["phase"] not in ("Cancelled", "Succeeded"):
            await here.finish(trial["jobId"], Phase.CANCELLED)
    done = await ended(here, sweep["id"])
    assert (done["phase"], done["started"], done["bestTrial"]) == ("Cancelled", 3, 1)
    again = await here.client.post(f"/api/v1/sweeps/{sweep['id']}:cancel")
    assert again.status_code == 200, "repeating it is harmless"


class Killed(BaseException):
    """A crash, as the code under it meets it: nothing catches it."""


@pytest.mark.parametrize("killed_at", ["_keep", "_stop", "_submit", "_note"])
async def test_a_kill_around_any_act_makes_no_second_job(
    here: Platform, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    """The act is done, and what follows it is lost; two rounds at once race for the same trials meanwhile."""
    await here.services.background.stop()
    sweep = await create(here)
    real, kills = getattr(controller, killed_at), 0

    async def killed(*given: Any, **named: Any) -> Any:
        nonlocal kills
        await real(*given, **named)
        kills += 1
        raise Killed

    monkeypatch.setattr(controller, killed_at, killed)
    for _ in range(3):
        with contextlib.suppress(Killed):
            await controller.step(here.services)
    assert kills >= 2
    monkeypatch.setattr(controller, killed_at, real)
    await asyncio.gather(*(controller.step(here.services) for _ in range(3)))
    table = (await here.get(f"/sweeps/{sweep['id']}"))["table"]
    assert [trial["number"] for trial in table] == [1, 2]
    jobs = (await here.get("/jobs"))["items"]
    assert {job["id"] for job in jobs} == {trial["jobId"] for trial in table}


@pytest.mark.both_databases
async def test_a_request_that_is_repeated_makes_one_sweep(here: Platform) -> None:
    key = {"Idempotency-Key": "once"}
    post = here.client.post
    made = await asyncio.gather(*(post("/api/v1/sweeps", json=sweep_document(), headers=key) for _ in range(4)))
    assert {reply.status_code for reply in made} == {201}
    assert len({reply.json()["id"] for reply in made}) == 1
    other = await post("/api/v1/sweeps", json=sweep_document("other"), headers=key)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    taken = await post("/api/v1/sweeps", json=sweep_document())
    assert (taken.status_code, taken.json()["code"]) == (409, "sweep_name_taken")
    assert taken.json()["sweepId"] == made[0].json()["id"]


@pytest.mark.both_databases
async def test_a_trial_waits_for_its_name_and_says_so(here: Platform) -> None:
    holder = await here.submit("lr-1")
    sweep = await create(here, concurrency=1)

    async def waits() -> Any:
        here.services[SweepWork].wake.set()
        found = await here.get(f"/sweeps/{sweep['id']}")
        return found["because"] if "can't start" in found["because"] else None

    assert "trial 1 can't start yet: Namespace 'default' has a live job named 'lr-1'" in await until(
        waits, "a hindrance"
    )
    await here.finish(holder["id"])
    assert len(await started(here, sweep["id"], 1)) == 1


@pytest.mark.both_databases
async def test_what_is_not_valid_any_more_is_refused_and_the_others_go_on(here: Platform) -> None:
    await here.services.background.stop()
    document = sweep_document()
    document["spec"]["checkpoint"] = {"uri": "s3://bucket/cv"}
    sweep = (await here.client.post("/api/v1/sweeps", json=document)).json()
    limits = {"limits": {"checkpointPrefix": "s3://bucket/nlp"}}
    reply = await here.client.put("/api/v1/projects/default", json=limits)
    assert reply.status_code == 200, reply.text
    for _ in range(4):
        await controller.step(here.services)
    found = await here.get(f"/sweeps/{sweep['id']}")
    assert {trial["phase"] for trial in found["table"]} == {"Refused"}
    assert "checkpoint" in found["table"][0]["reason"]
    assert (found["phase"], found["started"]) == ("Failed", 4)


async def test_a_secret_is_shown_to_nobody_and_a_deleted_trial_keeps_its_value(here: Platform) -> None:
    document = sweep_document(concurrency=1)
    document["spec"]["runtime"] = {"env": [{"name": "HF_TOKEN", "value": "hf_verysecret"}]}
    sweep = (await here.client.post("/api/v1/sweeps", json=document)).json()
    (trial,) = await started(here, sweep["id"], 1)
    await train(here, trial["jobId"], {50: 1.5})
    await started(here, sweep["id"], 2)
    async with here.services.database.write() as session:  # as DELETE does it when the cluster has let go of the job
        await session.execute(delete(JobRow).where(JobRow.id == trial["jobId"]))
    reply: httpx2.Response = await here.client.get(f"/api/v1/sweeps/{sweep['id']}")
    assert "verysecret" not in reply.text
    first = reply.json()["table"][0]
    assert (first["jobId"], first["phase"], first["value"]) == (None, "Succeeded", 1.5)
    assert reply.json()["best"]["commit"] is None


async def test_faults_are_told_with_their_lines(tmp_path: Path) -> None:
    async with platform(tmp_path / "state") as local:
        text = """metadata: {name: lr}
sweep:
  search: grid
  parameters:
    training.optimizer.lr:
      values: [-1.0]
spec: {training: {model: {preset: muster-1m}, data: {train: [{source: "builtin://python-stdlib"}]}}}
"""
        headers = {"content-type": "application/yaml"}
        reply = await local.client.post("/api/v1/sweeps", content=text, headers=headers)
        assert (reply.status_code, reply.json()["code"]) == (422, "invalid_sweep")
        told = {fault["path"]: fault.get("line") for fault in reply.json()["errors"]}
        assert told["sweep.parameters.training.optimizer.lr"] == 5
        assert (await local.get("/sweeps"))["items"] == []


async def test_trials_that_differ_by_numbers_alone_are_judged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep of a thousand rates asked the database and the disk a thousand times for the same answer."""
    calls = 0

    async def counted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return await draft(*given)

    draft = SubmissionService.draft
    monkeypatch.setattr(SubmissionService, "draft", counted)
    async with platform(tmp_path / "state") as here:
        await here.services.background.stop()  # which would start the trials, and judge each again
        await create(here)
        assert calls == 1
        missing = {"training.data.train[0].source": {"values": ["file-" + 24 * letter for letter in "ab"]}}
        rates = {LR: {"values": [0.001, 0.002]}}
        refused = await here.client.post("/api/v1/sweeps", json=sweep_document("data", parameters=missing | rates))
        assert calls == 3, "each file once"
        assert refused.status_code == 422
        for trials, letter in (("trial 1", "a"), ("trial 3", "b")):
            found = [each["message"] for each in refused.json()["errors"] if each["message"].startswith(trials)]
            assert len(found) == 1
            assert f"and 1 more: there is no file file-{letter * 24}" in found[0]
