"""OpenAI's own client against /v1/fine_tuning and /v1/models: what it creates, sees, is refused, and never doubles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from tests.integration.api.openai_house import (
    MODELS,
    chat_file,
    models_file,
    openai_client,
    openai_platform,
    preference_file,
    uid_of,
    without_pauses,
)
from tests.integration.api.people import settle
from tests.integration.api.platform import Platform, platform
from tests.integration.api.postgres import PostgresServer
from tests.integration.api.test_api_openai_wrong_fields import ANSWER, EQ

from muster.api.openai.fine_tuning import retries
from muster.api.openai.models.base_models import ModelMap, load_models
from muster.words.status import Phase, Progress

__all__ = ["without_pauses"]

ROUNDS = 8

House = tuple[Platform, openai.AsyncOpenAI]


@pytest.fixture
async def house(tmp_path: Path, database_url: str) -> AsyncIterator[House]:
    async with openai_platform(tmp_path, database_url=database_url) as both:
        yield both


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[House]:
    """On SQLite alone, for what the database has no part in."""
    async with openai_platform(tmp_path) as both:
        yield both


async def create(client: openai.AsyncOpenAI, folder: Path, **more: Any) -> Any:
    body = {"model": "tiny", "training_file": chat_file(folder), **more}
    return await client.fine_tuning.jobs.create(**body)


async def test_a_job_is_created_with_chosen_numbers_and_is_a_job_like_any_other(house: House, tmp_path: Path) -> None:
    here, client = house
    made = await create(client, tmp_path, suffix="Support", seed=7, metadata={"team": "nlp"})
    assert (made.object, made.status, made.model, made.seed) == ("fine_tuning.job", "queued", "tiny", 7)
    assert (made.fine_tuned_model, made.metadata, made.organization_id) == (None, {"team": "nlp"}, "default")
    # 60 examples three times are enough; 0.2% of them is one, and the gang computes 2 nodes × 2 samples in one pass.
    numbers = made.method.supervised.hyperparameters
    assert (numbers.n_epochs, numbers.batch_size, numbers.learning_rate_multiplier) == (3, 4, 1.0)
    assert made.x_chosen[0] == "n_epochs 3, for 60 examples"
    assert len(made.x_chosen) == 3
    assert made == await client.fine_tuning.jobs.retrieve(made.id)

    job = await here.get(f"/jobs/{uid_of(made)}")
    training = job["spec"]["training"]
    assert (training["task"], training["length"], training["seed"]) == ("sft", {"epochs": 3}, 7)
    assert (training["batch"]["tokensPerStep"], training["optimizer"]["lr"]) == (4 * 256, 0.02)
    assert (training["data"]["packing"], training["data"]["train"][0]["format"]) == (False, "openai-chat")
    assert job["metadata"]["name"].startswith("ft-support-")
    events = (await client.fine_tuning.jobs.list_events(made.id)).data
    assert "chosen: n_epochs 3, for 60 examples; batch_size 4" in events[-1].message


async def test_numbers_beside_auto_are_kept_and_pairs_are_learnt_by_dpo(small: House, tmp_path: Path) -> None:
    here, client = small
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto", "beta": 0.3}}}
    files = {"training_file": preference_file(tmp_path), "validation_file": preference_file(tmp_path)}
    made = await client.fine_tuning.jobs.create(model="org/whole", method=method, **files)
    numbers = made.method.dpo.hyperparameters  # type: ignore[union-attr]
    assert (numbers.n_epochs, numbers.batch_size, numbers.beta) == (2, 2, 0.3)  # type: ignore[union-attr]
    assert [told.split()[0] for told in made.x_chosen] == ["batch_size", "learning_rate_multiplier"]  # type: ignore[attr-defined]
    training = (await here.get(f"/jobs/{uid_of(made)}"))["spec"]["training"]
    assert (training["task"], training["dpo"]["beta"]) == ("dpo", 0.3)
    assert training["data"]["train"][0]["format"] == "preference"
    # Some ten evaluations of the 60 steps that 60 examples make twice, by twos.
    assert (training["evaluation"]["every"], len(training["evaluation"]["data"])) == (6, 1)


async def test_answers_are_rewarded_by_graders(small: House, tmp_path: Path) -> None:
    here, client = small
    like = {**ANSWER, "name": "Bare", "operation": "ilike", "reference": "Run (now)"}
    sums = {"type": "x_verifier", "name": "Sums right", "verifier": {"numericAnswer": {"after": "####"}}}
    grader: Any = {
        "type": "multi",
        "name": "all",
        "graders": {"exact": EQ, "Bare": like, "sums": sums},
        "calculate_output": "0.5 * exact + sums - Bare / 4",
    }
    numbers = {"n_epochs": 2, "batch_size": 3, "compute_multiplier": 0.5, "eval_interval": 7, "eval_samples": 5}
    asked: Any = {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": numbers}}
    made = await client.fine_tuning.jobs.create(
        model="org/whole", training_file=chat_file(tmp_path), validation_file=chat_file(tmp_path), method=asked
    )
    told = made.method.reinforcement  # type: ignore[union-attr]
    assert told.grader.calculate_output == grader["calculate_output"]  # type: ignore[union-attr]
    hyper = told.hyperparameters  # type: ignore[union-attr]
    assert (hyper.n_epochs, hyper.batch_size, hyper.compute_multiplier) == (2, 3, 0.5)  # type: ignore[union-attr]
    assert (hyper.eval_interval, hyper.eval_samples) == (7, 5)  # type: ignore[union-attr]
    assert made == await client.fine_tuning.jobs.retrieve(made.id)
    training = (await here.get(f"/jobs/{uid_of(made)}"))["spec"]["training"]
    grpo = training["grpo"]
    assert (training["task"], grpo["completions"], grpo["maxTokens"]) == ("grpo", 4, 128)
    assert training["batch"]["tokensPerStep"] == 3 * 4 * 256, "three prompts of four answers"
    found = {each["name"]: each for each in grpo["verifiers"]}
    assert {name: each["weight"] for name, each in found.items()} == {"exact": 0.5, "bare": -0.25, "sums": 1.0}
    assert found["exact"]["exactMatch"]["column"] == "answer"
    assert found["bare"]["regex"]["pattern"] == r"(?i)Run \(now\)"
    assert found["sums"]["numericAnswer"]["after"] == "####"
    evaluation = training["evaluation"]
    assert (evaluation["every"], evaluation["metric"], evaluation["sets"]["validation"]["samples"]) == (
        7,
        "validation/score",
        5,
    )

    automatic: Any = {"type": "reinforcement", "reinforcement": {"grader": EQ | {"reference": "a.b"}}}
    made = await client.fine_tuning.jobs.create(model="org/whole", training_file=chat_file(tmp_path), method=automatic)
    training = (await here.get(f"/jobs/{uid_of(made)}"))["spec"]["training"]
    assert (training["grpo"]["completions"], training["batch"]["tokensPerStep"]) == (8, 8 * 256)
    assert training["grpo"]["verifiers"][0]["regex"]["pattern"] == r"\A\s*a\.b\s*\z"
    assert [told.split()[0] for told in made.x_chosen][-1] == "compute_multiplier"  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError, match="model\\.source") as refused:  # a new model has nothing to say
        await create(client, tmp_path, method=automatic)
    assert refused.value.param == "model"


@pytest.mark.both_databases
async def test_the_status_follows_the_job_until_its_model_has_a_name(house: House, tmp_path: Path) -> None:
    here, client = house
    made = await create(client, tmp_path, suffix="x")
    uid, jobs = uid_of(made), client.fine_tuning.jobs

    async def seen(phase: Phase, **more: Any) -> Any:
        here.operate(uid, phase=phase, code="Done", because="because", since=time.time(), **more)
        await here.phase(uid, phase)
        return await jobs.retrieve(made.id)

    await here.handed_over(uid)
    progress = Progress(at=time.time(), step=5, steps=45, eta_seconds=90.0)
    running = await seen(Phase.RUNNING, attempt=1, progress=progress)
    assert running.status == "running"
    assert running.estimated_finish == int(progress.at + 90.0)
    assert (await seen(Phase.RESTARTING)).status == "running"
    assert (await jobs.pause(made.id)).id == made.id
    assert (await here.get(f"/jobs/{uid}"))["spec"]["suspend"] is True
    assert (await seen(Phase.SUSPENDED)).status == "paused"
    await jobs.resume(made.id)
    assert (await here.get(f"/jobs/{uid}"))["spec"]["suspend"] is False
    assert [model.id async for model in client.models.list()] == ["tiny", "org/whole"]
    done = await seen(Phase.SUCCEEDED, finished_at=time.time())
    assert done.fine_tuned_model == f"ft:tiny:default:x:{uid}"
    assert (done.status, done.trained_tokens) == ("succeeded", 5 * 1024)
    assert (await client.models.retrieve(done.fine_tuned_model)).owned_by == "default"
    assert done.fine_tuned_model in [model.id async for model in client.models.list()]
    with pytest.raises(openai.ConflictError) as refused:
        await jobs.cancel(made.id)
    assert refused.value.code == "job_finished"


async def test_a_failure_is_told_as_openai_tells_it(small: House, tmp_path: Path) -> None:
    here, client = small
    made = await create(client, tmp_path)
    await here.finish(uid_of(made), Phase.FAILED)
    failed = await client.fine_tuning.jobs.retrieve(made.id)
    assert failed.status == "failed"
    assert (failed.error.code, failed.error.message) == ("unknown", "done")  # type: ignore[union-attr]
    events = (await client.fine_tuning.jobs.list_events(made.id)).data
    assert [(event.level, event.x_type) for event in events if event.level != "info"] == [("error", "job.failed")]  # type: ignore[attr-defined]
    cancelled = await create(client, tmp_path)
    assert (await client.fine_tuning.jobs.cancel(cancelled.id)).status == "queued"  # until its gang is gone
    assert (await here.get(f"/jobs/{uid_of(cancelled)}"))["spec"]["cancel"] is True


@pytest.mark.both_databases
async def test_lists_are_paged_and_filtered_as_the_client_asks(house: House, tmp_path: Path) -> None:
    here, client = house
    jobs = client.fine_tuning.jobs
    made = [await create(client, tmp_path, metadata={"n": str(n), "odd key": "a b"} if n else None) for n in range(3)]
    await here.submit("of-another-kind")
    newest_first = [job.id for job in reversed(made)]
    assert [job.id async for job in jobs.list(limit=1)] == newest_first  # one page a job
    assert [job.id async for job in jobs.list(metadata={"n": "2", "odd key": "a b"})] == newest_first[:1]
    assert [job.id async for job in jobs.list(metadata={"n": "9"})] == []
    assert [job.id for job in (await jobs.list(extra_query={"metadata": "null"})).data] == newest_first[2:]
    uid = uid_of(made[0])
    await here.handed_over(uid)
    await here.finish(uid)
    numbers = [int(event.id.rpartition("-")[2]) async for event in jobs.list_events(made[0].id, limit=1)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] == 1
    assert len(numbers) >= 2


async def test_checkpoints_have_metrics_and_names(small: House, tmp_path: Path) -> None:
    here, client = small
    made = await create(client, tmp_path, suffix="s")
    uid = uid_of(made)
    for step in (10, 20, 30):
        here.commit(uid, step, metrics={"loss": 1.5, "evaluation_loss": 2.5})
    found = [each async for each in client.fine_tuning.jobs.checkpoints.list(made.id, limit=2)]
    assert [each.step_number for each in found] == [30, 20, 10]
    assert found[0].fine_tuned_model_checkpoint == f"ft:tiny:default:s:{uid}:ckpt-step-30"
    assert (found[0].metrics.train_loss, found[0].metrics.valid_loss) == (1.5, 2.5)
    assert (await client.models.retrieve(found[0].fine_tuned_model_checkpoint)).id.endswith(":ckpt-step-30")
    more = await create(client, tmp_path, model=found[1].fine_tuned_model_checkpoint)
    source = (await here.get(f"/jobs/{uid_of(more)}"))["spec"]["training"]["model"]["from"]
    assert (source["job"], source["step"]) == (uid, 20)


async def test_a_jobs_checkpoint_is_a_base_model_by_the_jobs_name(small: House, tmp_path: Path) -> None:
    here, client = small
    base = await here.submit("base-run")
    here.commit(base["id"], 40, metrics={"loss": 1.5})
    made = await create(client, tmp_path, model="job:base-run:ckpt-step-40")
    training = (await here.get(f"/jobs/{uid_of(made)}"))["spec"]["training"]
    assert (training["model"]["from"]["job"], training["model"]["from"]["step"]) == (base["id"], 40)
    assert (training["task"], training["data"]["sequenceLength"]) == ("sft", 256)
    here.commit(uid_of(made), 10, metrics={"loss": 1.5})
    again = await create(client, tmp_path, model=f"ft:base-run:default::{uid_of(made)}:ckpt-step-10")
    assert (await here.get(f"/jobs/{uid_of(again)}"))["spec"]["training"]["model"]["from"]["job"] == uid_of(made)
    for ask in (create(client, tmp_path, model="job:nobody"), client.completions.create(model="job:nobody", prompt="")):
        with pytest.raises(openai.NotFoundError, match="there is no job 'nobody' that you may see"):
            await ask


async def test_on_one_machine_the_presets_are_there_and_names_are_added(tmp_path: Path) -> None:
    async with platform(tmp_path / "state") as here, openai_client(here) as client:
        names = [model.id async for model in client.models.list()]
        assert names[0] == "muster-1m"
        assert "llama-8b" not in names  # it needs a tokenizer
        made = await create(client, tmp_path, model="muster-1m")
        assert made.model == "muster-1m"
        own = here.settings.layout.base_models
        own.write_text(yaml.safe_dump(MODELS, sort_keys=False))
        assert [model.id async for model in client.models.list()] == [*names, "tiny", "org/whole"]
        own.write_text("models: {tiny: {spec: 1}}")
        assert (await client.models.retrieve("tiny")).id == "tiny"  # as before, and the log says why
        own.unlink()
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("tiny")


async def test_what_the_file_holds_is_looked_at_before_the_job_is_stored(small: House, tmp_path: Path) -> None:
    _, client = small
    with pytest.raises(openai.BadRequestError) as refused:
        await create(client, tmp_path, training_file=preference_file(tmp_path))
    assert refused.value.param == "training_file"
    assert "preference is not for task sft" in str(refused.value)


async def test_a_model_that_nobody_mapped_names_those_that_are(small: House, tmp_path: Path) -> None:
    _, client = small
    with pytest.raises(openai.NotFoundError) as refused:
        await create(client, tmp_path, model="tinny")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    assert "mapped are tiny, org/whole, and `muster models add NAME SOURCE` maps another" in str(refused.value)
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("org/half")
    assert (await client.models.retrieve("org/whole")).owned_by == "org"


async def test_null_is_left_out(small: House, tmp_path: Path) -> None:
    """Clients send null for what was not given."""
    here, _ = small
    asked = {"model": "tiny", "training_file": chat_file(tmp_path)}
    nothing = dict.fromkeys(
        ("validation_file", "suffix", "seed", "metadata", "integrations", "method", "hyperparameters")
    )
    assert (await here.client.post("/v1/fine_tuning/jobs", json=asked | nothing)).status_code == 200
    asked = {"model": "none", "prompt": "a"}
    nothing = dict.fromkeys(("max_tokens", "temperature", "top_p", "seed", "stop", "stream", "n", "logprobs", "echo"))
    reply = await here.client.post("/v1/completions", json=asked | nothing)
    assert (reply.status_code, reply.json()["code"]) == (404, "model_not_found")


async def test_the_words_of_openai_for_what_goes_wrong(small: House) -> None:
    here, client = small
    with pytest.raises(openai.NotFoundError) as missing:
        await client.fine_tuning.jobs.retrieve("ftjob-none")
    assert (missing.value.code, missing.value.param) == ("job_not_found", "fine_tuning_job_id")
    assert missing.value.request_id
    native = (await here.submit("native"))["id"]
    with pytest.raises(openai.NotFoundError):  # nobody fine-tuned it
        await client.fine_tuning.jobs.retrieve(f"ftjob-{native}")
    for path in ("?limit=0", "?after=ftjob-none", "?metadata[a]=b&metadata=null", "?page=2"):
        error = (await here.client.get(f"/v1/fine_tuning/jobs{path}")).json()["error"]
        assert (error["type"], error["param"]) == (
            "invalid_request_error",
            path[1:].partition("=")[0].partition("[")[0],
        )


@pytest.mark.usefixtures("without_pauses")
async def test_a_lost_reply_makes_no_second_job_and_equal_requests_make_two(house: House, tmp_path: Path) -> None:
    """The client sends no Idempotency-Key: a retry is known by its number and its body. Each round loses one reply or
    two."""
    _, client = house
    cutting, ids = client.cutting, set()  # type: ignore[attr-defined]
    training = chat_file(tmp_path)
    for number in range(ROUNDS):
        cutting.retries.clear()
        cutting.lose = lost = 1 + number % 2
        made = await client.fine_tuning.jobs.create(model="tiny", training_file=training, seed=1)
        assert cutting.retries == ["0", "1", "2"][: lost + 1]
        ids.add(made.id)
    assert len(ids) == ROUNDS
    assert len([job async for job in client.fine_tuning.jobs.list(limit=100)]) == ROUNDS


@pytest.mark.both_databases
async def test_a_request_that_its_own_retry_overtook_finds_the_retrys_job(house: House, tmp_path: Path) -> None:
    here, _ = house
    body = {"model": "tiny", "training_file": chat_file(tmp_path)}

    async def post(retry: str) -> str:
        reply = await here.client.post("/v1/fine_tuning/jobs", json=body, headers={"x-stainless-retry-count": retry})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["id"])

    first = await post("1")
    assert await post("0") == first  # the one that was late
    second = await post("0")
    assert second != first
    assert await post("2") == second


@pytest.mark.both_databases
async def test_a_retry_at_the_same_moment_as_its_request_makes_one_job(house: House, tmp_path: Path) -> None:
    here, _ = house
    body = {"model": "tiny", "training_file": chat_file(tmp_path)}
    headers = [{"x-stainless-retry-count": count} for count in ("0", "1", "2", "1")]
    replies = await asyncio.gather(
        *(here.client.post("/v1/fine_tuning/jobs", json=body, headers=each) for each in headers)
    )
    assert len({reply.json()["id"] for reply in replies}) == 1
    assert len((await here.get("/jobs"))["items"]) == 1


@pytest.mark.postgres
async def test_a_retry_finds_its_job_though_a_replicas_clock_is_an_hour_off(
    tmp_path: Path, postgres: PostgresServer, migrated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes go by the clock of the database that they share."""
    async with openai_platform(tmp_path, database_url=postgres.url(postgres.new_database(migrated))) as (here, client):
        real = time.time
        found, uploads = set(), set()
        body = {"model": "tiny", "training_file": chat_file(tmp_path)}
        upload: Any = {"bytes": 9, "filename": "a.txt", "mime_type": "", "purpose": "user_data"}
        for retry, ahead in (("0", 0.0), ("1", 3_600.0), ("2", -3_600.0)):
            monkeypatch.setattr(time, "time", lambda ahead=ahead: real() + ahead)
            again = {"x-stainless-retry-count": retry}
            reply = await here.client.post("/v1/fine_tuning/jobs", json=body, headers=again)
            found.add(reply.json()["id"])
            uploads.add((await here.client.post("/v1/uploads", json=upload, headers=again)).json()["id"])
        monkeypatch.setattr(time, "time", real)
        assert (len(found), len(uploads)) == (1, 1)
        assert [job.id async for job in client.fine_tuning.jobs.list()] == [*found]


