"""The order and the groups of the list, tags and notes, on both databases."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sqlalchemy import insert
from tests.integration.api.platform import Platform, document

from muster.api.core.database.tables import SweepRow, TrialRow
from muster.api.core.events.types import EventType, NewEvent
from muster.api.core.jobs import ordering, repository
from muster.api.core.jobs.ordering import JobOrder
from muster.api.core.jobs.repository import JobFilter
from muster.recipe.document import parse_job
from muster.words.base import dump
from muster.words.status import JobStatus

STATUSES: dict[str, dict[str, Any]] = {
    "slow": {
        "progress": {"loss": 2.0, "step": 9, "steps": 10, "values": {"rewards/margins": 0.1}},
        "startedAt": "2026-11-01T00:00:00.5Z",
        "results": {"mmlu.acc": 0.7},
    },
    "quick": {"progress": {"loss": 10.0, "step": 2, "steps": 10, "evaluationLoss": 3.0}, "startedAt": None},
    "diverged": {"phase": "Running", "progress": {"loss": math.nan, "step": 5}, "startedAt": 1_764_000_000.0},
    "fresh": {"results": {"mmlu.acc": 0.1}, "startedAt": "2026-11-02T00:00:00Z"},
}
RATES = {"slow": 1e-3, "quick": 3e-4, "diverged": 1e-2, "fresh": None}


@pytest.fixture
async def listed(here: Platform) -> Platform:
    """Four jobs, of which the first has ended, as a mirror would have stored them; one of them has diverged."""
    whole, first = dump(parse_job(document()).spec), dump(JobStatus())
    created = NewEvent(EventType.JOB_CREATED, 1.0, "submitted")
    jobs = []
    for number, (name, status) in enumerate(STATUSES.items()):
        training = {**whole["training"], "optimizer": {"lr": RATES[name]}}
        spec = {**whole, "training": training, "gang": {"nodes": {"min": number + 1}, "gpusPerNode": 8}}
        own = {"labels": {}, "priority": 0, "created_at": 1.0, "live": name != "slow", "relayed_version": 1}
        where = {"namespace": "default", "project": "default", "owner": "admin"}
        jobs.append(repository.NewJob(id=name, name=name, spec=spec, status={**first, **status}, **where, **own))
    async with here.services.database.write() as session:
        await repository.insert(session, [(job, created) for job in jobs])
    return here


async def order(here: Platform, key: str = "", descending: bool = False, group: str = "") -> list[str]:
    async with here.services.database.read() as session:
        found = await repository.ordered(session, JobFilter(), JobOrder(key, descending, group), 0, 10)
    return [row.name for row, _ in found]


@pytest.mark.both_databases
async def test_jobs_are_sorted_by_any_number_and_setting_and_those_without_come_last(listed: Platform) -> None:
    assert await order(listed) == ["diverged", "fresh", "quick", "slow"], (
        "what lives is first, of that what holds nodes, and then the newest"
    )
    assert await order(listed, "loss") == ["slow", "quick", "fresh", "diverged"]
    assert await order(listed, "loss", descending=True) == ["quick", "slow", "fresh", "diverged"]
    assert await order(listed, "evaluation") == ["quick", "fresh", "diverged", "slow"]
    assert (await order(listed, "progress", descending=True))[:2] == ["slow", "quick"]
    assert await order(listed, "training.optimizer.lr") == ["quick", "slow", "diverged", "fresh"]
    assert (await order(listed, "results.mmlu.acc"))[:2] == ["fresh", "slow"], "the dot is the metric's own"
    assert (await order(listed, "values.rewards/margins"))[0] == "slow"
    assert await order(listed, "gpus", descending=True) == ["fresh", "diverged", "quick", "slow"]
    assert set((await order(listed, "duration"))[:2]) == {"slow", "fresh"}
    for key in (*ordering.COLUMNS, "training.data.train[0].source", "gang.nodes"):
        assert sorted(await order(listed, key, descending=True)) == sorted(STATUSES), key


@pytest.mark.both_databases
async def test_jobs_are_grouped_and_counted(listed: Platform) -> None:
    async with listed.services.database.write() as session:
        sweep = {
            "id": "sweep-1", "name": "rates", "project": "default", "owner": "admin", "document": {}, "metric": {},
            "created_at": 1.0, "live": True, "cancelled": False, "phase": "Running", "summary": {}, "version": 1,
            "request_hash": "",
        }  # fmt: skip
        await session.execute(insert(SweepRow).values(**sweep))
        trial = {"number": 3, "phase": "Running", "parameters": {}, "results": {}}
        await session.execute(insert(TrialRow).values(sweep_id="sweep-1", job_id="quick", **trial))
    by_sweep = JobOrder("loss", group="sweep")
    async with listed.services.database.read() as session:
        counts = await repository.count_by_group(session, JobFilter(), by_sweep)
        found = await repository.ordered(session, JobFilter(), by_sweep, 0, 10)
        trials = await repository.ordered(session, JobFilter(sweep="sweep-1"), JobOrder(), 0, 10)
        by_model = await repository.count_by_group(session, JobFilter(live=True), JobOrder(group="model"))
    assert counts == {"": 3, "sweep-1": 1}
    assert [(row.name, group) for row, group in found][:2] == [("quick", "sweep-1"), ("slow", "")]
    assert [row.name for row, _ in trials] == ["quick"]
    assert list(by_model.values()) == [3]


@pytest.mark.both_databases
async def test_tags_and_notes_are_kept_with_the_job_and_found_by(here: Platform) -> None:
    uid = (await here.submit("one"))["id"]
    other = (await here.submit("two"))["id"]

    async def patch(body: Any, status: int = 200, job: str = uid) -> Any:
        reply = await here.client.patch(f"/api/v1/jobs/{job}", json=body)
        assert reply.status_code == status, reply.text
        return reply.json()

    changed = await patch({"addTags": ["paper", "baseline"], "note": " table 2 "})
    assert (changed["metadata"]["tags"], changed["metadata"]["note"]) == (["baseline", "paper"], "table 2")
    assert (await patch({"removeTags": ["paper"]}))["metadata"]["note"] == "table 2", "what is left out stays"
    await patch({"tags": ["paper"]}, job=other)
    assert [each["name"] for each in (await here.get("/jobs", tag="paper"))["items"]] == ["two"]
    (line,) = (await here.get("/jobs", tag="baseline"))["items"]
    assert (line["tags"], line["note"]) == (["baseline"], "table 2")
    assert (await here.get("/jobs", tag="nothing"))["items"] == []
    assert (await patch({"note": ""}))["metadata"]["note"] == ""
    for wrong in ({"addTags": ["two words"]}, {"tags": ["a"], "addTags": ["b"]}, {"tag": ["a"]}, {"note": "x" * 4_001}):
        assert (await patch(wrong, 422))["code"] == "invalid_annotations"
    many = [f"tag-{number}" for number in range(20)]
    assert "would have 21 tags" in (await patch({"addTags": many}, 422))["detail"]
    await here.finish(other)
    assert (await patch({"tags": []}, job=other))["metadata"]["tags"] == [], "also of one that has ended"
    assert (await patch({"tags": []}, 404, job="nobody"))["code"] == "job_not_found"
    assert "job.annotated" in [each["action"] for each in (await here.get("/audit"))["items"]]


def test_what_is_hidden_is_no_column() -> None:
    """An order by the values of variables would tell of them."""
    assert ordering.is_sortable("training.data.train[0].source")
    assert ordering.is_sortable("evaluation.code/loss")
    for key in ("runtime.env[0].value", "runtime.env", 'a"]', "", "a..b", "x" * 200):
        assert not ordering.is_sortable(key), key
