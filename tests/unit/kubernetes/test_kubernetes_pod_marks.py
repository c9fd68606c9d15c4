"""What a job says of its pods reaches each of them, and never in the way of what Muster itself decides."""

from typing import Any

import pytest
from tests.unit.kubernetes.making import make_job

from muster.contract.names import Env
from muster.operator.core.decision import CreateWorker
from muster.operator.kubernetes.jobs import Job
from muster.operator.kubernetes.render import Site, pin, render_pod, require_node_affinity
from muster.operator.kubernetes.settings import TOLERATIONS
from muster.storage.settings import S3Settings

SITE = Site(image="trainer", tolerations=TOLERATIONS, image_pull_secrets=("ours",))
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
SSD = {"key": "disk", "operator": "In", "values": ["ssd"]}
HDD = {"key": "disk", "operator": "In", "values": ["hdd"]}
STARTING = {"phase": "Starting", "attempt": 1, "gang": {"wanted": 2, "nodes": []}}


def starting(gang: dict[str, Any] | None = None, **runtime: Any) -> Job:
    whole = {"nodes": 2, "gpusPerNode": 8} | (gang or {})
    return make_job(STARTING, gang=whole, runtime={"image": "trainer"} | runtime)


def rendered(job: Job) -> dict[str, Any]:
    return render_pod(job, CreateWorker(1, 0, "", ("", ""), 0), SITE, "builtin")


def placed(job: Job) -> dict[str, Any]:
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
    site = Site(image="trainer", s3={Env.S3_KMS_KEY: "alias/platform"})
    for given, key in (({}, "alias/platform"), ({"kmsKeyId": "alias/nlp"}, "alias/nlp")):
        job = make_job(STARTING, checkpoint={"uri": "s3://ckpt/nlp", **given})
        (container,) = render_pod(job, CreateWorker(1, 0, "", ("", ""), 0), site, "builtin")["spec"]["containers"]
        variables = {each["name"]: each.get("value", "") for each in container["env"]}
        assert S3Settings.from_environment(variables).kms_key_id == key
