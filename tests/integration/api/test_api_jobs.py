"""Submitting, listing and steering jobs, on both databases."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import yaml
from sqlalchemy import update
from tests.integration.api.platform import Platform, document, until

from muster.api.core.database.tables import JobRow
from muster.words.status import Phase


async def test_a_submitted_job_is_stored_with_all_defaults_and_handed_over(here: Platform) -> None:
    made = await here.submit("demo", runtime={"env": [{"name": "HF_TOKEN", "value": "hunter2"}]})
    assert made["metadata"]["name"] == "demo"
    assert made["metadata"]["namespace"] == "default"
    assert made["spec"]["training"]["optimizer"]["lr"] == 3e-4
    assert made["spec"]["checkpoint"]["uri"] == f"file://{here.state.checkpoints.resolve()}"
    assert made["spec"]["runtime"]["env"] == [{"name": "HF_TOKEN", "value": "***"}]
    assert (made["status"]["phase"], made["status"]["code"], made["handedOver"]) == ("Queued", "Submitted", False)
    await here.handed_over(made["id"])
    (job,) = here.cluster.jobs()
    assert (job.metadata.uid, job.metadata.name) == (made["id"], "demo")
    assert job.spec.runtime.env[0].value == "hunter2", "the worker needs the value that readers do not see"


async def test_yaml_and_json_mean_the_same(here: Platform) -> None:
    body = yaml.safe_dump(document("in-yaml"))
    reply = await here.client.post(
        "/api/v1/jobs", content=body, headers={"content-type": "application/yaml; charset=utf-8"}
    )
    assert reply.status_code == 201, reply.text
    in_json = await here.submit("in-json")
    assert reply.json()["spec"] == in_json["spec"]
    assert reply.headers["location"] == f"/api/v1/jobs/{reply.json()['id']}"


async def test_a_dry_run_says_everything_and_stores_nothing(here: Platform) -> None:
    reply = await here.client.post(
        "/api/v1/jobs", params={"dryRun": True}, json=document(gang={"nodes": {"min": 1, "max": 4}})
    )
    plan = reply.json()
    assert reply.status_code == 200
    assert plan["accepted"] is True
    assert plan["worldSize"] == {"min": 1, "max": 4}
    assert plan["accumulation"] == [
        {"nodes": 1, "ranks": 1, "microSteps": 8},
        {"nodes": 2, "ranks": 2, "microSteps": 4},
        {"nodes": 4, "ranks": 4, "microSteps": 2},
    ]
    assert plan["parameters"] == 1_017_728
    assert plan["samplesPerStep"] == 64
    assert plan["job"]["spec"]["checkpoint"]["uri"].startswith("file:///")
    assert (await here.get("/jobs"))["items"] == []


async def test_a_dry_run_names_what_would_be_refused_and_what_looks_wrong(here: Platform) -> None:
    await here.submit("demo")
    wanted = document("demo")
    wanted["spec"]["training"]["model"] = {"from": {"job": "nobody"}}
    wanted["spec"]["training"]["data"]["train"] = [{"source": "relative.txt"}, {"source": "/nowhere/at/all.txt"}]
    plan = (await here.client.post("/api/v1/jobs", params={"dryRun": True}, json=wanted)).json()
    assert plan["accepted"] is False
    assert [(refusal["code"], refusal["path"]) for refusal in plan["refusals"]] == [
        ("invalid_job", "spec.training.model.from.job"),
        ("name_taken", "metadata.name"),
    ]
    paths = [warning["path"] for warning in plan["warnings"]]
    assert paths == ["spec.training.data.train[0].source", "spec.training.data.train[1].source"]


@pytest.mark.parametrize(
    ("steps", "warmup", "path", "words"),
    [
        (20, 30, "optimizer.schedule.warmupSteps", "30 steps of warm-up are all of the 20 steps of the run"),
        (1, 0, "length", "the run has one step, which is the last of schedule cosine: it is made at minRatio"),
    ],
    ids=["a warm-up longer than the run", "one step"],
)
async def test_a_dry_run_names_what_is_allowed_and_odd(
    here: Platform, steps: int, warmup: int, path: str, words: str
) -> None:
    wanted = document()
    wanted["spec"]["training"]["length"] = {"steps": steps}
    wanted["spec"]["training"]["optimizer"] = {"schedule": {"name": "cosine", "warmupSteps": warmup}}
    plan = (await here.client.post("/api/v1/jobs", params={"dryRun": True}, json=wanted)).json()
    assert (plan["accepted"], plan["refusals"]) == (True, [])
    told = [warning["message"] for warning in plan["warnings"] if warning["path"] == f"spec.training.{path}"]
    assert any(words in message for message in told)


async def test_every_fault_is_named_with_its_path(here: Platform) -> None:
    wanted = document("Bad_Name")
    wanted["spec"]["training"]["optimizer"] = {"learningRate": 1}
    wanted["spec"]["training"]["length"] = {"steps": "many"}
    reply = await here.client.post("/api/v1/jobs", json=wanted)
    problem = reply.json()
    assert (reply.status_code, reply.headers["content-type"], problem["code"]) == (
        422,
        "application/problem+json",
        "invalid_job",
    )
    assert reply.headers["x-should-retry"] == "false"
    faults = {fault["path"]: fault for fault in problem["errors"]}
    assert set(faults) == {"metadata.name", "spec.training.optimizer.learningRate", "spec.training.length.steps"}
    assert faults["spec.training.length.steps"]["message"] == "must be a whole number, not text ('many')"
    assert problem["error"]["code"] == "invalid_job"
    assert problem["error"]["param"] == problem["errors"][0]["path"]
    assert (await here.get("/jobs"))["items"] == []


async def test_a_misspelt_key_gets_a_suggestion(here: Platform) -> None:
    wanted = document()
    wanted["spec"]["gang"]["gpuPerNode"] = 8
    problem = (await here.client.post("/api/v1/jobs", json=wanted)).json()
    (fault,) = problem["errors"]
    assert fault | {"column": 0} == {
        "path": "spec.gang.gpuPerNode",
        "message": "unknown key",
        "didYouMean": "gpusPerNode",
        "line": 1,
        "column": 0,
    }


async def test_no_secret_comes_back_in_a_refusal(here: Platform) -> None:
    wanted = document(runtime={"env": [{"name": "HF_TOKEN", "value": 123456789}, {"name": "B", "valu": "hunter2"}]})
    wanted["spec"]["checkpoint"] = {"uri": "https://me:hunter3@store/x"}
    wanted["spec"]["training"]["length"] = {"steps": "http://me:hunter4@x"}
    text = (await here.client.post("/api/v1/jobs", json=wanted)).text
    assert "spec.runtime.env[0].value" in text
    for secret in ("123456789", "hunter2", "hunter3", "hunter4"):
        assert secret not in text


@pytest.mark.both_databases
async def test_a_live_name_is_taken_and_a_finished_one_is_free(here: Platform) -> None:
    first = await here.submit("demo")
    reply = await here.client.post("/api/v1/jobs", json=document("demo"))
    assert (reply.status_code, reply.json()["code"], reply.json()["jobId"]) == (409, "name_taken", first["id"])
    elsewhere = document("demo")
    elsewhere["metadata"]["namespace"] = "other"
    assert (await here.client.post("/api/v1/jobs", json=elsewhere)).status_code == 201
    await here.finish(first["id"])
    second = await here.submit("demo")
    assert second["id"] != first["id"]
    # The cluster still has the finished object of that name: the relay asks for its removal, the operator removes it.

    async def marked() -> bool:
        job = here.cluster.get(first["id"])
        return job.metadata.deletion_timestamp is not None

    await until(marked, "the finished object to be marked for removal")
    here.cluster.remove(first["id"])
    await here.handed_over(second["id"])
    assert (await here.get(f"/jobs/{first['id']}"))["status"]["phase"] == "Succeeded", "its history stays"


@pytest.mark.both_databases
async def test_many_at_once_with_one_name_make_one_job(here: Platform) -> None:
    replies = await asyncio.gather(*(here.client.post("/api/v1/jobs", json=document("demo")) for _ in range(12)))
    assert sorted(reply.status_code for reply in replies) == [201] + [409] * 11
    assert len((await here.get("/jobs"))["items"]) == 1


@pytest.mark.both_databases
async def test_pages_and_filters(here: Platform) -> None:
    for number in range(7):
        wanted = document(f"job-{number}")
        wanted["metadata"]["labels"] = {"team": "nlp" if number % 2 else "vision", "n": str(number)}
        assert (await here.client.post("/api/v1/jobs", json=wanted)).status_code == 201
    names: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = await here.get("/jobs", limit=3, **cursor)
        names += [item["name"] for item in page["items"]]
        if page["nextCursor"] is None:
            break
        cursor = {"cursor": page["nextCursor"]}
    assert names == [f"job-{number}" for number in reversed(range(7))]

    async def found(**parameters: Any) -> list[str]:
        return [item["name"] for item in (await here.get("/jobs", **parameters))["items"]]

    assert await found(label="team=nlp") == ["job-5", "job-3", "job-1"]
    assert await found(label=["team=nlp", "n=3"]) == ["job-3"]
    assert await found(name="job-2") == ["job-2"]
    assert await found(namespace="other") == []
    uid = (await here.get("/jobs", name="job-4"))["items"][0]["id"]
    await here.finish(uid, Phase.FAILED)
    assert await found(phase="Failed") == ["job-4"]
    assert await found(phase=["Failed", "Queued"], limit=2) == ["job-6", "job-5"]
    assert await found(live=False) == ["job-4"]
    assert len(await found(live=True)) == 6
    bad = await here.client.get("/api/v1/jobs", params={"cursor": "no-cursor"})
    assert (bad.status_code, bad.json()["code"]) == (422, "invalid_cursor")


async def test_suspend_and_resume_reach_the_cluster_and_may_be_repeated(here: Platform) -> None:
    uid = (await here.submit())["id"]
    await here.handed_over(uid)
    for _ in range(2):
        reply = await here.client.post(f"/api/v1/jobs/{uid}:suspend")
        assert (reply.status_code, reply.json()["spec"]["suspend"]) == (200, True)
    await here.handed_over(uid)
    assert here.cluster.get(uid).spec.suspend is True
    for _ in range(2):
        assert (await here.client.post(f"/api/v1/jobs/{uid}:resume")).status_code == 200
    await here.handed_over(uid)
    assert here.cluster.get(uid).spec.suspend is False
    types = await here.events(uid)
    assert types == ["job.created", "job.suspend_requested", "job.resume_requested"]


async def test_a_wish_keeps_what_others_changed_in_the_cluster(here: Platform) -> None:
    uid = (await here.submit())["id"]
    await here.handed_over(uid)
    here.cluster.write_spec(uid, here.cluster.get(uid).spec.model_copy(update={"priority": 7}))
    await here.client.post(f"/api/v1/jobs/{uid}:suspend")
    await here.handed_over(uid)
    spec = here.cluster.get(uid).spec
    assert (spec.suspend, spec.priority) == (True, 7)


@pytest.mark.both_databases
async def test_a_repeated_wish_overrules_an_edit_in_the_cluster(here: Platform) -> None:
    uid = (await here.submit())["id"]
    await here.handed_over(uid)
    for suspended, verb in ((True, "resume"), (False, "suspend"), (False, "suspend"), (True, "resume")):
        here.cluster.write_spec(uid, here.cluster.get(uid).spec.model_copy(update={"suspend": suspended}))
        await here.client.post(f"/api/v1/jobs/{uid}:{verb}")
        await here.handed_over(uid)
        assert here.cluster.get(uid).spec.suspend is (verb == "suspend")
    assert await here.events(uid) == ["job.created", "job.suspend_requested", "job.resume_requested"]


@pytest.mark.both_databases
async def test_cancel(here: Platform) -> None:
    uid = (await here.submit())["id"]
    for _ in range(2):
        assert (await here.client.post(f"/api/v1/jobs/{uid}:cancel")).status_code == 200
    await here.handed_over(uid)
    assert here.cluster.get(uid).spec.cancel is True
    refused = await here.client.post(f"/api/v1/jobs/{uid}:resume")
    assert (refused.status_code, refused.json()["code"]) == (409, "job_cancelling")
    await here.finish(uid, Phase.CANCELLED)
    assert (await here.client.post(f"/api/v1/jobs/{uid}:cancel")).status_code == 200, "repeating it is harmless"


@pytest.mark.parametrize("phase", [Phase.SUCCEEDED, Phase.FAILED])
async def test_a_finished_job_does_not_change(here: Platform, phase: Phase) -> None:
    uid = (await here.submit())["id"]
    await here.finish(uid, phase)
    before = here.cluster.get(uid)
    for verb in ("cancel", "suspend", "resume"):
        reply = await here.client.post(f"/api/v1/jobs/{uid}:{verb}")
        assert (reply.status_code, reply.json()["code"]) == (409, "job_finished"), verb
        assert phase in reply.json()["detail"]
    assert here.cluster.get(uid).spec == before.spec


async def test_a_clone_is_a_new_job_with_the_changes(here: Platform) -> None:
    first = await here.submit("demo", priority=3)
    await here.client.post(f"/api/v1/jobs/{first['id']}:suspend")
    patch = {"spec": {"training": {"optimizer": {"lr": 0.001}}, "priority": None}}
    reply = await here.client.post(f"/api/v1/jobs/{first['id']}:clone", json=patch)
    made = reply.json()
    assert reply.status_code == 201, reply.text
    assert (made["metadata"]["name"], made["spec"]["suspend"], made["spec"]["priority"]) == ("demo-2", False, 0)
    assert made["spec"]["training"]["optimizer"]["lr"] == 0.001
    again = await here.client.post(f"/api/v1/jobs/{made['id']}:clone")
    assert again.json()["metadata"]["name"] == "demo-3"
    named = await here.client.post(f"/api/v1/jobs/{first['id']}:clone", json={"name": "demo"})
    assert (named.status_code, named.json()["code"]) == (409, "name_taken")
    wrong = await here.client.post(f"/api/v1/jobs/{first['id']}:clone", json={"spec": {"training": {"lenth": 1}}})
    assert wrong.json()["errors"][0] == {
        "path": "spec.training.lenth",
        "message": "unknown key",
        "didYouMean": "length",
    }
    (event,) = (await here.get(f"/jobs/{made['id']}/events"))["items"][:1]
    assert event["data"]["clonedFrom"] == first["id"]


@pytest.mark.both_databases
async def test_clones_at_one_moment_find_different_names(here: Platform) -> None:
    first = await here.submit("demo")
    replies = await asyncio.gather(*(here.client.post(f"/api/v1/jobs/{first['id']}:clone") for _ in range(4)))
    assert [reply.status_code for reply in replies] == [201] * 4
    assert {reply.json()["metadata"]["name"] for reply in replies} == {"demo-2", "demo-3", "demo-4", "demo-5"}


async def test_from_a_job_becomes_a_folder(here: Platform) -> None:
    base = (await here.submit("base"))["id"]
    wanted = document("tuned")
    wanted["spec"]["training"]["model"] = {"from": {"job": "base", "step": "last"}}
    early = await here.client.post("/api/v1/jobs", json=wanted)
    assert (early.status_code, early.json()["errors"][0]["path"]) == (422, "spec.training.model.from.job")
    assert "no checkpoint yet" in early.json()["detail"]
    here.commit(base, 20)
    made = await here.client.post("/api/v1/jobs", json=wanted)
    folder = f"file://{here.state.checkpoints.resolve()}/{base}"
    assert made.json()["spec"]["training"]["model"]["from"] == {"job": "base", "step": 20, "uri": folder}
    wanted["metadata"]["name"] = "tuned-30"
    wanted["spec"]["training"]["model"] = {"from": {"job": base, "step": 30}}
    late = await here.client.post("/api/v1/jobs", json=wanted)
    assert late.json()["errors"][0]["path"] == "spec.training.model.from.step"
    here.commit(base, 30)
    assert (await here.client.post("/api/v1/jobs", json=wanted)).status_code == 201


async def test_a_name_means_the_newest_job_of_that_name(here: Platform) -> None:
    """`from: {job: NAME}` took the newest with a commit, `export NAME` the newest: one name was two jobs."""
    older = (await here.submit("base"))["id"]
    here.commit(older, 20)
    await here.finish(older)
    newer = (await here.submit("base"))["id"]
    wanted = document("tuned")
    wanted["spec"]["training"]["model"] = {"from": {"job": "base"}}
    refused = await here.client.post("/api/v1/jobs", json=wanted)
    assert refused.status_code == 422
    (fault,) = refused.json()["errors"]
    assert fault["message"] == (
        f"job 'base' ({newer}) has no checkpoint yet; an older job of that name has it: "
        f"name that one by its id, {older}"
    )
    wanted["spec"]["training"]["model"] = {"from": {"job": older}}
    made = await here.client.post("/api/v1/jobs", json=wanted)
    assert made.json()["spec"]["training"]["model"]["from"]["uri"].endswith(older)
    here.commit(newer, 5)
    wanted["metadata"]["name"], wanted["spec"]["training"]["model"] = "tuned-newer", {"from": {"job": "base"}}
    made = await here.client.post("/api/v1/jobs", json=wanted)
    assert made.json()["spec"]["training"]["model"]["from"]["uri"].endswith(newer)


async def test_a_hidden_value_is_refused(here: Platform) -> None:
    """`get --spec` shows secrets as ***; a submission of that ran with `***`."""
    secret = {"runtime": {"env": [{"name": "HF_TOKEN", "value": "hf_abc"}, {"name": "MODE", "value": "fast"}]}}
    made = await here.submit("first", **secret)
    again = {"metadata": {"name": "again"}, "spec": made["spec"]}
    for path in ("/api/v1/jobs", "/api/v1/jobs?dryRun=true"):
        refused = await here.client.post(path, json=again)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_job")
        (fault,) = refused.json()["errors"]
        assert fault["path"] == "spec.runtime.env[0].value"
        assert "put the real value in its place" in fault["message"]
    cloned = await here.client.post(f"/api/v1/jobs/{made['id']}:clone")
    assert cloned.status_code == 201, "a clone has the real value"
    masked = {"spec": {"runtime": made["spec"]["runtime"]}}
    assert (await here.client.post(f"/api/v1/jobs/{made['id']}:clone", json=masked)).status_code == 422


@pytest.mark.both_databases
async def test_a_phase_that_is_none_is_refused(here: Platform) -> None:
    """`ls --phase runing` was answered by an empty list."""
    uid = (await here.submit())["id"]
    refused = await here.client.get("/api/v1/jobs", params={"phase": ["Queued", "Runing"]})
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_parameter")
    (fault,) = refused.json()["errors"]
    assert (fault["path"], fault["didYouMean"]) == ("query.phase", "Running")
    assert "'Runing' is not one of Queued, Starting, Running" in fault["message"]
    await here.handed_over(uid)

    async def ask() -> Any:  # again, for the mirror may write the cluster's phase after ours
        async with here.services.database.write() as session:
            await session.execute(update(JobRow).where(JobRow.id == uid).values(phase="Hibernating"))
        listed = await here.client.get("/api/v1/jobs", params={"phase": ["Hibernating"]})
        return [item["phase"] for item in listed.json().get("items", [])]  # none where the mirror came between

    assert await until(ask, "a newer operator's phase to be known by its jobs") == ["Hibernating"]


async def test_what_is_not_there_is_not_found(here: Platform) -> None:
    for path in ("", "/attempts", "/events", "/checkpoints", "/metrics", "/logs", "/why"):
        reply = await here.client.get(f"/api/v1/jobs/nobody{path}")
        assert (reply.status_code, reply.json()["code"]) == (404, "job_not_found"), path
    for verb in ("cancel", "suspend", "resume", "clone"):
        assert (await here.client.post(f"/api/v1/jobs/nobody:{verb}")).json()["code"] == "job_not_found"
    for path in ("/nowhere", "/api/v1/jobs/"):
        assert (await here.client.get(path)).json()["code"] == "not_found"
    wrong = await here.client.delete("/api/v1/jobs")
    assert (wrong.status_code, wrong.json()["code"]) == (405, "method_not_allowed")
    assert json.loads(wrong.text)["instance"] == "/api/v1/jobs"


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "PYTHONSTARTUP", "BROWSER", "GIT_SSH_COMMAND", "OPENSSL_CONF", "HOME", "GCONV_PATH"]
)
async def test_what_a_process_loads_is_not_the_jobs_to_say_outside_a_container(here: Platform, name: str) -> None:
    wanted = document(runtime={"env": [{"name": "FINE", "value": "1"}, {"name": name, "value": "/tmp/x.so"}]})
    reply = await here.client.post("/api/v1/jobs", json=wanted)
    assert reply.status_code == 422
    (fault,) = reply.json()["errors"]
    assert fault["path"] == "spec.runtime.env[1].name"
    assert fault["message"].startswith(f"{name} decides what a process of this machine loads")
