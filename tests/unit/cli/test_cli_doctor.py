"""What the doctor says of the checkpoint store's pod and the operator's rights. A real cluster: tests/cluster."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes import client

from muster.cli.cluster_checks import _leader, _operator, _storage_class
from muster.cli.cluster_connection import NamedCluster
from muster.cli.cluster_rights import OPERATOR_RIGHTS, operator_rights
from muster.cli.examined_cluster import ExaminedCluster
from muster.cli.machine_checks import ExaminedMachine, examine_machine, torch_against_driver
from muster.cli.store_probe import checkpoint_store, probe_pod, verdict
from muster.words.state_folder import StateFolder

IMAGE, URI = "registry.example/muster:1", "s3://checkpoints/team"
SETTINGS = {
    "MUSTER_OPERATOR_CHECKPOINT_URI": URI,
    "MUSTER_OPERATOR_IMAGE": IMAGE,
    "MUSTER_OPERATOR_SERVICE_ACCOUNT": "trainer",
    "MUSTER_OPERATOR_IMAGE_PULL_SECRETS": '["registry"]',
    "MUSTER_S3_ENDPOINT": "http://minio:9000",
    "MUSTER_OPERATOR_ENV_FROM": '[{"secretRef": {"name": "s3"}}]',
}
POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: muster-doctor-1
  labels: {app.kubernetes.io/name: muster-doctor}
spec:
  restartPolicy: Never
  activeDeadlineSeconds: 120
  automountServiceAccountToken: false
  securityContext: {runAsNonRoot: true, runAsUser: 1000, seccompProfile: {type: RuntimeDefault}}
  serviceAccountName: trainer
  imagePullSecrets: [{name: registry}]
  containers:
    - name: store
      image: registry.example/muster:1
      command: [python, -m, muster.trainer.checkpoint, ls, s3://checkpoints/team, --json]
      env: [{name: MUSTER_S3_ENDPOINT, value: http://minio:9000}]
      envFrom: [{secretRef: {name: s3}}, {secretRef: {name: mine}}]
      resources: {requests: {cpu: 100m, memory: 256Mi}, limits: {memory: 512Mi}}
      securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
"""


def test_the_stores_pod_reaches_it_as_a_worker_does() -> None:
    """Its S3 settings, keys, account and pull secrets are the workers': it asked Amazon where the cluster has a MinIO,
    and failed for want of keys that jobs had.
    """
    pod = probe_pod("muster-doctor-1", IMAGE, URI, SETTINGS, ("mine",))
    assert pod == yaml.safe_load(POD)
    for version in ("1.29", "1.35"):
        kubernetes_validate.validate(pod, version, strict=True)
    kubernetes_validate.validate(probe_pod("muster-doctor-1", IMAGE, URI, {}), "1.35", strict=True)


def seen(phase: str, waiting: tuple[str, str] | None = None, condition: tuple[str, str] | None = None) -> client.V1Pod:
    state = client.V1ContainerState(
        waiting=client.V1ContainerStateWaiting(reason=waiting[0], message=waiting[1]) if waiting else None
    )
    status = client.V1ContainerStatus(image=IMAGE, image_id="", name="store", ready=False, restart_count=0, state=state)
    conditions = [
        client.V1PodCondition(type="PodScheduled", status="False", reason=condition[0], message=condition[1])
    ] if condition else []  # fmt: skip
    return client.V1Pod(
        status=client.V1PodStatus(phase=phase, conditions=conditions, container_statuses=[status] if waiting else None)
    )


@pytest.mark.parametrize(
    ("pod", "log", "state", "words", "next_step"),
    [
        (seen("Succeeded"), "{}", "ok", f"{URI} answers a pod of {IMAGE}", ""),
        (
            seen("Failed"),
            'warning: x\n{"error": "s3://checkpoints/team/commits/: can\'t list it: the bucket does not exist"}\n',
            "failure",
            f"a pod of {IMAGE} can't use {URI}: {URI}/commits/: can't list it: the bucket does not exist",
            "check address, bucket policy",
        ),
        (
            seen("Failed"),
            '{"error": "s3://checkpoints/team: no AWS credentials were found; give the worker a role, or keys"}',
            "failure",
            f"a pod of {IMAGE} can't use {URI}: {URI}: no AWS credentials were found",
            "--env-from SECRET",
        ),
        (
            seen("Pending", ("ImagePullBackOff", 'Back-off pulling image "registry.example/muster:1"')),
            "",
            "failure",
            f"{IMAGE} can't be pulled (ImagePullBackOff: Back-off pulling image",
            "with --image",
        ),
        (
            seen("Pending", ("CreateContainerConfigError", "image will run as root")),
            "",
            "failure",
            f"a pod of {IMAGE} can't start (CreateContainerConfigError: image will run as root)",
            "put right",
        ),
        (
            seen("Pending", None, ("Unschedulable", "0/3 nodes are available: 3 had untolerated taint(s).")),
            "",
            "warning",
            "not known: no node took the pod that tries it within 90 s: 0/3 nodes are available",
            "make room",
        ),
        (
            seen("Pending", ("ContainerCreating", "")),
            "",
            "warning",
            "not known: the pod that tries it did not run within 90 s (ContainerCreating)",
            "try again",
        ),
    ],
    ids=["reached", "refused", "no keys", "no image", "no start", "no node", "slow"],
)
def test_what_became_of_the_pod_is_said_with_the_next_step(
    pod: client.V1Pod, log: str, state: str, words: str, next_step: str
) -> None:
    found = verdict(pod, log, IMAGE, URI, 90)
    assert found[0] == state
    assert found[1].startswith(words)
    assert next_step in "".join(found[2:])


