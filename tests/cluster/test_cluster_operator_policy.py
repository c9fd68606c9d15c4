"""A stolen token of the operator is not the cluster's: its own account makes and changes workers alone."""

import copy
import json
from typing import Any

import pytest
from tests.cluster.house import House
from tests.cluster.official import Object
from tests.polling import eventually
from tests.unit.kubernetes.making import make_job

from muster.operator.core.decision import CreateWorker
from muster.operator.kubernetes.companions import fence_binding, network_policy, service
from muster.operator.kubernetes.jobs import CachedJob
from muster.operator.kubernetes.render import SiteSettings, render_pod
from muster.words.names import Label, WorkerId

OPERATOR = "--as=system:serviceaccount:muster-system:muster-operator"
SITE = SiteSettings(image="trainer", preflight=True, report_from=({"namespaceSelector": {}},))
STARTING = {"phase": "Starting", "attempt": 1, "gang": {"wanted": 2, "nodes": []}}
# Huge pages and EFA's interfaces, and with them the capability IPC_LOCK.
JOB = make_job(STARTING, gang={"nodes": 2, "gpusPerNode": 8, "instanceTypes": ["p5.48xlarge"],
                               "resources": {"cpu": "8", "memory": "64Gi"}})  # fmt: skip
ON_CPUS = make_job(STARTING, gang={"nodes": 2})  # which a restricted namespace admits
HERE = "guarded"
REFUSED = "ValidatingAdmissionPolicy 'muster-operator-"


def in_namespace(item: Object, namespace: str = HERE) -> Object:
    return item | {"metadata": item["metadata"] | {"namespace": namespace}}


def pod(job: CachedJob = JOB, **spec: Any) -> Object:
    """As the operator makes one; `spec` replaces parts of it."""
    made = in_namespace(render_pod(job, CreateWorker(WorkerId(1, 0), "", ("", ""), 0), SITE, "builtin", "p5.48xlarge"))
    return copy.deepcopy(made | {"spec": made["spec"] | spec})


def with_container(**parts: Any) -> Object:
    made = pod()
    (container,) = made["spec"]["containers"]
    container["securityContext"] = container["securityContext"] | parts
    return made


def not_owned(item: Object, owners: list[Object] | None = None) -> Object:
    return item | {"metadata": item["metadata"] | {"ownerReferences": owners or []}}


@pytest.fixture(scope="module")
def guarded(house: House) -> House:
    """A namespace without a Pod Security Standard, so that the policies alone refuse."""
    house.kubectl("create", "namespace", HERE, check=False)

    def hold() -> bool:
        for item in (not_owned(pod()), service("kube-system")):
            found = answer(house, item)
            assert REFUSED in found, found
        return True

    eventually(hold, "the policies to hold")
    return house


def answer(house: House, item: Object) -> str:
    """The API server's, to a dry run in the operator's name."""
    return house.kubectl("create", "--dry-run=server", "-f", "-", OPERATOR, given=json.dumps(item), check=False)


def test_all_that_the_operator_makes_for_a_job_passes(guarded: House) -> None:
    policy = network_policy(JOB, SITE)
    assert policy is not None
    first = pod()
    assert first["spec"]["initContainers"][0]["name"] == "preflight"
    assert first["spec"]["containers"][0]["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    for item in (first, service(HERE), in_namespace(policy), fence_binding(HERE, "default", namespaced=False)):
        assert "created (server dry run)" in answer(guarded, item), item["kind"]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        pytest.param(not_owned(pod()), "pods of TrainingJobs alone", id="nobody's"),
        pytest.param(
            not_owned(pod(), [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "x", "uid": "y"}]),
            "pods of TrainingJobs alone", id="a ReplicaSet's",
        ),
        pytest.param(in_namespace(pod(), "kube-system"), "Kubernetes' own namespaces", id="in kube-system"),
        pytest.param(in_namespace(pod(ON_CPUS), "muster-system"), "the release's", id="in the release's namespace"),
        pytest.param(pod(hostPID=True), "neither its processes", id="host's processes"),
        pytest.param(pod(hostIPC=True), "neither its processes", id="host's IPC"),
        pytest.param(pod(hostNetwork=True), "its node's network", id="host's network"),
        pytest.param(pod(volumes=[{"name": "x", "hostPath": {"path": "/"}}], containers=[{"name": "x", "image": "x"}],
                         initContainers=[]), "mounts nothing of its node", id="host's files"),
        pytest.param(with_container(capabilities={"add": ["SYS_ADMIN"]}), "no capability", id="a capability"),
        pytest.param(with_container(runAsNonRoot=False), "not root", id="root by its container"),
        pytest.param(pod(securityContext={"runAsUser": 0}), "not root", id="root"),
        pytest.param(pod(automountServiceAccountToken=True), "no token", id="its account's token"),
        pytest.param(service("kube-system"), "Kubernetes' own namespaces", id="a service in kube-system"),
        pytest.param(
            service(HERE) | {"spec": service(HERE)["spec"] | {"clusterIP": None, "externalIPs": ["10.96.0.1"]}},
            "one service in a namespace", id="a service with an address of others",
        ),
        pytest.param(fence_binding("muster-system", "default", False), "the release's", id="a binding of our own"),
        pytest.param(
            fence_binding(HERE, "default", False) | {"subjects": [{"kind": "User", "name": "mallory",
                                                                    "apiGroup": "rbac.authorization.k8s.io"}]},
            "to service accounts of the namespace", id="a binding of a user",
        ),
        pytest.param(
            not_owned(in_namespace(network_policy(JOB, SITE) or {})), "one TrainingJob", id="a policy that nobody owns"
        ),
    ],
)  # fmt: skip
def test_what_a_stolen_token_would_want_is_refused(guarded: House, item: Object, words: str) -> None:
    found = answer(guarded, item)
    assert REFUSED in found, found
    assert words in found


