"""Numbers of evaluations on pages: with the checkpoint, on the job's own page, and in the comparison."""

from __future__ import annotations

import html
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.api.platform import Platform, platform
from tests.integration.api.test_api_evaluations import evaluation, finish, runs_of
from tests.integration.api.test_api_inputs import base_with, submitted
from tests.integration.web.pages import Browser

from muster.api.core.evaluations import controller
from muster.web.app import create_app


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Platform]:
    monkeypatch.setattr(controller, "EVALUATION_SECONDS", 1e9)
    async with platform(tmp_path / "state", make=create_app) as running:
        yield running


async def test_the_numbers_of_each_checkpoint_are_shown(here: Platform) -> None:
    browser = Browser(here.client)

    async def text(address: str) -> str:
        reply = await browser.get(address)
        assert reply.status_code == 200, address
        return " ".join(html.unescape(reply.text).split())

    base = await base_with(here, 10, 20)
    assert "Results</th>" not in await text(f"/jobs/{base}/checkpoints")
    made = await submitted(here, evaluation())
    await controller.step(here.services)
    runs = await runs_of(here, made["id"])
    await finish(here, runs[10].id, results={"<b>sums</b>/acc": 0.5625})
    await finish(here, runs[20].id, results_fault="results.json is no JSON")
    await controller.step(here.services)
    listed = await text(f"/jobs/{base}/checkpoints")
    assert f'<a href="/jobs/{runs[10].id}">arc</a> <b>sums</b>/acc 0.5625' in listed
    assert f'<a href="/jobs/{runs[20].id}">arc</a> <span class="muted">Succeeded: results.json is no JSON' in listed
    assert "<b>sums" not in (await browser.get(f"/jobs/{base}/checkpoints")).text
    assert "<dt>arc</dt><dd><b>sums</b>/acc 0.5625</dd>" in await text(f"/jobs/{base}/checkpoints/10")
    assert "<b>sums</b>/acc 0.5625" in await text(f"/jobs/{runs[10].id}")
    for job in (base, runs[10].id):
        compared = await text(f"/compare?jobs={job},{made['id']}")
        assert '<th scope="row"><b>sums</b>/acc</th><td class="number">0.5625</td>' in compared
