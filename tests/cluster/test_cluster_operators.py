"""The operator's own deaths and blindness: killed at every kind of write, handed over, cut off from its watches."""

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.cluster.house import House, quick_job
from tests.cluster.proxy import Call, Proxy
from tests.polling import WAIT_SECONDS_MAX, eventually

from muster.kube import paths

NODES = {"node.kubernetes.io/instance-type": "ops"}
OPS = {"instanceTypes": ["ops"]}
# Every kind of write that a job's life needs. method, and what the path contains.
WRITES = {
    "lease": ("PUT", "/leases/"),
    "reservations": ("PUT", "/configmaps/"),
    "status": ("PUT", "/status"),
    "finalizer": ("PATCH", "/trainingjobs/"),
    "service": ("POST", "/services"),
    "pod": ("POST", "/pods"),
    "removal": ("DELETE", "/pods"),
    "event": ("POST", "/events"),
}
# And those of a gang that a quota lets in only in part: what was made is taken back, then held, then let go together.
GATED = {"taking back": ("DELETE", "/pods/quota-"), "gate": ("PATCH", "/pods/quota-")}


@pytest.fixture(scope="module")
def proxy(house: House) -> Iterator[Proxy]:
    for index in range(2):
        house.node(f"ops-{index}", NODES)
    proxy = Proxy(house.plane)
    house.do(proxy.start())
    yield proxy
    house.do(proxy.stop())


@pytest.fixture(autouse=True)
def alone(house: House, proxy: Proxy) -> Iterator[None]:
    yield
    proxy.heal()
    house.stop_operators()


def trap(
    left: dict[str, tuple[str, str]], operators: "list[subprocess.Popen[bytes]]", killed: threading.Event
) -> Callable[[Call], bool]:
    """Kills the newest operator at the first write of each kind."""

    def spring(call: Call) -> bool:
        for kind, (method, part) in left.items():
            if call.method == method and part in call.path and (kind != "status" or "/trainingjobs/" in call.path):
                del left[kind]
                operators[-1].send_signal(signal.SIGKILL)
                killed.set()
                return True
        return False

    return spring


def is_held(house: House, name: str, namespace: str) -> bool:
    specs = [pod["spec"] for pod in house.pods(name, namespace)]
    return len(specs) == 1 and bool(specs[0].get("schedulingGates")) and "nodeName" not in specs[0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_operator_killed_while_a_quota_holds_half_of_a_gang(house: House, proxy: Proxy, when: str) -> None:
    namespace, name = f"half-{when}", f"quota-{when}"
    house.namespace(namespace)
    quotas = paths.core(namespace, "resourcequotas")
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "one"}, "spec": {"hard": {"pods": "1"}}}
    house.client.create(quotas, quota)
    eventually(lambda: "hard" in house.get(f"{quotas}/one").get("status", {}), "a counted quota")
    left, killed, operators = dict(GATED), threading.Event(), []  # type: ignore[var-annotated]
    setattr(proxy, when, trap(left, operators, killed))
    operators.append(house.start_operator(server=proxy.server))
    # A worker here trains without the others. One that ends before the next operator comes would free the quota.
    document = quick_job(name, steps=10, gang=OPS, runtime=house.holds(name, 5))
    document["metadata"]["namespace"] = namespace
    house.submit(document)
    for expected in (1, 0):
        if not expected:
            eventually(lambda: is_held(house, name, namespace), "the one pod to wait behind its gate")
            house.client.patch(f"{quotas}/one", {"spec": {"hard": {"pods": "2"}}})
        eventually(killed.is_set, f"a death; not met yet: {set(left)}\n{house.tail()}")
        assert len(left) == expected
        killed.clear()
        operators[-1].wait()
        operators.append(house.start_operator(server=proxy.server))
    house.let_go(name)
    house.reaches(name, "Succeeded", namespace=namespace)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_operator_killed_at_every_kind_of_write_costs_the_job_nothing(house: House, proxy: Proxy, when: str) -> None:
    """At the first write of each kind the operator is killed, before the API server got it or before the answer came;
    the next operator goes on. The job must not lose an attempt, nor train twice.
    """
    left = dict(WRITES)
    killed = threading.Event()
    operators: list[subprocess.Popen[bytes]] = []
    setattr(proxy, when, trap(left, operators, killed))
    operators.append(house.start_operator(server=proxy.server))
    name = f"killed-{when}"
    uid = house.submit(quick_job(name, steps=25, gang=OPS))
    while left or killed.is_set():  # two writes at the same moment make one death
        eventually(killed.is_set, f"a death; not met yet: {set(left)}\n{house.tail()}")
        operators[-1].wait()
        killed.clear()
        operators.append(house.start_operator(server=proxy.server))
    status = house.reaches(name, "Succeeded")
    assert (status["attempt"], status["restarts"].get("total", 0)) == (1, 0)
    steps = [(worker, step) for _, worker, step, _ in house.trace(uid)]
    assert len(steps) == len(set(steps)) == 50
    eventually(lambda: not house.pods(name), "its pods to be gone")


def test_the_lead_is_handed_over_at_once_when_an_operator_is_told_to_stop(house: House) -> None:
    first = house.start_operator("first")
    house.submit(quick_job("handed", steps=60, gang=OPS))
    house.steps("handed", 3)
    house.start_operator("second")
    eventually(lambda: "waiting to lead" in house.log.read_text(), "the second to wait")
    first.terminate()
    assert first.wait(WAIT_SECONDS_MAX) == 0
    assert house.reaches("handed", "Succeeded")["attempt"] == 1
    eventually(lambda: '"identity": "second"' in house.log.read_text(), "the second to lead")


def test_an_operator_that_loses_its_lease_ends(house: House) -> None:
    first = house.start_operator("first")
    lease = "/apis/coordination.k8s.io/v1/namespaces/muster-system/leases/muster-operator"
    eventually(lambda: (house.find(lease) or {}).get("spec", {}).get("holderIdentity") == "first", "a lease")
    house.client.patch(lease, {"spec": {"holderIdentity": "thief", "leaseDurationSeconds": 1}})
    assert first.wait(WAIT_SECONDS_MAX) == 1
    assert "another operator has taken the lease" in house.log.read_text()


def test_watches_that_fall_silent_are_noticed(house: House, proxy: Proxy) -> None:
    """The streams stay open and say nothing; a job that is made meanwhile is found all the same."""
    house.start_operator(server=proxy.server, MUSTER_OPERATOR_SILENCE_SECONDS="2")
    eventually(lambda: sum(call.is_watch for call in proxy.calls) >= 4, "the watches")
    proxy.silent.set()
    house.submit(quick_job("unheard", steps=5, gang=OPS))
    seen = len(proxy.calls)
    eventually(lambda: sum(call.is_watch for call in proxy.calls[seen:]) >= 4, "the watches to be opened again")
    proxy.silent.clear()
    house.reaches("unheard", "Succeeded")


@pytest.mark.timeout(600)
def test_a_forgotten_past_is_listed_anew(house: House) -> None:
    """etcd compacts and the API server restarts: every watch is answered with 410 Gone, and nothing is missed."""
    house.start_operator()
    house.submit(quick_job("compacted", steps=80, gang=OPS))
    house.steps("compacted", 3)
    house.plane.compact()
    house.plane.restart_api_server()
    status = house.reaches("compacted", "Succeeded")
    assert status["attempt"] == 1
