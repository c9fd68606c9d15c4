"""The kueue adapter on a real Kueue: quota that is short and then free, preemption, a failed node."""

from collections.abc import Iterator

import pytest
from tests.cluster import kueue
from tests.cluster.house import House, quick_job
from tests.cluster.kueue import Kueue
from tests.cluster.official import Object
from tests.polling import eventually

from muster.kube import paths

pytestmark = pytest.mark.skipif(bool(kueue.missing()), reason=kueue.missing() or "present")
WORKLOADS = "kueue.x-k8s.io/v1beta2"


@pytest.fixture(scope="module")
def cluster(house: House) -> Iterator[House]:
    manager = Kueue(house)
    manager.start()
    for index in range(4):
        house.node(f"kueue-{index}", {"node.kubernetes.io/instance-type": "kueue"})
    manager.queue("narrow", cpu="2")
    manager.queue("contested", cpu="2", preempting=True)
    manager.queue("wide", cpu="100")
    for name, value in (("low", 1), ("high", 1000)):
        house.apply({
            "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": f"kueue-{name}"},
            "value": value, "description": "for tests", "preemptionPolicy": "Never",
        })  # fmt: skip
    house.start_operator()
    yield house
    house.stop_operators()
    manager.stop()


def job(name: str, queue: str, **changes: object) -> Object:
    document = quick_job(name, gang={"instanceTypes": ["kueue"], "scheduler": {"kind": "kueue"}}, **changes)
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": queue}
    return document


def workload(house: House, name: str) -> Object | None:
    return house.find(paths.group(WORKLOADS, "team", "workloads", name))


def test_a_gang_waits_for_quota_and_then_runs(cluster: House) -> None:
    cluster.submit(job("quota-first", "narrow", steps=10_000))
    cluster.reaches("quota-first", "Running")
    cluster.submit(job("quota-second", "narrow", steps=10))

    def told() -> Object | None:
        status = cluster.status("quota-second")
        assert "insufficient" in status.get("because", ""), status.get("because")
        return status

    status = eventually(told, "Kueue's reason")
    assert status["code"] == "AwaitingScheduler"
    assert status["because"].startswith("waiting for Kueue to admit 2 workers: couldn't assign flavors")
    assert all("nodeName" not in pod["spec"] for pod in cluster.pods("quota-second"))
    row = cluster.kubectl("get", "tj", "quota-second", "-n", "team", "--no-headers").split()
    assert "narrow" in row
    cluster.change("quota-first", {"cancel": True})
    cluster.reaches("quota-second", "Succeeded", 90)
    eventually(lambda: not cluster.pods("quota-first"), "the first one's pods to be gone")
    assert workload(cluster, "quota-first-r0") is None


def test_a_suspended_gang_gives_its_quota_back(cluster: House) -> None:
    cluster.submit(job("pauses", "narrow", steps=60))
    cluster.steps("pauses", 6)
    cluster.change("pauses", {"suspend": True})
    cluster.reaches("pauses", "Suspended")
    eventually(lambda: workload(cluster, "pauses-r0") is None, "its Workload to be gone")
    cluster.submit(job("meanwhile", "narrow", steps=5))
    cluster.reaches("meanwhile", "Succeeded", 60)
    cluster.change("pauses", {"suspend": False})
    assert cluster.reaches("pauses", "Succeeded", 60)["attempt"] == 2


def test_a_higher_priority_preempts_and_the_gang_comes_back(cluster: House) -> None:
    uid = cluster.submit(job("humble", "contested", steps=80, priorityClassName="kueue-low"))
    cluster.steps("humble", 6)
    cluster.submit(job("proud", "contested", steps=20, priorityClassName="kueue-high"))
    cluster.reaches("proud", "Succeeded", 90)
    status = cluster.reaches("humble", "Succeeded", 90)
    assert status["restarts"]["byCause"] == {"preemption": 1}
    assert not status["restarts"].get("recent")
    second = status["attempts"][1]
    assert second["resumeStep"] == max(s for a, w, s, _ in cluster.trace(uid) if (a, w) == (1, 0))


def test_a_lost_container_is_replaced_within_its_group(cluster: House) -> None:
    """The next attempt's pods join the group that was admitted, so the gang keeps its quota."""
    cluster.submit(job("replaced", "wide", steps=60))
    cluster.steps("replaced", 6)
    before = workload(cluster, "replaced-r0")
    assert before is not None
    process = cluster.kubelets.of("replaced-1-1")
    assert process is not None
    process.kill_container()
    eventually(lambda: cluster.status("replaced")["attempt"] == 2, "the next attempt")
    cluster.reaches("replaced", "Running", 60)
    after = workload(cluster, "replaced-r0")
    assert after is not None
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    status = cluster.reaches("replaced", "Succeeded", 60)
    assert status["restarts"]["byCause"] == {"infrastructure": 1}


def test_a_failed_node(cluster: House) -> None:
    cluster.submit(job("failed-node", "wide", steps=400))
    cluster.steps("failed-node", 6)
    dark = next(
        p["spec"]["nodeName"] for p in cluster.pods("failed-node") if p["metadata"]["name"] == "failed-node-1-1"
    )
    cluster.do(cluster.kubelets.darken(dark))
    eventually(lambda: cluster.status("failed-node")["attempt"] == 2, f"the next attempt\n{cluster.tail()}")
    cluster.reaches("failed-node", "Running", 60)
    assert dark not in {pod["spec"].get("nodeName") for pod in cluster.pods("failed-node")}
    assert cluster.status("failed-node")["lastFailure"]["node"] == dark
    cluster.change("failed-node", {"cancel": True})
    cluster.reaches("failed-node", "Cancelled")


def test_a_job_without_a_queue_is_told(cluster: House) -> None:
    document = job("queueless", "wide")
    del document["metadata"]["labels"]
    cluster.submit(document)
    status = cluster.reaches("queueless", "Failed")
    assert "no queue is named" in status["because"]
    assert status["lastFailure"]["cause"] == "user_error"


def test_a_queue_that_does_not_exist_is_named(cluster: House) -> None:
    cluster.submit(job("astray", "nowhere", steps=5))
    eventually(lambda: "LocalQueue nowhere doesn't exist" in cluster.status("astray").get("because", ""), "the queue")
    assert cluster.status("astray")["code"] == "AwaitingScheduler"
    cluster.change("astray", {"cancel": True})
    cluster.reaches("astray", "Cancelled")