def test_pods_of_others_are_neither_changed_nor_deleted(guarded: House) -> None:
    """Another image in a privileged pod of somebody else would be as good as a pod of one's own."""
    theirs = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "theirs", "namespace": HERE},
              "spec": {"containers": [{"name": "main", "image": "theirs"}]}}  # fmt: skip
    guarded.kubectl("create", "-f", "-", given=json.dumps(theirs))
    patch = json.dumps({"spec": {"containers": [{"name": "main", "image": "evil"}]}})
    adopt = json.dumps({"metadata": {"ownerReferences": pod()["metadata"]["ownerReferences"]}})
    try:
        for change in (patch, adopt):
            found = guarded.kubectl("patch", "pod", "theirs", "-n", HERE, "-p", change, OPERATOR, check=False)
            assert "pods of TrainingJobs alone" in found, found
        for words in (["theirs"], ["--all"]):
            found = guarded.kubectl("delete", "pod", *words, "-n", HERE, OPERATOR, "--wait=false", check=False)
            assert "pods of TrainingJobs alone" in found, found
    finally:
        guarded.kubectl("delete", "pod", "theirs", "-n", HERE, "--force", "--wait=false")


def test_its_own_workers_are_changed_and_deleted(guarded: House) -> None:
    made = in_namespace(pod())
    # Its job is not there: without a finalizer the garbage collector could delete it before we have looked.
    made["metadata"] = made["metadata"] | {"finalizers": ["muster.dev/test"]}
    guarded.kubectl("create", "-f", "-", OPERATOR, given=json.dumps(made))
    place = ("pod", made["metadata"]["name"], "-n", HERE)
    label = json.dumps({"metadata": {"labels": {"note": "kept"}}})
    assert "patched" in guarded.kubectl("patch", *place, "-p", label, OPERATOR)
    selected = f"{Label.JOB_UID}={JOB.uid}"
    assert "deleted" in guarded.kubectl("delete", "pod", "-l", selected, "-n", HERE, OPERATOR, "--wait=false")
    assert "patched" in guarded.kubectl("patch", *place, "-p", '{"metadata": {"finalizers": null}}', OPERATOR)


def test_a_worker_that_was_let_in_earlier_may_go(guarded: House) -> None:
    """Before there were policies. Its finalizers are taken away and it is deleted, and it becomes nothing else."""
    volumes = [{"name": "x", "hostPath": {"path": "/"}}]
    made = pod(ON_CPUS, volumes=volumes, containers=[{"name": "x", "image": "x"}], initContainers=[])
    made["metadata"] = made["metadata"] | {"name": "earlier", "finalizers": ["kueue.x-k8s.io/managed"]}
    guarded.kubectl("create", "-f", "-", given=json.dumps(made))
    place = ("pod", "earlier", "-n", HERE)
    image = json.dumps({"spec": {"containers": [{"name": "x", "image": "evil"}]}})
    refused = guarded.kubectl("patch", *place, "-p", image, OPERATOR, check=False)
    assert "mounts nothing of its node" in refused, refused
    assert "deleted" in guarded.kubectl("delete", *place, OPERATOR, "--wait=false")
    free = json.dumps({"metadata": {"finalizers": None}})
    assert "patched" in guarded.kubectl("patch", *place, "-p", free, OPERATOR)
