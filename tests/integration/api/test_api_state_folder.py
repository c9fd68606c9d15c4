"""Submissions that reach for the platform's state folder, or for commits that one may not see."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.people import People, settle
from tests.integration.api.platform import document, platform


@pytest.fixture
async def people(tmp_path: Path) -> AsyncIterator[People]:
    async with platform(tmp_path / "state", auth=True) as here:
        yield await settle(here, tmp_path / "state")


def with_training(**changes: Any) -> dict[str, Any]:
    training: dict[str, Any] = document()["spec"]["training"]
    return {"training": training | changes}


async def refused(people: People, **spec: Any) -> list[str]:
    """The places that are refused; empty where the job is accepted."""
    reply = await people.submit("nlp-owner", "reaches", **spec)
    assert reply.status_code in (201, 422), reply.text
    return [fault["path"] for fault in reply.json().get("errors", [])]


async def test_the_state_folder_is_no_jobs_to_name(people: People, tmp_path: Path) -> None:
    state = tmp_path / "state"
    for name in ("admin-token", "muster.db", "*.db", f"jobs/{people.jobs['cv']}"):
        data = {"train": [{"source": f"file://{state}/{name}"}], "sequenceLength": 256}
        assert await refused(people, **with_training(data=data)) == ["spec.training.data.train[0].source"], name
    theirs = {"uri": f"file://{state}/checkpoints/{people.jobs['cv']}"}
    assert await refused(people, checkpoint=theirs) == ["spec.checkpoint.uri"]


async def test_commits_in_the_state_folder_are_those_of_the_projects_jobs(people: People, tmp_path: Path) -> None:
    def starts_from(project: str) -> dict[str, Any]:
        uri = f"file://{tmp_path}/state/checkpoints/{people.jobs[project]}"
        return with_training(model={"from": {"uri": uri}})

    assert await refused(people, **starts_from("cv")) == ["spec.training.model.from.uri"]
    assert await refused(people, **starts_from("nlp")) == []