class Recorded(ExaminedCluster):
    """A cluster that gives these answers; asked: what was sent, by the call's name."""

    def prepare(self, settings: dict[str, str], pods: list[client.V1Pod] | None = None) -> Recorded:
        env = [client.V1EnvVar(name=name, value=value) for name, value in settings.items()]
        container = SimpleNamespace(env=env, image=IMAGE)
        template = SimpleNamespace(spec=SimpleNamespace(containers=[container]))
        self.__dict__["operator"] = SimpleNamespace(
            spec=SimpleNamespace(template=template, replicas=1), status=SimpleNamespace(ready_replicas=1)
        )
        self.asked: list[tuple[str, Any]] = []
        self.pods = pods or []
        return self

    def api(self, name: str) -> Any:
        calls = (
            "create_self_subject_access_review create_subject_access_review create_namespaced_pod read_namespaced_pod "
            "read_namespaced_pod_log delete_namespaced_pod"
        )
        return SimpleNamespace(**{call: call for call in calls.split()})

    def ask(self, call: Any, *arguments: Any, **more: Any) -> Any:
        self.asked.append((call, arguments[-1]))
        if call == "read_namespaced_pod":
            return self.pods.pop(0)
        return "" if call.endswith("log") else SimpleNamespace(status=SimpleNamespace(allowed=True))


def examined(settings: dict[str, str], pods: list[client.V1Pod] | None = None, namespace: str = "team") -> Recorded:
    return Recorded(NamedCluster("here", namespace, None), "muster-system").prepare(settings, pods)


@pytest.mark.parametrize("only", ["", "team"])
def test_an_operator_of_one_namespace_needs_its_rights_there_alone(only: str) -> None:
    """It was asked for them in the whole cluster, where a Role gives none."""
    here = examined({"MUSTER_OPERATOR_WATCH_NAMESPACE": only})
    ((state, message),) = operator_rights(here)
    assert (state, message.endswith(" in namespace team")) == ("ok", bool(only))
    asked = [body["spec"]["resourceAttributes"] for _, body in here.asked]
    assert len(asked) == len(OPERATOR_RIGHTS)
    assert {each.get("namespace", "") for each in asked if each["resource"] != "nodes"} == {only}
    assert {each.get("namespace", "") for each in asked if each["resource"] == "nodes"} == {""}, "nodes have none"


def test_jobs_in_a_namespace_that_nobody_serves_are_told() -> None:
    told = list(_operator(examined({"MUSTER_OPERATOR_WATCH_NAMESPACE": "team"}, namespace="other")))
    assert told[0] == (
        "failure",
        "the operator serves namespace team alone, not other",
        "submit to it: --namespace team",
    )
    assert [line[0] for line in _operator(examined({"MUSTER_OPERATOR_WATCH_NAMESPACE": "team"}))] == ["ok"]


class Leased(ExaminedCluster):
    """A cluster whose operator's lease is each of these in turn: (who holds it, how many seconds ago he renewed it)."""

    def prepare(self, *leases: tuple[str, float | None] | None) -> Leased:
        self.leases = list(leases)
        return self

    def api(self, name: str) -> Any:
        return SimpleNamespace(read_namespaced_lease=name)

    def find(self, call: Any, *arguments: Any) -> Any:
        assert (call, arguments) == ("CoordinationV1Api", ("muster-operator", "muster-system"))
        lease = self.leases.pop(0)
        if lease is None:
            return None
        renewed = None if lease[1] is None else datetime.now(UTC) - timedelta(seconds=lease[1])
        return client.V1Lease(spec=client.V1LeaseSpec(holder_identity=lease[0], renew_time=renewed))


@pytest.mark.parametrize(
    ("leases", "state", "words"),
    [
        ([("operator-a", 2.0)], "ok", "operator-a leads"),
        ([("operator-a", 3600.0), ("operator-a", 3590.0)], "ok", "operator-a leads"),  # a clock that is an hour off
        ([None], "failure", "no operator holds the lease"),
        ([("", 5.0)], "failure", "no operator holds the lease"),
        ([("operator-a", None)], "failure", "no operator holds the lease"),
        ([("operator-a", 300.0), None], "failure", "the operator's lease was last renewed at "),
    ],
    ids=["leads", "another clock", "none yet", "released", "never renewed", "silent"],
)
def test_it_asks_for_the_leader_and_not_only_for_ready_pods(
    leases: list[tuple[str, float] | None], state: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of two operators were ready, and none of them could speak to the API server."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    ((found, message, *next_step),) = _leader(
        Leased(NamedCluster("here", "team", None), "muster-system").prepare(*leases)
    )
    assert (found, message[: len(words)]) == (state, words)
    assert state == "ok" or next_step == [
        "kubectl -n muster-system logs -l app.kubernetes.io/component=operator --tail=20"
    ]