async def test_a_retry_long_after_is_a_new_request(
    small: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, client = small
    first = await create(client, tmp_path)
    monkeypatch.setattr(retries, "RETRY_SECONDS", -1.0)
    body = {"model": "tiny", "training_file": chat_file(tmp_path)}
    reply = await here.client.post("/v1/fine_tuning/jobs", json=body, headers={"x-stainless-retry-count": "1"})
    assert reply.json()["id"] != first.id


async def test_an_idempotency_key_is_honoured_also_when_the_file_has_gone(small: House, tmp_path: Path) -> None:
    here, client = small
    training = chat_file(tmp_path)
    asked: Any = {"model": "tiny", "training_file": training, "extra_headers": {"Idempotency-Key": "k"}}
    first = await client.fine_tuning.jobs.create(**asked)
    here.services[ModelMap].current().models.clear()  # type: ignore[attr-defined]
    assert (await client.fine_tuning.jobs.create(**asked)).id == first.id
    with pytest.raises(openai.UnprocessableEntityError) as reused:
        await client.fine_tuning.jobs.create(**{**asked, "seed": 3})
    assert reused.value.code == "idempotency_key_reused"


async def test_what_one_may_not_see_is_not_there_in_openais_words_too(tmp_path: Path) -> None:
    options = {"auth": True, "base_models_file": models_file(tmp_path)}
    async with platform(tmp_path / "state", **options) as here:
        people = await settle(here, tmp_path / "state")

        def token(person: str) -> str:
            return people.headers[person]["authorization"].removeprefix("Bearer ")

        async with (
            openai_client(here, token("nlp-member"), project="nlp") as owner,
            openai_client(here, token("cv-maintainer")) as stranger,
            openai_client(here, token("nlp-viewer"), project="nlp") as viewer,
        ):
            made = await create(owner, tmp_path)
            assert made.organization_id == "nlp"
            assert (await here.client.get(f"/api/v1/jobs/{uid_of(made)}", headers=people.admin)).status_code == 200
            for hidden in (made.id, "ftjob-00000000-0000-4000-8000-000000000000"):
                with pytest.raises(openai.NotFoundError, match="There is no fine-tuning job"):
                    await stranger.fine_tuning.jobs.cancel(hidden)
            assert [job.id async for job in stranger.fine_tuning.jobs.list()] == []
            assert [job.id async for job in viewer.fine_tuning.jobs.list()] == [made.id]
            for act in (viewer.fine_tuning.jobs.cancel(made.id), create(viewer, tmp_path)):
                with pytest.raises(openai.PermissionDeniedError):
                    await act
        async with openai_client(here, "muster_wrong") as nobody:
            with pytest.raises(openai.AuthenticationError) as refused:
                await nobody.models.list()
            assert refused.value.type == "authentication_error"


@pytest.mark.parametrize(
    ("models", "told"),
    [
        ({"models": {"a:b": MODELS["models"]["tiny"]}}, "models.a:b: a model's name has letters"),
        ({"models": {"a": {"spec": {}}}}, "line 3, column 5: models.a.spec.training: is required"),
        ({"models": {"a": {"spec": {"training": {"model": {"preset": "huge"}}}}}}, "unknown preset 'huge'"),
        ({"models": {"a": {"spec": MODELS["models"]["tiny"]["spec"] | {"gang": {"nodes": 0}}}}}, "a.spec.gang.nodes"),
        (MODELS | {"model": {}}, "model: unknown key. Did you mean 'models'?"),
    ],
)
def test_a_map_of_models_with_a_fault_is_refused_at_the_start(tmp_path: Path, models: Any, told: str) -> None:
    with pytest.raises(ValueError, match="can't be used") as refused:
        load_models(models_file(tmp_path, models))
    assert told in str(refused.value)
