"""Two projects want the same nodes of a real control plane: who holds them commits, makes room and goes on."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.house import SYSTEM, House, quick_job
from tests.cluster.official import Object
from tests.polling import eventually

from muster.api.core.cluster.kubernetes_config_maps import write_quotas
from muster.kube import paths
from muster.kube.client import ApiClient
from muster.kube.connection import connect
from muster.words.names import Label
from muster.words.quotas import ProjectQuota

QUOTAS = {"vision": ProjectQuota(weight=1), "speech": ProjectQuota(guaranteed_gpus=2, preempts=True)}


@pytest.fixture(scope="module")
def contended(house: House) -> Iterator[House]:
    """Two nodes with a GPU each, and quotas as the API writes them."""
    for index in range(2):
        house.node(f"contended-{index}", {"node.kubernetes.io/instance-type": "contended"}, gpus="1")

    def write(quotas: dict[str, ProjectQuota | None]) -> None:
        async def once() -> None:
            async with ApiClient(connect(house.plane.kubeconfig), "test") as client:
                await write_quotas(client, SYSTEM, quotas)

        asyncio.run(once())

    write(dict(QUOTAS))
    house.start_operator(MUSTER_OPERATOR_PREFLIGHT="false")  # these GPUs are no torch's
    yield house
    house.stop_operators()
    write(dict.fromkeys(QUOTAS))


def of(project: str, name: str, **changes: Any) -> Object:
    gang = {"instanceTypes": ["contended"], "gpusPerNode": 1}
    document = quick_job(name, gang=gang, **changes)
    document["metadata"]["labels"] = {Label.PROJECT: project}
    return document


def test_who_holds_the_nodes_commits_makes_room_and_goes_on_afterwards(contended: House) -> None:
    first = contended.submit(of("vision", "holds-all", steps=10_000))
    contended.steps("holds-all", 5)
    urgent = contended.submit(of("speech", "entitled", steps=10, priority=5))
    assert contended.reaches("entitled", "Succeeded", 120)["attempt"] == 1
    eventually(lambda: contended.status("holds-all").get("attempt") == 2, "the first gang to go on")
    put_out, again = contended.status("holds-all")["attempts"]
    assert put_out["cause"] == "eviction"
    told = "preempted by a gang of another project, which has priority 5 where this job has 0"
    assert put_out["message"] == told, "what its own people may read"

    committed = again["resumeStep"]
    contended.steps("holds-all", committed + 3)
    trained = contended.trace(first)
    before, after = ([each for each in trained if each[0] == attempt] for attempt in (1, 2))
    assert max(step for _, worker, step, _ in before if worker == 0) == committed, "all that it had trained"
    assert {min(step for _, each, step, _ in after if each == worker) for worker in (0, 1)} == {committed + 1}
    between = [at for _, _, _, at in contended.trace(urgent)]
    assert max(at for *_, at in before) < min(between) < max(between) < min(at for *_, at in after)
    assert contended.status("holds-all")["restarts"]["recent"] == [], "it pays with no restart budget"

    for name, other in (("holds-all", "entitled"), ("entitled", "holds-all")):
        events = contended.get(paths.group("events.k8s.io/v1", "team", "events"))["items"]
        notes = [entry.get("note", "") for entry in events if entry["regarding"]["name"] == name]
        assert notes
        assert not [note for note in notes if other in note]
    contended.change("holds-all", {"cancel": True})
    contended.reaches("holds-all", "Cancelled")
    eventually(lambda: contended.pods("entitled") + contended.pods("holds-all") == [], "all pods to be swept")