class Classes(ExaminedCluster):
    """No default storage class, and an API with or without a database."""

    def prepare(self, database: bool) -> Classes:
        env = [client.V1EnvVar(name="MUSTER_API_DATABASE_URL")] if database else []
        template = SimpleNamespace(spec=SimpleNamespace(containers=[SimpleNamespace(env=env)]))
        self.deployment = SimpleNamespace(spec=SimpleNamespace(template=template))
        return self

    def api(self, name: str) -> Any:
        return SimpleNamespace(list_storage_class="classes", read_namespaced_deployment="deployment")

    def ask(self, call: Any, *arguments: Any, **more: Any) -> Any:
        plain = SimpleNamespace(metadata=SimpleNamespace(name="slow", annotations=None))
        return SimpleNamespace(items=[plain]) if call == "classes" else self.deployment


def test_a_storage_class_is_missed_where_a_volume_needs_it_and_by_the_charts_own_key() -> None:
    cluster = NamedCluster("here", "team", None)
    ((state, told),) = _storage_class(Classes(cluster, "muster-system").prepare(database=True))
    assert (state, told) == ("ok", "none is the default, and the API keeps its history in a database")
    ((state, told, next_step),) = _storage_class(Classes(cluster, "muster-system").prepare(database=False))
    assert (state, told) == ("warning", "none of 1 storage classes is the default")
    values = yaml.safe_load((Path(__file__).parents[3] / "helm/muster/values.yaml").read_text())
    key = next(word for word in next_step.split() if word.startswith("api.persistence."))
    assert key.removeprefix("api.persistence.") in values["api"]["persistence"], "a key that the chart has"


def test_a_pod_that_can_not_start_is_not_waited_for_and_is_removed() -> None:
    here = examined(SETTINGS, [seen("Pending"), seen("Pending", ("ImagePullBackOff", ""))])
    ((state, *_),) = checkpoint_store(here)
    assert state == "failure"
    assert [call for call, _ in here.asked if "log" not in call] == [
        "create_namespaced_pod", "read_namespaced_pod", "read_namespaced_pod", "delete_namespaced_pod"
    ]  # fmt: skip
    assert here.asked[-1][1] == here.asked[1][1], "the same pod"


def test_the_roles_of_the_chart_have_every_right_that_is_asked_for() -> None:
    roles = (Path(__file__).parents[3] / "helm/muster/templates/operator-rbac.yaml").read_text()
    for right in OPERATOR_RIGHTS:
        assert right.resource in roles, right


FACTS = {"torch": "2.13.0", "built_for": "CUDA 13.0", "driver": "580.65.06", "count": 8, "words": "", "visible": None}


@pytest.mark.parametrize(
    ("facts", "state", "words", "step"),
    [
        ({}, "ok", "2.13.0 for CUDA 13.0; it sees 8 GPUs", ""),
        (
            {"torch": "2.13.0+cpu", "built_for": "", "count": 0},
            "failure",
            "was built without CUDA",
            "a torch with CUDA",
        ),
        (
            {"driver": "550.54.14", "count": 0},
            "failure",
            "needs driver 580; this one is 550.54.14",
            "driver 580 or newer",
        ),
        ({"built_for": "CUDA 12.8", "driver": "550.54.14"}, "ok", "2.13.0 for CUDA 12.8", ""),
        ({"count": 0, "words": "CUDA unknown error"}, "failure", "sees 0 of 8 GPUs (CUDA unknown error)", "nvidia-smi"),
        ({"count": 2, "visible": "0,1"}, "warning", "sees 2 of 8 GPUs", "CUDA_VISIBLE_DEVICES=0,1 hides some"),
    ],
)
def test_torch_is_held_against_the_driver(facts: dict[str, Any], state: str, words: str, step: str) -> None:
    found = torch_against_driver(FACTS | facts, 8)
    assert found[0] == state
    assert words in found[1]
    assert step in found[2]


def test_a_machine_without_a_cluster_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.local.gpus.gpu_count", lambda: 0)
    monkeypatch.setattr("muster.local.gpus.driver_version", lambda: "")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = {
            each.check: each for each in examine_machine(ExaminedMachine(StateFolder(tmp_path / "new" / "state"), port))
        }
    assert list(found) == ["python", "packages", "gpus", "torch", "disk", "port", "shared memory", "isolation of jobs"]
    assert (found["python"].state, found["packages"].state, found["gpus"].state) == ("ok", "ok", "ok")
    assert f"free for {tmp_path}/new/state" in found["disk"].message
    assert (found["port"].state, found["port"].next_step) == ("warning", f"muster up --port {port + 1}")
    assert not (tmp_path / "new").exists()
