"""The same questions to each gang scheduler, on an API server with all their APIs.

builtin and workload are the real thing (workload: kube-scheduler's own gang scheduling). For coscheduling, Volcano and
KAI the real API schemas are served, and a stand-in plays the scheduler. test_cluster_kueue.py asks a real Kueue.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.cluster.controlplane import ControlPlane
from tests.cluster.house import House, quick_job
from tests.cluster.official import Object
from tests.cluster.stand_in_scheduler import StandInScheduler
from tests.polling import eventually
from tests.tidy.repository import ROOT

from muster.kube import paths

# API schemas of other projects: test data that is not part of this one.
SCHEMAS = Path(os.environ.get("MUSTERTESTS_CRDS", ROOT.parent / "shared" / "data" / "crds"))
PODGROUPS = {
    "coscheduling": ("scheduling.x-k8s.io", "v1alpha1"),
    "volcano": ("scheduling.volcano.sh", "v1beta1"),
    "kai": ("scheduling.run.ai", "v2alpha2"),
    "workload": ("scheduling.k8s.io", "v1alpha2"),
}
KINDS = ("builtin", *PODGROUPS)

pytestmark = pytest.mark.skipif(
    not SCHEMAS.is_dir(),
    reason="no API schemas of gang schedulers here; MUSTERTESTS_CRDS names the folder that has them",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    plane = ControlPlane(
        tmp_path_factory.mktemp("gang-plane"),
        features="GenericWorkload=true,GangScheduling=true",
        serve="scheduling.k8s.io/v1alpha2=true",
    )
    plane.start()
    house = House(plane, tmp_path_factory.mktemp("gang-house"))
    for group, _ in list(PODGROUPS.values())[:3]:
        house.kubectl("apply", "--server-side", "-f", str(SCHEMAS / f"{group}_podgroups.yaml"))
    house.install()
    house.namespace("team")
    for index in range(2):
        house.node(f"gang-{index}")
    house.start_operator()
    yield house
    house.close()
    plane.stop()


@pytest.fixture(scope="module")
def scheduler(cluster: House) -> Iterator[StandInScheduler]:
    scheduler = StandInScheduler(cluster.kubelets.client, ["gang-0", "gang-1"])

    async def begin() -> "asyncio.Task[None]":
        return asyncio.get_running_loop().create_task(scheduler.run())

    task = cluster.do(begin())
    yield scheduler
    task.get_loop().call_soon_threadsafe(task.cancel)


def job(name: str, kind: str, **changes: object) -> Object:
    gang = {"scheduler": {"kind": kind, "queue": "research"}, "resources": {"cpu": "5", "memory": "1Gi"}}
    return quick_job(name, gang=gang, **changes)


def group(house: House, kind: str, name: str) -> Object | None:
    if kind not in PODGROUPS:
        return None
    api, version = PODGROUPS[kind]
    return house.find(paths.group(f"{api}/{version}", "team", "podgroups", name))


def fill(house: House) -> Callable[[], None]:
    """Take one of the two nodes away, as another team's pod would. Returns how to give it back."""
    container = {"name": "filler", "image": "filler", "resources": {"requests": {"cpu": "5"}}}
    spec = {"nodeName": "gang-1", "containers": [container], "terminationGracePeriodSeconds": 0}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "filler"}, "spec": spec}
    house.namespace("others")
    house.kubectl("label", "namespace", "others", "pod-security.kubernetes.io/enforce=privileged", "--overwrite")
    house.client.create(paths.core("others", "pods"), pod)
    path = paths.core("others", "pods", "filler")
    return lambda: house.client.delete(path, {"gracePeriodSeconds": 0}) and None


@pytest.mark.parametrize("kind", KINDS)
def test_a_gang_is_held_and_released_as_one(cluster: House, scheduler: StandInScheduler, kind: str) -> None:
    give_back = fill(cluster)
    name = f"held-{kind}"
    try:
        cluster.submit(job(name, kind, steps=10))

        def told() -> Object | None:
            status = cluster.status(name)
            assert status.get("code") in ("AwaitingScheduler", "AwaitingCapacity"), status.get("because")
            return status

        status = eventually(told, f"{name} to be held\n{cluster.tail()}")
        assert status["because"].startswith(("waiting for", "gang needs 2 nodes with 5 CPUs and 1 GiB each, 1 free"))
        eventually(lambda: kind == "builtin" or len(cluster.pods(name)) == 2, "its pods")
        assert all("nodeName" not in pod["spec"] for pod in cluster.pods(name))
    finally:
        give_back()
    cluster._loop.call_soon_threadsafe(scheduler.open.set)
    assert cluster.reaches(name, "Succeeded", 60)["attempt"] == 1
    cluster._loop.call_soon_threadsafe(scheduler.open.clear)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_lives_as_long_as_its_nodes_are_held(cluster: House, scheduler: StandInScheduler, kind: str) -> None:
    """A partial restart never deletes the group; the job's end does."""
    cluster._loop.call_soon_threadsafe(scheduler.open.set)
    name = f"group-{kind}"
    cluster.submit(job(name, kind, steps=120))
    cluster.steps(name, 6)
    before = group(cluster, kind, f"{name}-r0")
    assert (before is None) == (kind == "builtin")
    process = cluster.kubelets.of(f"{name}-1-1")
    assert process is not None
    process.kill_container()
    eventually(lambda: cluster.status(name)["attempt"] == 2, f"the next attempt\n{cluster.tail()}")
    cluster.reaches(name, "Running")
    after = group(cluster, kind, f"{name}-r0")
    assert (before or {}).get("metadata", {}).get("uid") == (after or {}).get("metadata", {}).get("uid")
    assert cluster.reaches(name, "Succeeded")["restarts"]["byCause"] == {"infrastructure": 1}
    eventually(lambda: group(cluster, kind, f"{name}-r0") is None, "the group to be cleared away")
    cluster._loop.call_soon_threadsafe(scheduler.open.clear)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gang_that_is_cancelled_while_it_waits_leaves_nothing(cluster: House, kind: str) -> None:
    give_back = fill(cluster)
    name = f"never-{kind}"
    try:
        cluster.submit(job(name, kind))
        eventually(lambda: cluster.status(name).get("code", "").startswith("Awaiting"), f"{name} to wait")
        cluster.change(name, {"cancel": True})
        cluster.reaches(name, "Cancelled")
        eventually(lambda: not cluster.pods(name) and group(cluster, kind, f"{name}-r0") is None, "nothing to be left")
    finally:
        give_back()


def tells(house: House, name: str, words: str) -> bool:
    return words in house.status(name).get("because", "")


def test_a_scheduler_that_is_not_installed_is_named(house: House) -> None:
    """On the other control plane, which has none of this."""
    house.start_operator()
    house.node("bare-0")
    house.node("bare-1")
    words = {
        "workload": "the API server serves no Workload of scheduling.k8s.io",
        "volcano": "Volcano's PodGroup is not installed in this cluster",
        "coscheduling": "the coscheduling plugin's PodGroup (scheduler-plugins) is not installed in this cluster",
        "kai": "KAI's PodGroup is not installed in this cluster",
        "kueue": "Kueue is not installed in this cluster",
    }
    try:
        for kind, reason in words.items():
            house.submit(job(f"absent-{kind}", kind))
            eventually(partial(tells, house, f"absent-{kind}", reason), f"{kind} to be named")
            house.change(f"absent-{kind}", {"cancel": True})
            house.reaches(f"absent-{kind}", "Cancelled")
    finally:
        house.stop_operators()
