"""`POST /jobs:estimate`: the same arithmetic as the trainer's, with what this server's jobs did."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, document, until
from tests.polling import WAIT_SECONDS_MAX
from tests.s3_servers import silent_server

from muster.api.core.estimates.records import _record
from muster.words.base import dump
from muster.words.status import Attempt, JobStatus, Progress


async def test_an_estimate_stores_nothing_and_knows_what_other_jobs_did(here: Platform) -> None:
    first = await here.client.post("/api/v1/jobs:estimate", json=document("mine"))
    assert first.status_code == 200, first.text
    found = first.json()
    assert found["fits"] is True
    assert found["memory"][0]["total"] == sum(found["memory"][0]["parts"].values())
    assert "speed" not in found  # nobody publishes what CPUs do
    assert (await here.client.get("/api/v1/jobs")).json()["items"] == []

    made = await here.submit("other")
    attempt = Attempt(number=1, created_at=1.0, first_step_at=2.0, world_size=found["ranks"], workers=found["nodes"])
    status = JobStatus(progress=Progress(tokens_per_second=1234.0), attempts=(attempt,))
    await here.handed_over(made["id"])
    here.operate(made["id"], progress=status.progress, attempts=status.attempts)

    async def ask() -> Any:
        answer = (await here.client.post("/api/v1/jobs:estimate", json=document("mine"))).json()
        return answer if "speed" in answer else None

    second = await until(ask, "a measured speed")
    assert second["speed"]["basis"] == "measured"
    assert second["speed"]["tokensPerSecond"] == pytest.approx(1234.0)
    assert "job other did 1,234 tokens/s" in second["speed"]["source"]


def test_a_speed_is_the_mean_of_an_attempt_and_not_of_its_last_step() -> None:
    job = document("other")["spec"]
    tokens = job["training"]["batch"]["tokensPerStep"]
    attempts = [
        Attempt(number=1, created_at=1.0, first_step_at=2.0, world_size=2, last_step=40, seconds=_booked(20.0, 15.0)),
        # Half of its time was lost, and one second waited for data: 20 steps in 4 + 5 + 1 seconds.
        Attempt(
            number=2,
            created_at=40.0,
            first_step_at=42.0,
            world_size=4,
            resume_step=20,
            last_step=40,
            lost_steps=10,
            seconds=_booked(4.0, 5.0) | {"data_wait": 1.0, "evaluation": 100.0, "starting": 50.0},
        ),
        Attempt(number=3, created_at=60.0, first_step_at=62.0, world_size=8, resume_step=30, last_step=31),
    ]
    status = JobStatus(progress=Progress(step=31, tokens_per_second=1.0), attempts=tuple(attempts))
    found = _record("other", job, dump(status))
    assert found is not None
    assert (found.tokens_per_second, found.ranks) == (20 * tokens / 10.0, 4)


def _booked(productive: float, lost: float) -> dict[str, float]:
    return {"productive": productive, "lost": lost}


async def test_a_model_that_does_not_fit_comes_with_arithmetic_and_a_change(here: Platform) -> None:
    job = document("large", gang={"gpusPerNode": 1, "instanceTypes": ["p4d.24xlarge"]})
    job["spec"]["training"] |= {"model": {"preset": "llama-8b"}, "precision": "bf16"}
    found = (await here.client.post("/api/v1/jobs:estimate", json=job)).json()
    assert found["fits"] is False
    assert "a rank needs about" in found["advice"]
    assert found["changes"]


@pytest.mark.both_databases
async def test_storage_that_answers_nobody_holds_up_nothing_else(
    here: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.api.core.estimates.service.SECONDS_MAX", 0.2)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(6))  # as many as two cores are given
    with silent_server() as url:
        for name, value in {"MUSTER_S3_ENDPOINT": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
            monkeypatch.setenv(name, value)
        job = document("mine")
        job["spec"]["training"] |= {"model": {"source": "s3://models/x"}}
        answers = await asyncio.gather(*(here.client.post("/api/v1/jobs:estimate", json=job) for _ in range(8)))
        assert {answer.json()["code"] for answer in answers} == {"model_unreadable"}
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), WAIT_SECONDS_MAX) == "free"


@pytest.mark.long
async def test_a_folder_that_can_not_be_read_or_trained_is_said(here: Platform, tmp_path: Path) -> None:
    job = document("mine")
    job["spec"]["training"] |= {"model": {"source": tmp_path.as_uri()}}
    refused = await here.client.post("/api/v1/jobs:estimate", json=job)
    assert refused.status_code == 422
    assert "holds no config.json" in refused.json()["detail"]
    job["spec"]["training"] |= {"model": {"preset": "nothing"}}
    unknown = await here.client.post("/api/v1/jobs:estimate", json=job)
    assert unknown.status_code == 422
    assert unknown.json()["code"] == "invalid_job"
