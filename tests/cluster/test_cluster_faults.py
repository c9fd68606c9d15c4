"""What clusters do to gangs: crashes, deleted pods, nodes that fall silent, are cordoned, deleted or taken back."""

from collections.abc import Iterator

import pytest
from tests.cluster.house import House, quick_job
from tests.polling import eventually

from muster.kube import paths


@pytest.fixture(scope="module")
def cluster(house: House) -> Iterator[House]:
    house.start_operator()
    yield house
    house.stop_operators()


def nodes(house: House, kind: str, number: int) -> None:
    for index in range(number):
        house.node(f"{kind}-{index}", {"node.kubernetes.io/instance-type": kind})


def gang(kind: str) -> dict[str, object]:
    return {"instanceTypes": [kind]}


def placed(house: House, job: str) -> list[str]:
    """Its nodes, in worker order."""
    found: list[str] = house.status(job)["gang"]["nodes"]
    return found


def never_two_at_once(house: House, uid: str) -> None:
    """No step of an attempt comes after the first step of the next one."""
    trace = house.trace(uid)
    for attempt in {entry[0] for entry in trace} - {1}:
        begun = min(at for number, _, _, at in trace if number == attempt)
        assert max(at for number, _, _, at in trace if number == attempt - 1) <= begun


def test_a_killed_container_costs_a_restart_from_the_last_commit(cluster: House) -> None:
    nodes(cluster, "crash", 2)
    uid = cluster.submit(quick_job("crash", steps=40, gang=gang("crash"), runtime=cluster.holds("crash", 10)))
    cluster.steps("crash", 7)
    process = cluster.kubelets.of("crash-1-1")
    assert process is not None
    process.kill_container()
    status = cluster.goes_on("crash")
    assert status["restarts"]["byCause"] == {"infrastructure": 1}
    assert status["lastFailure"]["exitCode"] == 137
    assert status["lastFailure"]["worker"] == 1
    assert status["lastFailure"]["node"] == status["attempts"][0]["nodes"][1]
    assert status["attempts"][1]["resumeStep"] >= 5
    never_two_at_once(cluster, uid)


def test_the_workers_own_words_reach_the_status(cluster: House) -> None:
    nodes(cluster, "words", 2)
    environment = {"env": [{"name": "QUICK_EXIT", "value": "1:1:3:82"}]}
    cluster.submit(quick_job("words", steps=10, gang=gang("words"), runtime=environment))
    status = cluster.reaches("words", "Succeeded")
    assert status["restarts"]["byCause"] == {"numeric": 1}
    assert status["lastFailure"]["message"] == "worker 1 was told to end with 82"


def test_a_deleted_pod_costs_no_budget(cluster: House) -> None:
    nodes(cluster, "deleted", 2)
    uid = cluster.submit(quick_job("deleted", steps=20, gang=gang("deleted"), runtime=cluster.holds("deleted", 10)))
    cluster.steps("deleted", 4)
    cluster.reaches("deleted", "Running")  # before that, the pod is simply made again
    cluster.kubectl("delete", "pod", "-n", "team", "deleted-1-1", "--wait=false")
    status = cluster.goes_on("deleted")
    assert status["restarts"]["byCause"] == {"eviction": 1}
    assert "deleted-1-1 is being deleted, and not by Muster" in status["lastFailure"]["message"]
    never_two_at_once(cluster, uid)


def test_a_node_that_falls_silent_is_left(cluster: House) -> None:
    nodes(cluster, "silent", 3)
    uid = cluster.submit(quick_job("silent", steps=10_000, gang=gang("silent")))
    cluster.steps("silent", 6)
    dark = placed(cluster, "silent")[1]
    cluster.do(cluster.kubelets.darken(dark))
    eventually(lambda: cluster.status("silent")["attempt"] == 2, "the next attempt")
    cluster.reaches("silent", "Running")
    status = cluster.status("silent")
    assert dark not in status["gang"]["nodes"]
    assert status["lastFailure"]["cause"] == "infrastructure"
    assert status["lastFailure"]["node"] == dark
    cluster.change("silent", {"cancel": True})
    cluster.reaches("silent", "Cancelled")
    never_two_at_once(cluster, uid)


def test_a_cordoned_node_goes_on_and_is_not_used_again(cluster: House) -> None:
    nodes(cluster, "cordon", 3)
    cluster.submit(quick_job("cordon", steps=20, gang=gang("cordon"), runtime=cluster.holds("cordon", 10)))
    cluster.steps("cordon", 4)
    cordoned = placed(cluster, "cordon")[0]
    cluster.kubectl("cordon", cordoned)
    before = cluster.steps("cordon", 8)
    assert cluster.status("cordon")["attempt"] == 1
    process = cluster.kubelets.of("cordon-1-0")
    assert process is not None
    process.kill_container()
    status = cluster.goes_on("cordon")
    assert status["attempt"] == 2
    assert before >= 8
    assert cordoned not in status["attempts"][1]["nodes"]


def test_a_deleted_node(cluster: House) -> None:
    nodes(cluster, "gone", 3)
    uid = cluster.submit(quick_job("gone", steps=20, gang=gang("gone"), runtime=cluster.holds("gone", 10)))
    cluster.steps("gone", 4)
    removed = placed(cluster, "gone")[0]
    cluster.do(cluster.kubelets.remove_node(removed))
    status = cluster.goes_on("gone")
    assert status["attempt"] == 2
    assert removed not in status["attempts"][1]["nodes"]
    never_two_at_once(cluster, uid)


def test_a_spot_notice_gives_time_to_commit(cluster: House) -> None:
    nodes(cluster, "spot", 3)
    uid = cluster.submit(quick_job("spot", steps=20, gang=gang("spot"), runtime=cluster.holds("spot", 10)))
    cluster.steps("spot", 7)
    taken = placed(cluster, "spot")[1]
    cluster.kubectl("taint", "node", taken, "aws-node-termination-handler/spot-itn=soon:NoSchedule")
    status = cluster.goes_on("spot")
    assert status["restarts"]["byCause"] == {"preemption": 1}
    assert not status["restarts"].get("recent")
    second = status["attempts"][1]
    assert second["resumeStep"] == max(s for attempt, worker, s, _ in cluster.trace(uid) if (attempt, worker) == (1, 0))
    assert taken not in second["nodes"]
    never_two_at_once(cluster, uid)


def test_eviction_by_a_drain(cluster: House) -> None:
    nodes(cluster, "drain", 3)
    cluster.submit(quick_job("drain", steps=20, gang=gang("drain"), runtime=cluster.holds("drain", 10)))
    cluster.steps("drain", 4)
    cluster.reaches("drain", "Running")
    drained = placed(cluster, "drain")[0]
    cluster.kubectl("cordon", drained)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "drain-1-0", "namespace": "team"}}
    cluster.client.create(f"{paths.core('team', 'pods', 'drain-1-0')}/eviction", eviction)
    status = cluster.goes_on("drain")
    assert status["restarts"]["byCause"] == {"eviction": 1}
    assert drained not in status["attempts"][1]["nodes"]
