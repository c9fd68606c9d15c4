"""`muster.client` against the real API: both clients do the same, submit once, and read all that the API answers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, document, platform, until
from tests.integration.api.test_api_files import taken_in, upload
from tests.integration.client.speaking import Speaker

from muster.client import (
    Conflict,
    InvalidRequest,
    JobFailed,
    MusterError,
    NotAllowed,
    NotFound,
    Unreachable,
    WaitTimeout,
    exchange,
    following,
    operations,
)
from muster.recipe.document import parse_job
from muster.words.base import dump_json
from muster.words.samples import Sample, Samples, samples_key
from muster.words.signals import Cause, StepRecord
from muster.words.status import Failure, Phase, Progress

KINDS = ["threads", "asyncio"]


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Platform]:
    async with platform(tmp_path / "state") as running:
        yield running


@pytest.fixture(params=KINDS)
async def speaker(request: pytest.FixtureRequest, here: Platform) -> Speaker:
    return Speaker(request.param, here)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (exchange, following, operations):
        for name in ("PAUSE_SECONDS", "PAUSE_SECONDS_MAX", "POLL_SECONDS", "POLL_SECONDS_MAX"):
            monkeypatch.setattr(module, name, 0.01, raising=False)


def step(number: int, loss: float, attempt: int = 1, **more: Any) -> str:
    made = StepRecord(
        attempt=attempt, step=number, steps=200, at=1e9 + number, loss=loss, grad_norm=1.0, lr=1e-3, tokens=10,
        tokens_per_second=5.0, step_seconds=0.1, data_wait_seconds=0.0, memory_bytes=1, **more,
    )  # fmt: skip
    return dump_json(made)


async def test_lost_answers_make_no_second_job(speaker: Speaker) -> None:
    speaker.transport.lost = 3
    job = await speaker.do(speaker.client.jobs.submit, document())
    assert speaker.transport.lost == 0, "three answers were lost after the API had acted"
    assert [line.id for line in await speaker.all(speaker.client.jobs.list)] == [job.id]
    copy = await speaker.do(job.clone)
    speaker.transport.lost = 2
    other = await speaker.do(job.clone, name="third")
    assert {line.id for line in await speaker.all(speaker.client.jobs.list)} == {job.id, copy.id, other.id}


@pytest.mark.parametrize("speaker", ["asyncio"], indirect=True)
async def test_a_key_of_ones_own_holds_over_calls(speaker: Speaker) -> None:
    first = await speaker.do(speaker.client.jobs.submit, document(), key="tonight")
    again = await speaker.do(speaker.client.jobs.submit, document(), key="tonight")
    assert again.id == first.id
    with pytest.raises(InvalidRequest, match="came before with another body") as raised:
        await speaker.do(speaker.client.jobs.submit, document("other"), key="tonight")
    assert raised.value.code == "idempotency_key_reused"


async def test_a_job_may_be_a_mapping_a_text_a_file_or_a_model(here: Platform, tmp_path: Path) -> None:
    client = Speaker("asyncio", here).client
    (tmp_path / "texts.txt").write_text("once upon a time\n" * 100)
    given = document("file")
    given["spec"]["training"]["data"]["train"] = [{"source": "texts.txt"}]
    (tmp_path / "job.yaml").write_text(json.dumps(given))
    for job, name in (
        (document("mapping"), "mapping"),
        (json.dumps(document("text"), indent=1), "text"),
        (json.dumps(document("line")), "line"),
        (tmp_path / "job.yaml", "file"),
        (parse_job(document("model")), "model"),
    ):
        made = await client.jobs.submit(job)
        assert (made.name, made.spec.gang.nodes.max) == (name, 2)
    file = await client.jobs.get("file")
    assert file.spec.training.data.train[0].source == str(tmp_path / "texts.txt"), "relative to the file"
    renamed = await client.jobs.submit(str(tmp_path / "job.yaml"), name="other")
    assert renamed.name == "other"
    assert given["metadata"] == {"name": "file"}


@pytest.mark.parametrize("speaker", ["threads"], indirect=True)
async def test_a_refusal_names_place_line_and_next_step(speaker: Speaker, tmp_path: Path) -> None:
    given = document()
    given["spec"]["training"]["optimizr"] = {}
    text = json.dumps(given, indent=1)
    line = text[: text.index("optimizr")].count("\n") + 1
    path = tmp_path / "job.json"
    path.write_text(text)
    for job in (text, path):
        with pytest.raises(InvalidRequest) as raised:
            await speaker.do(speaker.client.jobs.submit, job)
        (problem,) = raised.value.problems
        assert (problem.path, problem.did_you_mean, problem.line) == ("spec.training.optimizr", "optimizer", line)
        assert f"line {line}, column" in str(raised.value)
    await speaker.do(speaker.client.jobs.submit, document())
    with pytest.raises(Conflict) as taken:
        await speaker.do(speaker.client.jobs.submit, document())
    assert (taken.value.code, taken.value.next_step) == ("name_taken", "submit it under another name")
    for job, said in (("no/such.yaml", "can't read no/such.yaml"), ("a: [\n", "the job, line"), (7, "not int")):
        with pytest.raises(InvalidRequest, match=said):
            await speaker.do(speaker.client.jobs.submit, job)
    with pytest.raises(NotFound, match="there is no job 'nobody'"):
        await speaker.do(speaker.client.jobs.get, "nobody")


@pytest.mark.parametrize("speaker", ["asyncio"], indirect=True)
async def test_a_plan_and_an_estimate_store_nothing(speaker: Speaker) -> None:
    plan = await speaker.do(speaker.client.jobs.plan, document())
    assert (plan.accepted, plan.job.name, plan.world_size.max, plan.faults) == (True, "demo", 2, [])
    assert [warning.path for warning in plan.warnings] == ["spec.training.length"]
    assert plan.estimate is not None
    estimate = await speaker.do(speaker.client.jobs.estimate, document())
    assert (estimate.ranks, estimate.parameters) == (2, plan.parameters)
    assert await speaker.all(speaker.client.jobs.list) == []


async def test_uploaded_data_are_inspected(speaker: Speaker, here: Platform) -> None:
    file = await taken_in(here, (await upload(here, b'{"text": "a few words"}\n' * 40, name="words.jsonl"))["id"])
    data = {"train": [{"source": file["id"]}], "sequenceLength": 16}
    training = document()["spec"]["training"] | {"data": data, "batch": {"tokensPerStep": 16, "microBatch": 1}}
    report = await speaker.do(speaker.client.jobs.inspect, document(training=training, gang={"nodes": 1}))
    assert (report.sources[0].documents, report.sources[0].duplicates) == (40, 39)
    assert "".join(stretch.text for stretch in report.shown[0].stretches).startswith("a few words")


async def test_waiting_ends_with_the_job(speaker: Speaker, here: Platform) -> None:
    job = await speaker.do(speaker.client.jobs.submit, document())
    with pytest.raises(WaitTimeout, match=r"demo has not ended within 0\.03 s: it is Queued"):
        await speaker.do(job.wait, 0.03)
    waiting = asyncio.create_task(speaker.do(job.wait))
    await here.finish(job.id)
    assert (await waiting) is job
    assert (job.phase, job.ended) == ("Succeeded", True)


@pytest.mark.parametrize("speaker", ["threads"], indirect=True)
async def test_a_job_that_fails_is_raised_with_cause_and_place(speaker: Speaker, here: Platform) -> None:
    job = await speaker.do(speaker.client.jobs.submit, document())
    await here.handed_over(job.id)
    failure = Failure(cause=Cause.NUMERIC, attempt=2, at=5.0, message="the loss is not finite", worker=1, node="n-7")
    here.operate(job.id, phase=Phase.FAILED, because="no restarts left", last_failure=failure, finished_at=6.0)
    await here.phase(job.id, "Failed")
    with pytest.raises(JobFailed) as raised:
        await speaker.do(job.wait)
    told = str(raised.value)
    assert "demo failed: no restarts left" in told
    assert "numeric in attempt 2 (worker 1, node n-7): the loss is not finite" in told
    assert "next: why() says what to do" in told
    assert (await speaker.do(job.wait, check=False)).status.last_failure == failure
    assert (await speaker.do(job.why)).last_failure == failure


async def test_following_brings_every_event_and_step_once(speaker: Speaker, here: Platform) -> None:
    job = await speaker.do(speaker.client.jobs.submit, document())
    await here.handed_over(job.id)
    folder = here.state.worker(job.id, 1, 0)
    folder.mkdir(parents=True)
    (folder / "steps.jsonl").write_text("\n".join(step(n, 5.0 - n / 10) for n in range(1, 4)) + "\n")
    here.operate(job.id, phase=Phase.RUNNING, because="training", attempt=1, progress=Progress(step=1, steps=200))
    await here.phase(job.id, "Running")
    following_ = asyncio.create_task(speaker.all(job.follow))
    await asyncio.wait({following_}, timeout=0.2)  # some looks at a running job
    await here.finish(job.id)
    updates = await following_
    steps = [point.step for update in updates for point in update.steps]
    assert steps in ([1, 2, 3], []), "each once; none where the looks were too slow to see it run"
    events = [event.id for update in updates for event in update.events]
    assert events == [event.id for event in await speaker.do(job.events)] == sorted(set(events))
    assert (updates[-1].phase, updates[-1].ended, job.phase) == (Phase.SUCCEEDED, True, "Succeeded")
    assert [event.id for event in await speaker.all(job.follow_events, after=events[0])] == events[1:]


async def test_all_that_the_api_tells_of_a_job_is_read(speaker: Speaker, here: Platform) -> None:
    job = await speaker.do(speaker.client.jobs.submit, document())
    folder = here.state.worker(job.id, 1, 0)
    folder.mkdir(parents=True)
    lines = [step(1, 5.0), step(2, 4.5, values={"rewards/margins": 0.5}, evaluation_loss=4.6)]
    (folder / "steps.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "log").write_text("".join(f"line {n}\n" for n in range(3)))
    written = here.commit(job.id, 2)
    samples = Samples(step=2, attempt=1, at=1e9, samples=(Sample(prompt="a", text="b", finished=True),))
    kept = written.parent.parent / samples_key(2)
    kept.parent.mkdir()
    kept.write_text(dump_json(samples))
    await here.finish(job.id)

    metrics = await speaker.do(job.metrics)
    table = metrics.to_pandas()
    assert (table.index.tolist(), table["loss"].tolist(), table["rewards/margins"][2]) == ([1, 2], [5.0, 4.5], 0.5)
    assert str(table["at"][1]) == "2001-09-09 01:46:41+00:00"
    assert metrics.to_pandas(evaluations=True)["loss"].to_dict() == {2: 4.6}
    assert await speaker.do(job.logs) == "line 0\nline 1\nline 2\n"
    assert await speaker.do(job.logs, tail=1) == "line 2\n"
    assert [line.line for line in await speaker.all(job.follow_logs)] == ["line 0", "line 1", "line 2"]
    assert [each.step for each in (await speaker.do(job.checkpoints)).items] == [2]
    assert (await speaker.do(job.samples)).items == [samples]
    assert (await speaker.do(job.attempts)).items == []
    assert (await speaker.do(job.why)).phase == "Succeeded"
    await speaker.do(job.refresh)
    assert job.metadata.name == "demo"


async def test_jobs_are_acted_upon_and_listed(speaker: Speaker, here: Platform) -> None:
    job = await speaker.do(speaker.client.jobs.submit, document())
    assert (await speaker.do(job.suspend)).spec.suspend is True
    assert (await speaker.do(job.resume)).spec.suspend is False
    copy = await speaker.do(job.clone, "copy", {"training": {"optimizer": {"lr": 0.5}}})
    assert (copy.name, copy.spec.training.optimizer.lr) == ("copy", 0.5)
    assert (await speaker.do(job.cancel)).spec.cancel is True
    assert [line.name for line in await speaker.all(speaker.client.jobs.list, limit=1)] == ["copy"]
    assert [line.name for line in await speaker.all(speaker.client.jobs.list, name="demo")] == ["demo"]
    with pytest.raises(InvalidRequest, match=r"phase: 'Runing' is not one of .* Did you mean 'Running'"):
        await speaker.all(speaker.client.jobs.list, phase=["Runing"])
    await here.finish(copy.id)

    async def marked() -> bool:
        return here.cluster.get(copy.id).metadata.deletion_timestamp is not None

    deleting = asyncio.create_task(speaker.do(copy.delete))
    await until(marked, "the mark in the cluster")
    here.cluster.remove(copy.id)  # as the operator does it once the workers are gone
    await deleting
    with pytest.raises(NotFound):
        await speaker.do(copy.refresh)


@pytest.mark.parametrize("kind", KINDS)
async def test_nobody_without_a_token_and_nobody_home(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MUSTER_TOKEN", "MUSTER_SERVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MUSTER_STATE", str(tmp_path / "none"))
    async with platform(tmp_path / "state", auth=True, database_url=f"sqlite:///{tmp_path}/state/m.db") as closed:
        speaker = Speaker(kind, closed)
        with pytest.raises(NotAllowed) as raised:
            await speaker.all(speaker.client.jobs.list)
    assert "set MUSTER_TOKEN" in raised.value.next_step
    with pytest.raises(MusterError, match="no Muster server is named") as nowhere:
        type(speaker.client)()
    assert nowhere.value.code == "no-server"
    absent = type(speaker.client)("http://127.0.0.1:9", patience_seconds=0)
    with pytest.raises(Unreachable):
        await speaker.all(absent.jobs.list)


async def test_a_table_without_pandas_says_what_to_install(here: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await Speaker("asyncio", here).client.jobs.submit(document())
    metrics = await job.metrics()
    assert list(metrics.to_pandas().columns)[:2] == ["attempt", "loss"], "an empty table has its columns"
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not installed
    with pytest.raises(InvalidRequest) as raised:
        metrics.to_pandas()
    assert raised.value.next_step == "pip install pandas"
