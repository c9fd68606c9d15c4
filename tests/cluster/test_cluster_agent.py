"""The node agent with the chart's own rights on a real API server, and what the operator makes of its word."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from tests.cluster.house import SYSTEM, House, quick_job
from tests.cluster.test_cluster_faults import gang, nodes, placed
from tests.polling import eventually
from tests.tidy.repository import ROOT
from tests.unit.agent.mock_imds import ACTION, MockImds, mock_imds
from tests.unit.packaging.chart import Chart
from tests.unit.packaging.conftest import chart, helm  # noqa: F401 - fixtures

from muster.kube import paths
from muster.kube.client import ApiClient
from muster.kube.connection import ApiConnection, BearerCredentials
from muster.kube.errors import ApiError
from muster.kube.tls import api_server_context
from muster.words.notices import AGENT_CONDITION, FAULT_CONDITION, NOTICES, TAINTS
from muster.words.signals import SignalKind


class Agent:
    """One agent's process on a node. Its kernel log is a FIFO that tests write to."""

    def __init__(self, house: House, folder: Path, node: str, account: Path, imds: str) -> None:
        self.house, self.node, self.log = house, node, folder / "agent.log"
        self.kernel_log = folder / "kmsg"
        if not self.kernel_log.exists():
            os.mkfifo(self.kernel_log)
        server = urlsplit(house.plane.server)
        environment = {
            "KUBERNETES_SERVICE_HOST": str(server.hostname), "KUBERNETES_SERVICE_PORT": str(server.port),
            "MUSTER_AGENT_NODE": node, "MUSTER_AGENT_KUBERNETES": "true", "MUSTER_AGENT_HOST": "127.0.0.1",
            "MUSTER_AGENT_PORT": "0", "MUSTER_AGENT_IMDS": imds, "MUSTER_AGENT_KERNEL_LOG": str(self.kernel_log),
            "MUSTER_AGENT_SERVICE_ACCOUNT": str(account),
        }  # fmt: skip
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "muster.agent"], env=os.environ | environment, stdout=file, stderr=file
            )
        eventually(lambda: self.condition(AGENT_CONDITION) == "True", f"the agent's first word; {self.log}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)

    def xid(self, code: int) -> None:
        with self.kernel_log.open("w") as log:
            log.write(
                f"4,1,{int(time.monotonic() * 1e6)},-;NVRM: Xid (PCI:0000:3b:00): {code}, pid=1, name=python, x\n"
            )

    def item(self) -> dict:
        return self.house.get(f"/api/v1/nodes/{self.node}")

    def taints(self) -> set[str]:
        return {taint["key"] for taint in self.item()["spec"].get("taints", ())} & set(TAINTS.values())

    def condition(self, kind: str) -> str | None:
        found = (entry["status"] for entry in self.item()["status"]["conditions"] if entry["type"] == kind)
        return next(found, None)


@pytest.fixture(scope="module")
def cluster(house: House) -> Iterator[House]:
    house.start_operator()
    yield house
    house.stop_operators()


@pytest.fixture(scope="module")
def account(house: House, chart: Chart, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """What a pod of the chart's service account finds, with the rights that the chart gives it."""
    wanted = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding")
    for item in chart.objects({"agent": {"enabled": True}}):
        if item["kind"] in wanted and item["metadata"]["name"] == "muster-agent":
            house.apply(item)
    folder = tmp_path_factory.mktemp("account")
    (folder / "token").write_text(house.kubectl("create", "token", "muster-agent", "-n", SYSTEM))
    (folder / "ca.crt").write_text(house.plane.ca.read_text())
    return folder


@pytest.fixture
def service() -> Iterator[MockImds]:
    with mock_imds() as mock:
        yield mock


@pytest.fixture
def agents(cluster: House, account: Path, service: MockImds, tmp_path: Path) -> Iterator:
    with contextlib.ExitStack() as stack:

        def start(node: str) -> Agent:
            agent = Agent(cluster, tmp_path, node, account, service.address)
            stack.callback(agent.stop)
            return agent

        yield start


def test_a_notice_of_the_cloud_moves_the_gang_and_costs_nothing(cluster: House, agents, service: MockImds) -> None:
    nodes(cluster, "imds", 3)
    cluster.submit(quick_job("imds", steps=80, gang=gang("imds")))
    cluster.steps("imds", 7)
    agent = agents(placed(cluster, "imds")[1])
    service.interrupt()
    eventually(lambda: agent.taints() == {TAINTS[SignalKind.SPOT_NOTICE]}, "the taint")
    status = cluster.reaches("imds", "Succeeded")
    assert status["restarts"]["byCause"] == {"preemption": 1}
    assert not status["restarts"].get("recent")
    assert agent.node not in status["attempts"][1]["nodes"]
    assert "AWS takes the instance back" in status["attempts"][0]["message"]
    service.documents.pop(ACTION)
    eventually(lambda: agent.taints() == set(), "the taint to go")
    eventually(lambda: agent.condition(FAULT_CONDITION) == "False", "the condition to be over")
    agent.stop()
    assert agent.condition(AGENT_CONDITION) == "Unknown", "its last word"


def test_a_lost_gpu_keeps_the_node_out_until_a_person_says_otherwise(cluster: House, agents) -> None:
    nodes(cluster, "xid", 3)
    cluster.submit(quick_job("xid", steps=80, gang=gang("xid")))
    cluster.steps("xid", 4)
    agent = agents(placed(cluster, "xid")[0])
    agent.xid(79)
    status = cluster.reaches("xid", "Succeeded")
    assert status["restarts"]["byCause"] == {"infrastructure": 1}
    assert "Xid 79" in status["attempts"][0]["message"]
    assert agent.node not in status["attempts"][1]["nodes"]
    annotation = json.loads(agent.item()["metadata"]["annotations"][NOTICES])
    assert [notice["remedy"] for notice in annotation["notices"]] == ["reboot"]
    agent.stop()
    successor = agents(agent.node)
    assert successor.taints() == {TAINTS[SignalKind.GPU_FAULT]}, (
        "the next agent keeps its word, the kernel being the same"
    )
    successor.stop()
    cluster.kubectl("taint", "node", agent.node, f"{TAINTS[SignalKind.GPU_FAULT]}-")
    third = agents(agent.node)
    eventually(lambda: NOTICES not in third.item()["metadata"].get("annotations", {}), "the annotation to go")
    assert third.taints() == set()


def test_its_rights_end_at_the_nodes(account: Path, house: House) -> None:
    who = f"--as=system:serviceaccount:{SYSTEM}:muster-agent"

    def may(verb: str, what: str) -> bool:
        return house.kubectl("auth", "can-i", verb, what, who, "-A", check=False).startswith("yes")

    allowed = [("get", "nodes"), ("patch", "nodes"), ("patch", "nodes/status")]
    denied = [("list", "nodes"), ("delete", "nodes"), ("get", "secrets"), ("list", "pods"), ("get", "trainingjobs")]
    assert [pair for pair in allowed if not may(*pair)] == []
    assert [pair for pair in denied if may(*pair)] == []


def test_the_policy_in_the_documents_confines_it_to_its_own_node(house: House, account: Path) -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    (policy,) = (part for part in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "AdmissionPolicy" in part)
    for document in yaml.safe_load_all(policy):
        house.apply(document)
    for name in ("own", "other"):
        house.node(name)
    bound = {"apiVersion": "v1", "kind": "Node", "name": "own"}
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"boundObjectRef": bound}}
    path = f"{paths.core(SYSTEM, 'serviceaccounts', 'muster-agent')}/token"
    (account / "bound").write_text(house.client.create(path, request)["status"]["token"])

    async def write(node: str) -> None:
        tls = api_server_context((account / "ca.crt").read_text())
        connection = ApiConnection(house.plane.server, tls, BearerCredentials(token_file=account / "bound"), SYSTEM)
        async with ApiClient(connection, "tests") as client:
            change = {"metadata": {"annotations": {"muster.dev/try": str(time.monotonic())}}}
            await client.patch(paths.node(node), change)

    def may_write(node: str) -> bool:
        try:
            house.do(write(node))
        except ApiError as error:
            if error.status not in (403, 422):  # what a policy answers
                raise
            return False
        return True

    try:
        eventually(lambda: not may_write("other"), "the policy to hold")
        assert may_write("own")
    finally:
        house.kubectl("delete", "validatingadmissionpolicybinding,validatingadmissionpolicy", "muster-agent")
