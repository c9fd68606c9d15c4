"""What a job says of its pods reaches each of them, and never in the way of what Muster itself decides."""

from typing import Any

import pytest
from tests.unit.kubernetes.making import job_item, make_job

from muster.operator.core.decision import CreateWorker
from muster.operator.kubernetes.jobs import CachedJob, JobStore
from muster.operator.kubernetes.render import DiskLimits, SiteSettings, pin, render_pod, require_node_affinity
from muster.operator.kubernetes.settings import TOLERATIONS
from muster.recipe.document import JobSpec
from muster.storage.settings import S3Settings
from muster.words.gang import Resources
from muster.words.names import Env, WorkerId

SITE = SiteSettings(image="trainer", tolerations=TOLERATIONS, image_pull_secrets=("ours",))
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
SSD = {"key": "disk", "operator": "In", "values": ["ssd"]}
HDD = {"key": "disk", "operator": "In", "values": ["hdd"]}
STARTING = {"phase": "Starting", "attempt": 1, "gang": {"wanted": 2, "nodes": []}}


def starting(gang: dict[str, Any] | None = None, **runtime: Any) -> CachedJob:
    whole = {"nodes": 2, "gpusPerNode": 8} | (gang or {})
    return make_job(STARTING, gang=whole, runtime={"image": "trainer"} | runtime)


def rendered(job: CachedJob) -> dict[str, Any]:
    return render_pod(job, CreateWorker(WorkerId(1, 0), "", ("", ""), 0), SITE, "builtin")


def placed(job: CachedJob) -> dict[str, Any]:
    """By a scheduler that chooses the nodes itself."""
    pod = rendered(job)
    require_node_affinity(pod, job, 0.0)
    affinity: dict[str, Any] = pod["spec"].get("affinity", {})
    return affinity


def test_all_that_a_job_says_of_its_pods_is_in_them() -> None:
    pod = rendered(
        starting(
            nodeSelector={"disk": "ssd"},
            tolerations=[{"key": "dedicated", "value": "training", "effect": "NoSchedule"}],
            labels={"team": "nlp"},
            annotations={"example.com/cost": "a b"},
            imagePullSecrets=["mine", "ours"],
        )
    )
    assert pod["spec"]["nodeSelector"] == {"disk": "ssd"}
    assert pod["spec"]["tolerations"][-1] == {
        "key": "dedicated",
        "operator": "Equal",
        "value": "training",
        "effect": "NoSchedule",
    }
    assert [entry["key"] for entry in pod["spec"]["tolerations"][:-1]] == ["nvidia.com/gpu", "vpc.amazonaws.com/efa"]
    assert pod["metadata"]["labels"].items() >= {"team": "nlp", "muster.dev/job": "llama"}.items()
    assert pod["metadata"]["annotations"].items() >= {"example.com/cost": "a b"}.items()
    assert pod["spec"]["imagePullSecrets"] == [{"name": "mine"}, {"name": "ours"}]


def test_a_job_that_says_nothing_has_pods_as_before() -> None:
    assert not {"nodeSelector", "affinity"} & rendered(starting()).get("spec", {}).keys()


@pytest.mark.parametrize(("share", "apart"), [(False, True), (True, False)])
def test_one_worker_on_each_node_whoever_chooses_the_nodes(share: bool, apart: bool) -> None:
    affinity = placed(starting({"shareNodes": share}))
    assert ("podAntiAffinity" in affinity) is apart
    if apart:
        (term,) = affinity["podAntiAffinity"][REQUIRED]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        # The same in every attempt: Kueue takes no other pod into the group that it admitted.
        assert term["labelSelector"]["matchLabels"].keys() == {"muster.dev/job-uid"}


def test_the_jobs_affinity_and_ours_hold_together() -> None:
    terms = {"nodeSelectorTerms": [{"matchExpressions": [SSD]}, {"matchExpressions": [HDD]}]}
    job = starting({"instanceTypes": ["p5.48xlarge"]}, affinity={"nodeAffinity": {REQUIRED: terms}})
    found = placed(job)["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    ours = {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": ["p5.48xlarge"]}
    assert found == [{"matchExpressions": [SSD, ours]}, {"matchExpressions": [HDD, ours]}]


def test_a_pod_whose_node_is_chosen_goes_nowhere_else() -> None:
    terms = {"nodeSelectorTerms": [{"matchExpressions": [SSD]}]}
    pod = rendered(starting(affinity={"nodeAffinity": {REQUIRED: terms}}))
    pin(pod, "node-7")
    (term,) = pod["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-7"]}]}


