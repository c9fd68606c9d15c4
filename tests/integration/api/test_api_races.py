"""Two replicas that are asked for the same new thing at once both answer, and make it once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, platform
from tests.integration.api.postgres import PostgresServer

from muster.api.core.cluster.cluster import LocalJobCluster
from muster.local.cluster import LocalCluster
from muster.words.state_folder import StateFolder

pytestmark = pytest.mark.postgres
ROUNDS = 30


@pytest.fixture(scope="module")
def url(postgres: PostgresServer, migrated: str) -> str:
    return postgres.url(postgres.new_database(migrated))


@pytest.fixture
async def replicas(tmp_path: Path, url: str) -> AsyncIterator[list[Platform]]:
    """Over one cluster and one database."""
    (tmp_path / "cluster").mkdir()
    cluster = LocalJobCluster(LocalCluster(StateFolder(tmp_path).cluster))
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(platform(tmp_path / str(number), cluster, database_url=url))
            for number in range(2)
        ]


async def at_once(replicas: list[Platform], path: str, body: Any) -> list[int]:
    """The sorted answers to four equal PUTs, two to each replica."""
    asked = (each.client.put(f"/api/v1{path}", json=body) for each in (*replicas, *replicas))
    return sorted(reply.status_code for reply in await asyncio.gather(*asked))


async def test_a_new_project_is_made_by_one_of_them(replicas: list[Platform]) -> None:
    answers = [await at_once(replicas, f"/projects/p{number}", {}) for number in range(ROUNDS)]
    assert answers == [[200, 200, 200, 201]] * ROUNDS


async def test_a_namespace_is_given_to_one_project(replicas: list[Platform]) -> None:
    for number in range(ROUNDS // 3):
        body = {"namespace": f"shared-{number}"}
        asked = [
            each.client.put(f"/api/v1/projects/q{number}-{index}", json=body) for index, each in enumerate(replicas)
        ]
        assert sorted(reply.status_code for reply in await asyncio.gather(*asked)) == [201, 409]


async def test_a_new_person_and_a_new_member_too(replicas: list[Platform]) -> None:
    await at_once(replicas, "/projects/nlp", {})
    for number in range(ROUNDS // 3):
        assert await at_once(replicas, f"/people/ann-{number}", {}) == [200] * 4
        assert await at_once(replicas, f"/projects/nlp/members/bob-{number}", {"role": "member"}) == [200] * 4
    members = (await replicas[0].get("/projects/nlp/members"))["items"]
    assert len(members) == ROUNDS // 3


async def test_a_new_secret_and_a_new_webhook_too(replicas: list[Platform]) -> None:
    for number in range(ROUNDS // 3):
        path, body = f"/projects/default/secrets/s-{number}", {"data": {"value": "x"}}
        assert await at_once(replicas, path, body) == [200, 200, 200, 201]
