"""The pods that a job becomes, as golden files: a person should see each change of them.

To write them anew: `WRITE_GOLDEN=1 pytest tests/contract/test_kubernetes_manifests.py`.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.kubernetes.making import make_job

from muster.operator.core.decision import CreateWorker
from muster.operator.kubernetes.companions import claim_template, fence_binding, network_policy, service
from muster.operator.kubernetes.gangs.choice import all_gangs, gang_ref
from muster.operator.kubernetes.gangs.protocol import UnservedApi
from muster.operator.kubernetes.jobs import CachedJob
from muster.operator.kubernetes.render import SiteSettings, UnrenderableJob, pin, render_pod
from muster.words.names import WorkerId

GOLDEN = Path(__file__).parent / "golden"
# conftest takes MUSTER_ variables out of the environment, so the wish to write has a name of its own.
WRITE = bool(os.environ.get("WRITE_GOLDEN"))
SITE = SiteSettings(image="")
STATUS = {"phase": "Starting", "attempt": 3, "reservation": 4, "gang": {"wanted": 2, "nodes": ["a", "b"]}}
ACTION = CreateWorker(WorkerId(3, 1), node="b", nodes=("a", "b"), resume_step=1200)
GANGS = all_gangs("v1beta2", "v1alpha2")
GPUS = {"nodes": 2, "gpusPerNode": 8, "resources": {"cpu": 90, "memory": "900Gi"}}


def compare(name: str, *documents: object) -> None:
    text = yaml.safe_dump_all(documents, sort_keys=False, width=120)
    path = GOLDEN / name
    if WRITE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("kind", list(GANGS))
def test_a_gpu_worker_of_each_gang_scheduler(kind: str) -> None:
    gang = GANGS[kind]
    topology = {"required": "topology.k8s.aws/network-node-layer-2"}
    job = make_job(STATUS, gang=GPUS | {"scheduler": {"kind": kind, "queue": "research"}, "topology": topology})
    pod = render_pod(job, ACTION, SITE, kind, "p5.48xlarge")
    if gang.places:
        pin(pod, ACTION.node)
    gang.decorate(pod, gang_ref(job))
    compare(f"gpu-{kind}.yaml", *(item.body for item in gang.objects(gang_ref(job))), pod)


def test_a_cpu_worker_with_all_that_a_job_can_say() -> None:
    job = make_job(
        STATUS,
        gang={"nodes": 2, "processesPerNode": 2, "resources": {"cpu": 4, "memory": "8Gi"}},
        runtime={
            "image": "registry.example/own:2",
            "env": [
                {"name": "HF_HOME", "value": "/mnt/models"},
                {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "value"}}},
            ],
            "envFrom": [{"secretRef": {"name": "hub"}}],
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}, "readOnly": True}],
            "serviceAccountName": "training",
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"key": "dedicated", "value": "training", "effect": "NoSchedule"}],
            "labels": {"team": "nlp"},
            "annotations": {"example.com/cost": "1"},
            "imagePullSecrets": ["registry"],
        },
        priorityClassName="research",
    )
    site = SiteSettings(
        image="", report_from=({"podSelector": {"matchLabels": {"app": "watcher"}}},), fence_audience="fence"
    )
    beside = service(job.namespace), fence_binding(job.namespace, site.account(job), False), network_policy(job, site)
    compare("cpu.yaml", *beside, render_pod(job, ACTION, site, "builtin"))


def test_a_worker_whose_devices_are_claimed() -> None:
    classes = {"gpus": "gpu.nvidia.com", "efa": "efa.networking.k8s.aws"}
    job = make_job(STATUS, gang=GPUS | {"deviceClasses": classes})
    compare("gpu-claimed.yaml", claim_template(job), render_pod(job, ACTION, SITE, "builtin", "p6-b200.48xlarge"))


def test_devices_of_plugins_are_not_claimed() -> None:
    assert claim_template(make_job(STATUS, gang=GPUS)) is None


@pytest.mark.parametrize("version", ["v1alpha1", "v1beta1"])
def test_other_versions_of_the_workload_api(version: str) -> None:
    gang = all_gangs(None, version)["workload"]
    job = make_job(STATUS)
    pod: dict[str, Any] = {"metadata": {}, "spec": {}}
    gang.decorate(pod, gang_ref(job))
    compare(f"workload-{version}.yaml", *(item.body for item in gang.objects(gang_ref(job))), pod)


def test_a_group_is_named_after_what_holds_its_nodes() -> None:
    """Not after the attempt: a partial restart stays in its group; a new request for nodes is a new group."""
    first, again = make_job(STATUS), make_job(STATUS | {"attempt": 4})
    later = make_job(STATUS | {"attempt": 4, "reservation": 5})
    assert gang_ref(first).group == gang_ref(again).group == "llama-r4"
    assert gang_ref(later).group == "llama-r5"


@pytest.mark.parametrize("kind", list(GANGS))
def test_a_group_asks_for_all_its_workers(kind: str) -> None:
    job = make_job(STATUS, gang=GPUS | {"scheduler": {"kind": kind, "queue": "research"}})
    pod = render_pod(job, ACTION, SITE, kind)
    GANGS[kind].decorate(pod, gang_ref(job))
    objects = yaml.safe_dump([item.body for item in GANGS[kind].objects(gang_ref(job))])
    counted = {
        "builtin": GANGS[kind].gate == "muster.dev/gang",  # it holds nodes for all of them before it makes one
        "kueue": pod["metadata"]["annotations"].get("kueue.x-k8s.io/pod-group-total-count") == "2",
        "workload": "minCount: 2" in objects,
    }
    assert counted.get(kind, "minMember: 2" in objects)


def test_rendering_again_makes_the_same_pod() -> None:
    job = make_job(STATUS)
    assert render_pod(job, ACTION, SITE, "builtin") == render_pod(job, ACTION, SITE, "builtin")


def test_user_values_win_over_the_network_table_and_are_noted() -> None:
    job = make_job(STATUS, gang=GPUS | {"network": {"nccl": {"NCCL_SOCKET_IFNAME": "eth0"}}})
    pod = render_pod(job, ACTION, SITE, "builtin", "p5en.48xlarge")
    environment = {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]}
    assert environment["NCCL_SOCKET_IFNAME"] == "eth0"
    assert pod["metadata"]["annotations"]["muster.dev/overrides"] == (
        "NCCL_SOCKET_IFNAME=eth0 instead of ^docker,lo,veth"
    )
    assert pod["spec"]["containers"][0]["resources"]["limits"]["vpc.amazonaws.com/efa"] == "16"


def test_efa_can_be_refused() -> None:
    job = make_job(STATUS, gang=GPUS | {"network": {"efa": "off"}})
    pod = render_pod(job, ACTION, SITE, "builtin", "p5.48xlarge")
    assert "vpc.amazonaws.com/efa" not in pod["spec"]["containers"][0]["resources"]["limits"]
    assert pod["spec"]["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"runtime": {}}, "spec.runtime.image: is not set"),
        ({"checkpoint": {}}, "spec.checkpoint.uri: is not set"),
        ({"runtime": {"image": "x", "volumes": [{"name": "shm", "emptyDir": {}}]}}, "spec.runtime.volumes[0].name"),
    ],
)
def test_what_can_not_become_a_pod_is_named_with_its_path(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(UnrenderableJob) as refused:
        render_pod(make_job(STATUS, **spec), ACTION, SITE, "builtin")
    assert words in str(refused.value)


@pytest.mark.parametrize("kind", ["kueue", "workload"])
def test_a_scheduler_that_is_not_served_is_refused(kind: str) -> None:
    with pytest.raises(UnservedApi):
        all_gangs(None, None)[kind].objects(gang_ref(make_job(STATUS)))


def program_job(**spec: Any) -> CachedJob:
    program = {
        "command": ["train.py", "--config", "a.yaml"],
        "source": "s3://files/0123.tar.gz",
        "inputs": {"base": {"uri": "s3://ckpt/team-nlp/0f3c", "step": 20}},
    }
    env = [{"name": "HF_TOKEN", "value": "hf"}, {"name": "PYTHONPATH", "value": "/workspace"}]
    mine = {"image": "registry.example/own:2", "env": env, "envFrom": [{"secretRef": {"name": "hub"}}]}
    checkpoint = {"uri": "s3://ckpt/team-nlp", "folder": "out"}
    changes = {"program": program, "runtime": mine, "checkpoint": checkpoint, "gang": GPUS} | spec
    return make_job(STATUS, training=None, **changes)


PROGRAM_SITE = SiteSettings(
    image="registry.example/muster-trainer:1",
    s3={"AWS_ENDPOINT_URL": "http://s3.platform"},
    env_from=({"secretRef": {"name": "platform-store"}},),
)


def test_a_worker_that_runs_a_program_in_an_image_of_its_own() -> None:
    compare("program.yaml", render_pod(program_job(), ACTION, PROGRAM_SITE, "builtin", "p5.48xlarge"))


def test_a_program_gets_no_credentials_of_the_store_and_may_not_write_what_it_is_given() -> None:
    pod = render_pod(program_job(), ACTION, PROGRAM_SITE, "builtin", "p5.48xlarge")["spec"]
    (main,), helpers = pod["containers"], {each["name"]: each for each in pod["initContainers"]}
    assert list(helpers) == ["preflight", "prepare", "keeper"]
    assert [each["image"] for each in helpers.values()] == [PROGRAM_SITE.image] * 3
    assert helpers["keeper"]["restartPolicy"] == "Always"
    names = {name: {variable["name"] for variable in each["env"]} for name, each in (helpers | {"main": main}).items()}
    assert "AWS_ENDPOINT_URL" in names["keeper"] & names["prepare"]
    assert "AWS_ENDPOINT_URL" not in names["main"]
    assert main["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert "PYTHONPATH" in names["main"]
    assert "PYTHONPATH" not in names["keeper"] | names["prepare"] | names["preflight"]
    assert "HF_TOKEN" in names["prepare"]
    read_only = {mount["mountPath"] for mount in main["volumeMounts"] if mount.get("readOnly")}
    assert {"/muster/launcher", "/muster/worker/source", "/muster/worker/inputs"} <= read_only
    assert not any("subPath" in mount for each in helpers.values() for mount in each["volumeMounts"])
    for name in ("prepare", "keeper"):
        paths = {mount["mountPath"]: mount.get("readOnly", False) for mount in helpers[name]["volumeMounts"]}
        assert not paths["/muster/worker"]
        assert not paths["/muster/launcher"]
        assert "/muster/worker/source" not in paths
        assert "nvidia.com/gpu" not in str(helpers[name]["resources"])
    for container in (main, *helpers.values()):
        security = container["securityContext"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"]["drop"] == ["ALL"]
        assert security["readOnlyRootFilesystem"]


def test_a_program_needs_the_clusters_own_trainer_image_too() -> None:
    with pytest.raises(UnrenderableJob, match="needs the cluster's trainer image in addition"):
        render_pod(program_job(), ACTION, SITE, "builtin")
