"""Evaluations: a program runs once for each checkpoint of a job, whatever is killed, and its numbers stand there."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from tests.integration.api.platform import Platform, platform, until
from tests.integration.api.test_api_inputs import base_with, refusal, submitted

from muster.api.core.database.db import Database
from muster.api.core.database.tables import EvaluationRunRow, JobRow
from muster.api.core.evaluations import controller
from muster.words.checkpoint import READERS
from muster.words.status import Phase


@pytest.fixture
async def still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Platform]:
    """The API on SQLite, in which only the test itself carries evaluations on."""
    monkeypatch.setattr(controller, "EVALUATION_SECONDS", 1e9)
    async with platform(tmp_path / "state") as here:
        yield here


def evaluation(name: str = "arc", each: str = "kept", **program: Any) -> dict[str, Any]:
    after = {"job": "pretrain", "each": each}
    return {"metadata": {"name": name}, "spec": {"program": {"command": ["eval.py"], "after": after, **program}}}


async def runs_of(here: Platform, evaluation_id: str) -> dict[int, JobRow]:
    async with here.services.database.read() as session:
        query = select(EvaluationRunRow, JobRow).join(JobRow, JobRow.id == EvaluationRunRow.job_id)
        found = await session.execute(query.where(EvaluationRunRow.evaluation_id == evaluation_id))
        return {run.step: job for run, job in found}


async def finish(here: Platform, job_id: str, **status: Any) -> None:
    await here.handed_over(job_id)
    if status:
        here.operate(job_id, **status)
    await here.finish(job_id)


async def test_each_checkpoint_is_evaluated_by_an_ordinary_job(still: Platform) -> None:
    base = await base_with(still, 10, 20)
    made = await submitted(still, evaluation(inputs={"data": {"source": "hf://org/name@v1"}}))
    assert (made["status"]["phase"], made["handedOver"]) == ("Running", True)
    await controller.step(still.services)
    await controller.step(still.services)
    runs = await runs_of(still, made["id"])
    assert {step: job.name for step, job in runs.items()} == {10: "arc-10", 20: "arc-20"}
    job = await still.get(f"/jobs/{runs[10].id}")
    program = job["spec"]["program"]
    assert program["inputs"]["checkpoint"]["step"] == 10
    assert program["inputs"]["data"]["source"] == "hf://org/name@v1"
    assert (program.get("after"), job["spec"]["priority"]) == (None, controller.PRIORITY)
    marks = [path.name for path in (still.state.checkpoints / base / READERS / "step-00000010").iterdir()]
    assert marks == [f"job-{runs[10].id}.json"], "retention spares what is evaluated"
    await finish(still, runs[10].id, results={"acc": 0.5, "loss": 2.0})
    await finish(still, runs[20].id, results_fault="results.json is no JSON")
    here = (await still.get(f"/jobs/{base}/checkpoints"))["items"]
    assert [each["evaluations"][0]["phase"] for each in here] == ["Queued", "Queued"]
    still.commit(base, 30)
    await controller.step(still.services)
    ten, twenty, thirty = [each["evaluations"] for each in (await still.get(f"/jobs/{base}/checkpoints"))["items"]]
    assert [(each["evaluation"], each["results"], each["reason"]) for each in (*ten, *twenty)] == [
        ("arc", {"acc": 0.5, "loss": 2.0}, None),
        ("arc", {}, "results.json is no JSON"),
    ]
    assert thirty[0]["phase"] == "Queued"
    detail = await still.get(f"/jobs/{base}/checkpoints/10")
    assert detail["evaluations"] == ten
    parent = await still.get(f"/jobs/{made['id']}")
    words = "2 of 3 checkpoints of job pretrain evaluated, 1 to come; job pretrain has not ended"
    assert parent["status"]["because"] == words
    await still.finish(base)
    await finish(still, (await runs_of(still, made["id"]))[30].id, results={"acc": 0.6})
    await controller.step(still.services)
    parent = await still.get(f"/jobs/{made['id']}")
    assert (parent["status"]["phase"], parent["status"]["because"]) == (
        "Succeeded",
        "3 of 3 checkpoints of job pretrain evaluated",
    )
    assert await still.events(made["id"]) == ["job.created", "job.succeeded"]
    assert made["id"] not in {job.metadata.uid for job in still.cluster.jobs()}, "the cluster never has it"


async def test_the_best_is_evaluated_when_its_job_has_ended(still: Platform) -> None:
    base = await base_with(still, 10, 20, 30, best=20)
    made = await submitted(still, evaluation(each="best"))
    await controller.step(still.services)
    assert await runs_of(still, made["id"]) == {}
    await still.finish(base)
    await controller.step(still.services)
    assert list(await runs_of(still, made["id"])) == [20]


async def test_a_document_that_nothing_can_come_of_is_refused_at_its_place(still: Platform) -> None:
    at = "spec.program.after"
    path, words = await refusal(still, evaluation())
    assert (path, words.startswith("there is no job 'pretrain'")) == (f"{at}.job", True)
    await base_with(still, 10)
    await submitted(still, evaluation("first"))
    of_itself = evaluation("second")
    of_itself["spec"]["program"]["after"]["job"] = "first"
    path, words = await refusal(still, of_itself)
    assert (path, "is an evaluation, which saves no checkpoints" in words) == (f"{at}.job", True)
    path, words = await refusal(still, evaluation(inputs={"checkpoint": {"job": "pretrain"}}))
    assert "is the checkpoint that `after` evaluates" in words
    foreign = evaluation()
    foreign["spec"]["program"]["after"]["uri"] = "s3://elsewhere/uid"
    assert (await refusal(still, foreign))[0] == f"{at}.uri"


async def test_a_cancelled_evaluation_takes_its_jobs_with_it(still: Platform) -> None:
    base = await base_with(still, 10, 20)
    made = await submitted(still, evaluation())
    await controller.step(still.services)
    runs = await runs_of(still, made["id"])
    await finish(still, runs[10].id)
    assert (await still.client.post(f"/api/v1/jobs/{made['id']}:cancel")).status_code == 200
    await controller.step(still.services)
    assert (await still.get(f"/jobs/{made['id']}"))["status"]["phase"] == "Stopping"
    assert (await still.get(f"/jobs/{runs[20].id}"))["spec"]["cancel"] is True
    await still.finish(runs[20].id, Phase.CANCELLED)
    still.commit(base, 30)
    await controller.step(still.services)
    assert (await still.get(f"/jobs/{made['id']}"))["status"]["phase"] == "Cancelled"
    assert set(await runs_of(still, made["id"])) == {10, 20}
    assert (await still.client.delete(f"/api/v1/jobs/{made['id']}")).status_code == 204


async def test_what_is_evaluated_can_not_be_deleted_meanwhile(still: Platform) -> None:
    base = await base_with(still, 10)
    await submitted(still, evaluation())
    await still.finish(base)
    refused = await still.client.delete(f"/api/v1/jobs/{base}?checkpoints=true")
    assert (refused.status_code, refused.json()["code"]) == (409, "job_needed")


@pytest.mark.both_databases
async def test_it_goes_on_by_itself(here: Platform) -> None:
    await base_with(here, 10)
    made = await submitted(here, evaluation())

    async def evaluated() -> Any:
        here.services[controller.EvaluationWork].wake.set()
        return await runs_of(here, made["id"])

    assert list(await until(evaluated, "the first evaluation")) == [10]


class Killed(BaseException):
    """A crash, as the code under it meets it: nothing catches it."""


@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=pytest.mark.long)])
async def test_kills_around_every_write_leave_one_job_for_each_checkpoint(
    still: Platform, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """Each round dies before or after one of its writes is committed, until so many rounds have died."""
    base = await base_with(still, 10)
    made = await submitted(still, evaluation())
    doomed: ContextVar[bool] = ContextVar("doomed", default=False)
    dice, real, died = random.Random(36), Database.write, Counter[str]()

    @contextlib.asynccontextmanager
    async def write(self: Database) -> AsyncIterator[Any]:
        moment = dice.choice(["before", "after", "not"]) if doomed.get() and died.total() < kills else "not"
        async with real(self) as session:
            yield session
            if moment == "before":
                died["before"] += 1
                raise Killed
        if moment == "after":
            died["after"] += 1
            raise Killed

    monkeypatch.setattr(Database, "write", write)

    async def round_that_may_die() -> None:
        doomed.set(True)
        with contextlib.suppress(Killed):
            await controller.step(still.services)

    step = 10
    while died.total() < kills:
        await asyncio.create_task(round_that_may_die())
        if len(await runs_of(still, made["id"])) == step // 10:  # all that there are
            step += 10
            still.commit(base, step)
    await still.finish(base)
    await controller.step(still.services)
    runs = await runs_of(still, made["id"])
    assert sorted(runs) == list(range(10, step + 10, 10))
    assert min(died["before"], died["after"]) >= 2
    async with still.services.database.read() as session:
        names = Counter(await session.scalars(select(JobRow.name).where(JobRow.name.startswith("arc-"))))
    assert names == Counter({f"arc-{each}": 1 for each in runs})
    for each, job in runs.items():
        await finish(still, job.id, results={"step": float(each)})
    await controller.step(still.services)
    assert (await still.get(f"/jobs/{made['id']}"))["status"]["phase"] == "Succeeded"
    shown = (await still.get(f"/jobs/{base}/checkpoints"))["items"]
    assert [each["evaluations"][0]["results"] for each in shown] == [{"step": float(each)} for each in sorted(runs)]
