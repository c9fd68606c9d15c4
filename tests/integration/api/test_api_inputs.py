"""Inputs: a job and `best` or `last` become a folder and a step, which retention spares until their reader is over."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from sqlalchemy import delete, select
from tests.integration.api.platform import Platform

from muster.api.core.database.tables import InputPinRow, JobRow
from muster.api.core.submission import input_pins
from muster.storage.errors import StoreRefusal
from muster.storage.file_store import FileStore
from muster.storage.readers import READ_SECONDS_MAX, being_read
from muster.words.checkpoint import READERS


def program(name: str, **inputs: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"program": {"command": ["eval.py"], "inputs": inputs}}}


async def base_with(here: Platform, *steps: int, best: int = 0) -> str:
    uid: str = (await here.submit("pretrain"))["id"]
    for step in steps:
        here.commit(uid, step, best=step == best)
    return uid


async def submitted(here: Platform, document: dict[str, Any], **headers: str) -> dict[str, Any]:
    reply = await here.client.post("/api/v1/jobs", json=document, headers=headers)
    assert reply.status_code == 201, reply.text
    made: dict[str, Any] = reply.json()
    return made


async def refusal(here: Platform, document: dict[str, Any]) -> tuple[str, str]:
    reply = await here.client.post("/api/v1/jobs", json=document)
    assert reply.status_code == 422, reply.text
    (fault,) = reply.json()["errors"]
    return fault["path"], fault["message"]


def inputs_of(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["program"]["inputs"]
    return found


def store_of(here: Platform, uid: str) -> FileStore:
    return FileStore(here.state.checkpoints / uid)


def until_of(here: Platform, uid: str, step: int, job: str) -> float:
    mark = here.state.checkpoints / uid / READERS / f"step-{step:08d}" / f"job-{job}.json"
    return float(json.loads(mark.read_text())["until"])


@pytest.mark.parametrize(("wanted", "step"), [("best", 20), ("last", 30), (10, 10)])
async def test_the_step_is_decided_when_the_job_is_submitted(here: Platform, wanted: str | int, step: int) -> None:
    base = await base_with(here, 10, 20, 30, best=20)
    made = await submitted(here, program("eval", base={"job": "pretrain", "step": wanted}))
    uri = f"file://{here.state.checkpoints.resolve()}/{base}"
    assert inputs_of(made) == {"base": {"job": "pretrain", "step": step, "uri": uri}}
    here.commit(base, 40, best=True)
    cloned = (await here.client.post(f"/api/v1/jobs/{made['id']}:clone")).json()
    assert inputs_of(cloned) == inputs_of(made)


async def test_what_can_not_be_an_input_is_refused_at_its_place(here: Platform) -> None:
    base = await base_with(here)
    at = "spec.program.inputs.base"
    assert await refusal(here, program("e", base={"job": "nobody"})) == (
        f"{at}.job",
        "there is no job 'nobody' in namespace 'default'",
    )
    path, words = await refusal(here, program("e", base={"job": "pretrain"}))
    assert (path, "has no checkpoint yet" in words) == (f"{at}.job", True)
    here.commit(base, 10)
    path, words = await refusal(here, program("e", base={"job": "pretrain", "step": 20}))
    assert (path, "has no checkpoint of step 20" in words) == (f"{at}.step", True)


async def test_a_clone_whose_input_was_removed_or_is_another_jobs_is_refused(here: Platform) -> None:
    base = await base_with(here, 10, 20)
    other = (await here.submit("other"))["id"]
    here.commit(other, 10)
    made = await submitted(here, program("eval", base={"job": "pretrain", "step": 10}))
    changed = {"spec": {"program": {"inputs": {"base": {"job": "other"}}}}}
    refused = await here.client.post(f"/api/v1/jobs/{made['id']}:clone", json=changed)
    assert refused.json()["errors"][0]["message"].startswith("is not the folder of the job 'other' that `job` names")
    here.commit(base, 10).unlink()
    refused = await here.client.post(f"/api/v1/jobs/{made['id']}:clone")
    assert "has no checkpoint of step 10" in refused.json()["detail"]


@pytest.mark.both_databases
async def test_an_input_is_spared_by_retention_until_its_job_is_over(here: Platform) -> None:
    await here.no_more_housekeeping()  # which would renew the mark
    base = await base_with(here, 10, 20)
    eval_id = (await submitted(here, program("eval", base={"job": "pretrain", "step": 10})))["id"]
    store, now = store_of(here, base), time.time()
    assert being_read(store, now) == {10}
    assert until_of(here, base, 10, eval_id) == pytest.approx(now + READ_SECONDS_MAX, abs=600)
    await input_pins.keep_up(here.services)  # also where the first mark has lapsed meanwhile
    assert until_of(here, base, 10, eval_id) == pytest.approx(now + input_pins.PIN_SECONDS, abs=600)
    await here.finish(eval_id)
    await input_pins.keep_up(here.services)
    assert being_read(store, now) == frozenset()
    async with here.services.database.read() as session:
        assert (await session.scalars(select(InputPinRow))).all() == []


async def test_a_job_that_was_deleted_before_its_mark_was_taken_back_leaves_none(here: Platform) -> None:
    base = await base_with(here, 10)
    eval_id = (await submitted(here, program("eval", base={"job": "pretrain"})))["id"]
    await here.finish(eval_id)
    async with here.services.database.write() as session:
        await session.execute(delete(JobRow).where(JobRow.id == eval_id))
    await input_pins.keep_up(here.services)
    assert being_read(store_of(here, base), time.time()) == frozenset()


async def test_a_submission_that_stores_no_job_leaves_no_mark(here: Platform) -> None:
    base = await base_with(here, 10)
    await here.submit("eval")
    taken = await here.client.post("/api/v1/jobs", json=program("eval", base={"job": "pretrain"}))
    assert (taken.status_code, taken.json()["code"]) == (409, "name_taken")
    assert being_read(store_of(here, base), time.time()) == frozenset()
    first = await submitted(here, program("once", base={"job": "pretrain"}), **{"Idempotency-Key": "k"})
    again = await submitted(here, program("once", base={"job": "pretrain"}), **{"Idempotency-Key": "k"})
    assert first["id"] == again["id"]
    marks = [entry.key for entry in store_of(here, base).objects(f"{READERS}/")]
    assert marks == [f"{READERS}/step-00000010/job-{first['id']}.json"]


async def test_a_checkpoint_that_goes_while_its_job_is_submitted_is_refused(
    here: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = await base_with(here, 10, 20)
    commit = here.commit(base, 10)
    write = input_pins.readers.reserve

    def as_retention_goes_by(*arguments: Any) -> None:
        commit.unlink(missing_ok=True)
        write(*arguments)

    monkeypatch.setattr(input_pins.readers, "reserve", as_retention_goes_by)
    path, words = await refusal(here, program("e", base={"job": "pretrain", "step": 10}))
    assert path == "spec.program.inputs.base.step"
    assert words.endswith("was just removed by retention; name another")
    assert being_read(store_of(here, base), time.time()) == frozenset()


async def test_a_folder_that_may_not_be_written_is_said_in_the_first_event(
    here: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    await base_with(here, 10)

    def refuse(*_: Any) -> None:
        raise StoreRefusal("s3://x: access denied")

    monkeypatch.setattr(input_pins.readers, "reserve", refuse)
    made = await submitted(here, program("eval", base={"job": "pretrain"}))
    (event,) = (await here.get(f"/jobs/{made['id']}/events"))["items"][:1]
    assert event["message"] == (
        "job eval was submitted; the checkpoint of spec.program.inputs.base can't be kept from retention yet: "
        "s3://x: access denied"
    )