def test_a_jobs_own_key_encrypts_its_commits_in_place_of_the_platforms() -> None:
    site = SiteSettings(image="trainer", s3={Env.S3_KMS_KEY: "alias/platform"})
    for given, key in (({}, "alias/platform"), ({"kmsKeyId": "alias/nlp"}, "alias/nlp")):
        job = make_job(STARTING, checkpoint={"uri": "s3://ckpt/nlp", **given})
        (container,) = render_pod(job, CreateWorker(WorkerId(1, 0), "", ("", ""), 0), site, "builtin")["spec"][
            "containers"
        ]
        variables = {each["name"]: each.get("value", "") for each in container["env"]}
        assert S3Settings.from_environment(variables).kms_key_id == key


def test_the_installations_variables_come_before_the_jobs_own_which_win() -> None:
    site = SiteSettings(image="trainer", env_from=({"secretRef": {"name": "s3"}},))
    job = starting(envFrom=[{"secretRef": {"name": "hub"}}])
    (container,) = render_pod(job, CreateWorker(WorkerId(1, 0), "", ("", ""), 0), site, "builtin")["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "s3"}}, {"secretRef": {"name": "hub"}}]


def test_a_job_that_asks_for_no_resources_has_the_installations_everywhere() -> None:
    """Without any its pod is BestEffort, the first to be evicted."""
    jobs = JobStore(lambda uid: None, JobSpec, Resources.model_validate({"cpu": "500m", "memory": "2Gi"}))
    item = job_item()
    item["spec"]["gang"].pop("resources", None)
    job = jobs.keep(item)
    assert (job.spec.gang.resources.cpu, job.spec.gang.resources.memory) == ("500m", "2Gi"), "placement counts it too"
    item = job_item()
    item["metadata"] |= {"uid": "other"}
    item["spec"]["gang"]["resources"] = {"cpu": 4}
    own = jobs.keep(item).spec.gang.resources
    assert (own.cpu, own.memory) == ("4", "2Gi")
    untouched = JobStore(lambda uid: None, JobSpec).keep(item).spec.gang.resources
    assert (untouched.cpu, untouched.memory) == ("4", None)


@pytest.mark.parametrize("gpus", [0, 8], ids=["cpu", "with a preflight"])
def test_a_worker_writes_to_its_volumes_alone_and_no_more_than_they_hold(gpus: int) -> None:
    site = SiteSettings(image="trainer", disk=DiskLimits(tmp="1Gi", worker="2Gi", cache="3Gi"))
    pod = render_pod(starting({"gpusPerNode": gpus}), CreateWorker(WorkerId(1, 0), "", ("", ""), 0), site, "builtin")[
        "spec"
    ]
    sizes = {volume["name"]: volume["emptyDir"].get("sizeLimit") for volume in pod["volumes"] if "emptyDir" in volume}
    assert {"muster-tmp": "1Gi", "worker": "2Gi", "cache": "3Gi"}.items() <= sizes.items()
    containers = [*pod["containers"], *pod.get("initContainers", [])]
    assert len(containers) == (2 if gpus else 1)
    for container in containers:
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert {"/tmp", "/muster/worker", "/muster/cache"} <= {each["mountPath"] for each in container["volumeMounts"]}


@pytest.mark.parametrize("path", ["/tmp", "/tmp/"])
def test_a_job_may_bring_its_own_folder_for_temporary_files_and_its_image_be_let_write(path: str) -> None:
    job = starting(volumes=[{"name": "scratch", "emptyDir": {}, "mountPath": path}])
    (container,) = rendered(job)["spec"]["containers"]
    mounts = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"].rstrip("/") == "/tmp"]
    assert mounts == ["scratch"], "two volumes at one path are refused by the API server"
    site = SiteSettings(image="trainer", read_only_root=False, disk=DiskLimits(tmp=None, worker=None))
    pod = render_pod(starting(), CreateWorker(WorkerId(1, 0), "", ("", ""), 0), site, "builtin")["spec"]
    assert "readOnlyRootFilesystem" not in pod["containers"][0]["securityContext"]
    assert [v["emptyDir"] for v in pod["volumes"] if v["name"] in ("worker", "cache", "muster-tmp")] == [{}, {}, {}]
