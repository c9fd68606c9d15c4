"""`POST /jobs:estimate`: the same arithmetic as the trainer's, with what this server's jobs did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, document, until

from muster.contract.status import Attempt, JobStatus, Progress


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


async def test_a_model_that_does_not_fit_comes_with_arithmetic_and_a_change(here: Platform) -> None:
    job = document("large", gang={"gpusPerNode": 1, "instanceTypes": ["p4d.24xlarge"]})
    job["spec"]["training"] |= {"model": {"preset": "llama-8b"}, "precision": "bf16"}
    found = (await here.client.post("/api/v1/jobs:estimate", json=job)).json()
    assert found["fits"] is False
    assert "a rank needs about" in found["advice"]
    assert found["changes"]


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
