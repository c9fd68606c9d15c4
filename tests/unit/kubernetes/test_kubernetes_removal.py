"""Which requests take a gang away: one for what has ended, one for each pod that lives."""

import asyncio
from typing import Any, cast

import pytest
from tests.unit.kubernetes.making import JOB_UID, pod_item

from muster.kube.client import ApiClient
from muster.operator.core.decision import RemoveWorker
from muster.operator.kubernetes.pods import PodCache
from muster.operator.kubernetes.removal import PodRemover
from muster.words.names import WorkerId

ENDED = {"phase": "Succeeded"}
RUNS = {"phase": "Running"}


class Server:
    """Keeps what it is asked to delete."""

    def __init__(self) -> None:
        self.one_by_one: list[str] = []
        self.at_once: list[dict[str, str]] = []
        self.asked: asyncio.Queue[str] = asyncio.Queue()

    async def remove(self, path: str, body: dict[str, Any]) -> None:
        self.one_by_one.append(path.rpartition("/")[2])
        assert body["preconditions"]["uid"]
        self.asked.put_nowait(path)

    async def delete_all(self, path: str, **query: str) -> None:
        assert path == "/api/v1/namespaces/team-nlp/pods"
        self.at_once.append(query)
        self.asked.put_nowait(path)


@pytest.mark.parametrize(
    ("first", "second", "workers", "collections"),
    [
        (ENDED, ENDED, (0, 1), 1),
        (ENDED, ENDED, (0,), 0),  # the other is not to be removed
        (ENDED, RUNS, (0, 1), 0),  # it must hear of it by its own uid
    ],
)
async def test_only_a_gang_that_has_ended_goes_in_one_request(
    first: dict[str, Any], second: dict[str, Any], workers: tuple[int, ...], collections: int
) -> None:
    server, pods = Server(), PodCache(lambda uid: None)
    for worker, status in enumerate((first, second)):
        pods.put(pod_item(worker=worker, version=2 + worker, status=status))
    remover = PodRemover(cast(ApiClient, server), pods, lambda what, error: pytest.fail(f"{what}: {error}"))
    for worker in workers:
        remover.remove(JOB_UID, RemoveWorker(WorkerId(1, worker), 30.0))
    for _ in range(collections or len(workers)):
        await server.asked.get()
    assert len(server.at_once) == collections
    assert len(server.one_by_one) == (0 if collections else len(workers))
    for query in server.at_once:
        assert query == {
            "labelSelector": f"muster.dev/job-uid={JOB_UID},muster.dev/attempt=1",
            "fieldSelector": "status.phase!=Pending,status.phase!=Running,status.phase!=Unknown",
            "resourceVersion": "3",
            "resourceVersionMatch": "NotOlderThan",
        }
