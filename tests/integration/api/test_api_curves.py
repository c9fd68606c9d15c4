"""`/jobs/{id}/curves`, and the report that the command line makes of the API's own documents."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, platform
from tests.integration.api.test_api_history import record, worker_dir

from muster.cli.report import make_report, write_report
from muster.words.status import Attempt, Phase


@pytest.fixture
async def local(tmp_path: Path) -> Any:
    async with platform(tmp_path / "state") as running:
        yield running


async def test_curves_tell_where_attempts_begin_on_every_axis(local: Platform) -> None:
    uid = (await local.submit())["id"]
    await local.handed_over(uid)
    first = [record(1, step, 5.0 - step / 10, values={"accuracy": step / 100}) for step in range(1, 11)]
    (worker_dir(local, uid, 1) / "steps.jsonl").write_text("\n".join(first) + "\n")
    second = [record(2, step, 1.0, evaluation_loss=1.5 if step == 8 else None) for step in range(7, 13)]
    (worker_dir(local, uid, 2) / "steps.jsonl").write_text("\n".join(second) + "\n")
    attempts = (
        Attempt(number=1, created_at=95.0, ended_at=112.0, cause="hang", outcome="failed", last_step=10, lost_steps=4),
        Attempt(number=2, created_at=104.0, resume_step=6),
    )
    local.operate(uid, phase=Phase.RUNNING, attempt=2, attempts=attempts)
    await local.phase(uid, "Running")
    found = await local.get(f"/jobs/{uid}/curves")
    assert found["axes"]["step"] == list(range(1, 13))
    assert found["axes"]["tokens"] == [10 * step for step in range(1, 13)]
    assert found["axes"]["seconds"] == list(range(12))
    assert found["series"]["loss"]["mean"] == [4.9, 4.8, 4.7, 4.6, 4.5, 4.4, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert found["series"]["values.accuracy"]["mean"][5:7] == [0.06, None]
    assert found["evaluations"] == {
        "axes": {"step": [8], "tokens": [80], "seconds": [7]},
        "series": {"loss": {"mean": [1.5]}},
    }
    assert (found["total"], found["thinned"], found["unread"]) == (12, False, 0)
    places = [(each["number"], each["step"], each["tokens"], each["seconds"]) for each in found["attempts"]]
    assert places == [(1, 0, 0, -6.0), (2, 6, 60, 3.0)]
    assert [(each["cause"], each["lostSteps"]) for each in found["attempts"]] == [("hang", 4), (None, 0)]
    part = await local.get(f"/jobs/{uid}/curves", **{"axis": "tokens", "from": 25, "to": 60})
    assert part["axes"]["step"] == [3, 4, 5, 6]
    assert "hang" not in json.dumps(part["series"])


async def test_curves_of_a_job_without_steps_are_empty(local: Platform) -> None:
    uid = (await local.submit())["id"]
    found = await local.get(f"/jobs/{uid}/curves")
    assert (found["total"], found["startedAt"], found["series"], found["axes"]["step"]) == (0, None, {}, [])


@pytest.mark.parametrize("query", ["points=1", "points=2001", "axis=epochs", "from=nan", "from=x", "to=inf"])
async def test_curves_that_can_not_be_drawn_are_refused(local: Platform, query: str) -> None:
    uid = (await local.submit())["id"]
    reply = await local.client.get(f"/api/v1/jobs/{uid}/curves?{query}")
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_parameter")


class Answers:
    """A client of the command line that has asked for everything already."""

    def __init__(self, documents: dict[str, Any]) -> None:
        self.documents = documents

    def get(self, path: str, **parameters: Any) -> Any:
        if path.endswith("/events") and parameters.get("after"):
            return {"items": []}
        return self.documents[path]


async def test_a_report_is_made_of_what_the_api_tells(local: Platform, tmp_path: Path) -> None:
    uid = (await local.submit(name="chat"))["id"]
    await local.handed_over(uid)
    (worker_dir(local, uid, 1) / "steps.jsonl").write_text("\n".join(record(1, s, 2.5) for s in range(1, 9)) + "\n")
    local.commit(uid, 20, best=True, metrics={"loss": 3.0, "evaluation_loss": 2.75})
    local.operate(uid, attempt=1, attempts=(Attempt(number=1, created_at=time.time() - 9, outcome="succeeded"),))
    await local.finish(uid)
    paths = ("", "/attempts", "/events", "/curves", "/checkpoints", "/samples")
    page = make_report(Answers({f"jobs/{uid}{path}": await local.get(f"/jobs/{uid}{path}") for path in paths}), uid)
    for words in ("<h1>chat ", "Succeeded", "2.7500", "job.succeeded", "preset: muster-1m", "Attempt 1"):
        assert words in page, words
    output = tmp_path / "report.html"
    output.write_text("of before")
    write_report(page, output)
    assert output.read_text() == page
    assert [path.name for path in tmp_path.iterdir() if "report" in path.name] == ["report.html"]
