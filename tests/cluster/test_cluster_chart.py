"""The chart's life on a real API server: install, an operator with what it was given, upgrade, roll back, uninstall."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.controlplane import ControlPlane
from tests.polling import eventually
from tests.tidy.repository import ROOT
from tests.unit.packaging.chart import merged
from tests.unit.packaging.conftest import helm  # noqa: F401 - a fixture

CHART = ROOT / "helm" / "muster"
NAMESPACE = "muster-system"
RELEASE = ["muster", CHART, "--namespace", NAMESPACE]
VALUES: dict[str, Any] = {
    "workers": {"checkpointUri": "s3://ckpt/muster", "namespaceLimits": {"team": 64}},
    "api": {"enabled": True, "persistence": {"enabled": False}},
    "networkPolicy": {"enabled": True},
    "grafana": {"dashboards": {"enabled": True}},
}
JOB = {
    "apiVersion": "muster.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "kept", "namespace": "default"},
    "spec": {
        "training": {
            "model": {"preset": "muster-1m"},
            "data": {"train": [{"source": "builtin://python-stdlib"}]},
            "batch": {"tokensPerStep": 1024},
            "length": {"steps": 10},
        },
        "gang": {"nodes": 1},
    },
}


class Cluster:
    def __init__(self, plane: ControlPlane, program: Path) -> None:
        self.plane, self._helm = plane, program

    def kubectl(self, *words: str, given: Any = None) -> str:
        return self._run("kubectl", f"--kubeconfig={self.plane.kubeconfig}", *words, given=given)

    def helm(self, *words: str | Path, given: Any = None) -> str:
        return self._run(self._helm, *words, "--kubeconfig", self.plane.kubeconfig, given=given)

    def get(self, *words: str) -> Any:
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def revision(self) -> int:
        return int(json.loads(self.helm("history", "muster", "-n", NAMESPACE, "-o", "json"))[-1]["revision"])

    def account(self, name: str, folder: Path) -> Path:
        """The files that a pod of this service account finds."""
        folder.mkdir(exist_ok=True)
        (folder / "token").write_text(self.kubectl("create", "token", name, "-n", NAMESPACE))
        (folder / "namespace").write_text(NAMESPACE)
        (folder / "ca.crt").write_text(self.plane.ca.read_text())
        return folder

    def _run(self, *words: str | Path, given: Any = None) -> str:
        text = None if given is None else json.dumps(given)
        done = subprocess.run(words, input=text, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, f"{' '.join(map(str, words))}: {done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, helm: Path) -> Iterator[Cluster]:  # noqa: F811
    """Of its own: the chart's objects must not meet those that other tests apply."""
    plane = ControlPlane(tmp_path_factory.mktemp("chart-plane"))
    plane.start()
    try:
        cluster = Cluster(plane, helm)
        cluster.kubectl("create", "namespace", NAMESPACE)
        cluster.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
        cluster.helm("install", *RELEASE, "--values", "-", given=VALUES)
        cluster.kubectl("wait", "--for=condition=Established", "crd/trainingjobs.muster.dev", "--timeout=60s")
        eventually(
            lambda: "trainingjobs" in cluster.kubectl("api-resources", "--api-group=muster.dev", "-o", "name"),
            "TrainingJobs to be served",
        )
        yield cluster
    finally:
        plane.stop()


def test_every_pod_is_admitted_under_the_restricted_standard(cluster: Cluster) -> None:
    """Made by their ReplicaSets; nothing runs them here, for there is no node."""
    wanted = {"operator": 2, "api": 1}

    def counted() -> bool:
        pods = cluster.get("pods", "-n", NAMESPACE)["items"]
        found = [pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods]
        return {name: found.count(name) for name in wanted} == wanted

    eventually(counted, "the pods")
    events = cluster.get("events", "-n", NAMESPACE)["items"]
    assert [event["message"] for event in events if event["reason"] == "FailedCreate"] == []


def test_the_operator_leads_with_the_charts_account_and_environment(cluster: Cluster, tmp_path: Path) -> None:
    """As a process of this machine, with the environment of its Deployment, the token of its account and its RBAC; then
    what `helm test` would run in a pod says that all is well.
    """
    spec = cluster.get("deployment", "muster-operator", "-n", NAMESPACE)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    environment |= {"MUSTER_OPERATOR_IDENTITY": "from-the-chart", "MUSTER_OPERATOR_PORT": "0"}
    kubeconfig = tmp_path / "kubeconfig"
    token = (cluster.account("muster-operator", tmp_path / "operator") / "token").read_text()
    cluster.plane.write_kubeconfig(kubeconfig, {"token": token})
    log = tmp_path / "log"
    with open(log, "wb") as out:
        operator = subprocess.Popen(
            [sys.executable, "-m", "muster.operator", *container["args"], "--kubeconfig", kubeconfig],
            env=os.environ | environment, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        eventually(lambda: "operator leads" in log.read_text(), f"a leader\n{log.read_text()}")
        told = smoke(cluster, tmp_path, patience=60)
        assert (told.returncode, told.stdout.split()) == (0, ["ok", "definition_is_served", "ok", "operator_leads"])
        assert "forbidden" not in log.read_text().lower()
    finally:
        operator.terminate()
        assert operator.wait(30) == 0


def test_the_smoke_test_can_fail(cluster: Cluster, tmp_path: Path) -> None:
    """The operator of the test above has released the lease, and nobody has taken it."""
    told = smoke(cluster, tmp_path, patience=0)
    assert told.returncode == 1
    assert "FAILED  operator_leads" in told.stdout


def smoke(cluster: Cluster, folder: Path, patience: float) -> "subprocess.CompletedProcess[str]":
    """The program of the chart's test pod, with the account that `helm test` makes for it."""
    hooks = yaml.safe_load_all(cluster.helm("get", "hooks", "muster", "-n", NAMESPACE))
    parts = [item for item in hooks if item]
    for item in parts:
        if item["kind"] != "Pod":
            cluster.kubectl("apply", "-f", "-", given=item)
    (pod,) = [item for item in parts if item["kind"] == "Pod"]
    (container,) = pod["spec"]["containers"]
    host, port = cluster.plane.server.removeprefix("https://").split(":")
    environment = {
        "KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port,
        "JOBS_NAMESPACE": "default", "PATIENCE_SECONDS": str(patience),
        "ACCOUNT_FOLDER": str(cluster.account("muster-test", folder / "test")),
    }  # fmt: skip
    words = [sys.executable, *container["command"][1:], *container["args"]]
    return subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=120)


