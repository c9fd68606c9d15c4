"""Who may reach a gang and ask its fence, on a real API server; and an operator that is let into one namespace only."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.controlplane import ControlPlane
from tests.cluster.house import House, quick_job

from muster.kube import paths

OPERATOR = {"podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """An operator that serves the namespace `team` alone."""
    folder: Path = tmp_path_factory.mktemp("borders")
    plane = ControlPlane(folder / "plane")
    plane.start()
    house = House(plane, folder / "house")
    (folder / "house").mkdir(exist_ok=True)
    for name in ("team", "others"):
        house.namespace(name)
    house.install({"operator": {"watchNamespace": "team"}})
    for index in range(2):
        house.node(f"border-{index}")
    house.start_operator(MUSTER_OPERATOR_WATCH_NAMESPACE="team", MUSTER_OPERATOR_REPORT_FROM=json.dumps([OPERATOR]))
    yield house
    house.close()
    plane.stop()


def may(house: House, account: str, verb: str, resource: str, namespace: str = "team") -> bool:
    who = f"--as=system:serviceaccount:{account}"
    told = house.kubectl("auth", "can-i", verb, resource, "-n", namespace, who, check=False)
    return told.splitlines()[0].strip() == "yes"


def test_an_operator_of_one_namespace_runs_its_jobs_and_no_others(cluster: House) -> None:
    foreign = quick_job("foreign", steps=3)
    foreign["metadata"]["namespace"] = "others"
    cluster.submit(foreign)
    cluster.submit(quick_job("mine", steps=3))
    cluster.reaches("mine", "Succeeded", 120)
    assert cluster.status("foreign", "others") == {}
    operator = "muster-system:muster-operator"
    assert may(cluster, operator, "create", "pods")
    for verb, resource in (("get", "trainingjobs.muster.dev"), ("create", "pods"), ("list", "pods")):
        assert not may(cluster, operator, verb, resource, "others"), (verb, resource)


def test_a_gang_has_a_border_and_its_fence_one_reader(cluster: House) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "training"}}
    cluster.client.create(paths.core("team", "serviceaccounts"), account)
    cluster.submit(quick_job("walled", steps=10_000, runtime={"serviceAccountName": "training", "labels": {"a": "b"}}))
    cluster.reaches("walled", "Running", 120)
    uid = cluster.job("walled")["metadata"]["uid"]
    (policy,) = [
        item
        for item in cluster.get(paths.group("networking.k8s.io/v1", "team", "networkpolicies"))["items"]
        if item["metadata"]["ownerReferences"][0]["uid"] == uid
    ]
    members = {"matchLabels": {"muster.dev/job-uid": uid}}
    assert policy["spec"]["podSelector"] == members
    assert policy["spec"]["ingress"][0] == {"from": [{"podSelector": members}]}
    assert policy["spec"]["ingress"][1]["from"] == [OPERATOR]
    assert {pod["metadata"]["labels"]["a"] for pod in cluster.pods("walled")} == {"b"}
    assert may(cluster, "team:training", "get", "trainingjobs.muster.dev")
    assert not may(cluster, "team:another", "get", "trainingjobs.muster.dev"), "only the workers' own account may"
    for verb, resource in itertools.product(("get", "list", "create", "delete"), ("secrets", "pods", "configmaps")):
        assert not may(cluster, "team:training", verb, resource), (verb, resource)
    for verb, resource in (
        ("update", "trainingjobs.muster.dev"),
        ("patch", "trainingjobs.muster.dev/status"),
        ("create", "serviceaccounts/token"),
        ("create", "pods/exec"),
        ("get", "trainingjobs.muster.dev"),
    ):
        where = "others" if verb == "get" else "team"
        assert not may(cluster, "team:training", verb, resource, where), (verb, resource, where)
    cluster.change("walled", {"cancel": True})
    cluster.reaches("walled", "Cancelled", 90)