def test_jobs_live_through_upgrade_rollback_and_uninstall(cluster: Cluster) -> None:
    cluster.kubectl("apply", "-f", "-", given=JOB)
    uid = cluster.get("tj", "kept")["metadata"]["uid"]

    first = cluster.revision()
    cluster.helm("upgrade", *RELEASE, "--values", "-", given=VALUES | {"operator": {"replicas": 3}})
    assert cluster.get("deployment", "muster-operator", "-n", NAMESPACE)["spec"]["replicas"] == 3
    cluster.helm("rollback", "muster", str(first), "-n", NAMESPACE)
    assert cluster.get("deployment", "muster-operator", "-n", NAMESPACE)["spec"]["replicas"] == 2
    assert cluster.get("tj", "kept")["metadata"]["uid"] == uid

    kept = cluster.helm("uninstall", "muster", "-n", NAMESPACE)
    assert cluster.get("tj", "kept")["metadata"]["uid"] == uid
    assert "deployments" not in cluster.kubectl("get", "deployments", "-n", NAMESPACE, "-o", "name")
    assert "trainingjobs.muster.dev" in kept

    cluster.helm("install", *RELEASE, "--values", "-", given=VALUES)
    assert cluster.get("tj", "kept")["metadata"]["uid"] == uid


@pytest.mark.skipif(not shutil.which("jq"), reason="jq is not installed")
def test_jobs_are_restored_by_the_command_in_the_documents(cluster: Cluster, tmp_path: Path) -> None:
    document = (ROOT / "docs" / "operations.md").read_text().split("### Restore jobs")[1]
    (command,) = re.findall(r"```sh\n(.*?)```", document.split("\n## ")[0], re.DOTALL)
    job = merged(JOB, {"metadata": {"name": "restored", "labels": {"team": "nlp"}}})
    cluster.kubectl("create", "-f", "-", given=job)
    uid = cluster.get("tj", "restored")["metadata"]["uid"]
    (tmp_path / "jobs.json").write_text(cluster.kubectl("get", "trainingjobs", "-A", "-o", "json"))
    cluster.kubectl("delete", "tj", "restored")

    def restore() -> "subprocess.CompletedProcess[str]":
        environment = os.environ | {"KUBECONFIG": str(cluster.plane.kubeconfig)}
        return subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    assert "restored created" in restore().stdout
    found = cluster.get("tj", "restored")
    assert found["metadata"]["uid"] != uid
    assert (found["metadata"]["labels"], found["spec"]["suspend"]) == ({"team": "nlp"}, True)
    assert "already exists" in restore().stderr


def test_users_of_a_namespace_may_handle_its_jobs(cluster: Cluster) -> None:
    """By aggregation into Kubernetes' own roles, and no further: status is the operator's."""
    cluster.kubectl("create", "namespace", "team")
    for role in ("edit", "view"):
        binding = [f"--clusterrole={role}", f"--user={role}or", "-n", "team"]
        cluster.kubectl("create", "rolebinding", role, *binding)

    def may(user: str, verb: str, what: str, namespace: str = "team") -> bool:
        what, _, part = what.partition("/")
        answer = subprocess.run(
            ["kubectl", f"--kubeconfig={cluster.plane.kubeconfig}", "auth", "can-i", verb, what, f"--as={user}",
             "-n", namespace, f"--subresource={part}"], capture_output=True, text=True, check=False,
        )  # fmt: skip
        return answer.stdout.strip() == "yes"

    eventually(lambda: may("editor", "create", "trainingjobs.muster.dev"), "the aggregated role")
    assert may("viewor", "watch", "trainingjobs.muster.dev")
    assert not may("viewor", "delete", "trainingjobs.muster.dev")
    assert not may("editor", "update", "trainingjobs.muster.dev/status")
    assert not may("editor", "create", "trainingjobs.muster.dev", "default")
    assert may("system:serviceaccount:muster-system:muster-operator", "update", "trainingjobs.muster.dev/status")
