"""What people and clusters get wrong: each is named where its author looks, and none stops the operator."""

from collections.abc import Iterator

import pytest
from tests.cluster.house import House, quick_job
from tests.cluster.official import Object, Refused
from tests.polling import eventually
from tests.unit.packaging.chart import Chart
from tests.unit.packaging.conftest import tool

from muster.kube import paths
from muster.kube.client import STRATEGIC
from muster.words.status import STATUS_VERSION


@pytest.fixture(scope="module")
def cluster(house: House) -> Iterator[House]:
    for index in range(4):
        house.node(f"input-{index}", {"node.kubernetes.io/instance-type": "input"})
    house.start_operator()
    yield house
    house.stop_operators()


def job(name: str, **changes: object) -> Object:
    return quick_job(name, gang={"instanceTypes": ["input"]}, **changes)


def told(house: House, name: str, words: str, namespace: str = "team") -> Object:
    """The status, once its reason has those words."""

    def look() -> Object | None:
        status = house.status(name, namespace)
        assert words in status.get("because", ""), status.get("because")
        return status

    return eventually(look, f"{name} to say {words!r}")


def cancel(house: House, name: str) -> None:
    house.change(name, {"cancel": True})
    house.reaches(name, "Cancelled")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gang": {"gpusPerNode": -1}}, "spec.gang.gpusPerNode: Invalid value: -1"),
        ({"gang": {"processesPerNode": 100_000}}, "spec.gang.processesPerNode: Invalid value: 100000"),
        ({"gang": {"nodes": 0}}, "spec.gang.nodes"),
        ({"gang": {"nodes": "four"}}, "spec.gang.nodes"),
        ({"gang": {"nodes": 1.5}}, "spec.gang.nodes"),
        ({"gang": {"nodes": []}}, "spec.gang.nodes"),
        ({"gang": {"nodes": {"min": 1}}}, "spec.gang.nodes.max"),
        ({"gang": {"nodes": {"min": 1, "max": "two"}}}, "spec.gang.nodes.max"),
        ({"gang": {"nodes": {"min": 1, "max": 2, "step": 1}}}, "spec.gang.nodes"),
        ({"gang": {"resources": {"memory": "1Gigs"}}}, "spec.gang.resources.memory"),
        ({"checkpoint": {"every": "ten minutes"}}, "spec.checkpoint.every"),
        ({"training": {"length": {"steps": 3, "epochs": 1}}}, "give exactly one of steps, tokens, epochs"),
        ({"gang": {"scheduler": {"kind": "slurm"}}}, 'spec.gang.scheduler.kind: Unsupported value: "slurm"'),
        ({"runtime": {"env": [{"name": "MUSTER_JOB", "value": "x"}]}}, "are set by Muster itself"),
        ({"program": {"command": ["train.py"]}}, "give exactly one of training (Muster's own trainer) and program"),
        ({"checkpoint": {"folder": "out"}}, "leave it out with training"),
    ],
)
def test_the_schema_refuses_with_the_path(cluster: House, change: dict[str, object], words: str) -> None:
    with pytest.raises(Refused) as refused:
        cluster.submit(quick_job("refused", **change))
    assert refused.value.status == 422
    assert words in refused.value.message


def test_a_job_is_a_training_or_a_program_for_good(cluster: House) -> None:
    document = quick_job("program")
    document["spec"].pop("training")
    with pytest.raises(Refused, match="give exactly one of training"):
        cluster.submit(document)
    document["spec"] |= {"program": {"command": []}, "gang": {"nodes": 1, "instanceTypes": ["none"]}}
    with pytest.raises(Refused, match=r"spec\.program\.command"):
        cluster.submit(document)
    document["spec"]["program"] = {
        "command": ["train.py"],
        "inputs": {"base": {"job": "a", "source": "s3://bucket/model"}},
    }
    with pytest.raises(Refused, match="name what it is by exactly one of job"):
        cluster.submit(document)
    document["spec"]["program"] = {
        "command": ["train.py"],
        "inputs": {"base": {"uri": "s3://bucket/uid", "step": "last"}},
    }
    cluster.submit(document)
    with pytest.raises(Refused, match="program is fixed at submission"):
        cluster.change("program", {"program": {"command": ["other.py"]}})
    with pytest.raises(Refused, match="fixed at submission"):
        cluster.change("program", {"program": None, "training": quick_job("other")["spec"]["training"]})
    cancel(cluster, "program")


def test_what_the_schema_can_not_weigh_up_the_operator_does(cluster: House) -> None:
    cluster.submit(quick_job("nobody", gang={"nodes": {"min": 2, "max": 1}}))
    assert "min 2 is greater than max 1" in cluster.reaches("nobody", "Failed")["because"]
    cluster.kubectl("delete", "tj", "-n", "team", "nobody", "--timeout=20s")


@pytest.mark.parametrize("nodes", [1, {"min": 1, "max": 2}])
def test_nodes_are_a_number_or_an_object(cluster: House, nodes: object) -> None:
    cluster.submit(quick_job("counted", gang={"nodes": nodes, "instanceTypes": ["none"]}))
    assert cluster.job("counted")["spec"]["gang"]["nodes"] == nodes
    cluster.kubectl("delete", "tj", "-n", "team", "counted", "--timeout=20s")


def test_a_batch_that_the_gang_can_not_divide_fails_with_its_path(cluster: House) -> None:
    cluster.submit(quick_job("odd", gang={"nodes": 3, "instanceTypes": ["input"]}))
    status = cluster.reaches("odd", "Failed")
    assert status["code"] == "InvalidSpec"
    assert "training.batch.tokensPerStep 128 can't be divided over 3 ranks" in status["because"]
    failed = next(condition for condition in status["conditions"] if condition["type"] == "Failed")
    assert failed["status"] == "True"
    events = cluster.kubectl("events", "-n", "team", "--for", "trainingjob/odd")
    assert "InvalidSpec" in events
    cluster.kubectl("delete", "tj", "-n", "team", "odd", "--timeout=20s")


def test_a_gang_larger_than_any_pool(cluster: House) -> None:
    cluster.submit(quick_job("huge", nodes=64, gang={"instanceTypes": ["input"]}))
    status = told(cluster, "huge", "gang needs 64 nodes with 1 CPU and 1 GiB each; the largest pool has 4 such nodes")
    assert (status["phase"], status["code"]) == ("Queued", "GangTooLarge")
    cancel(cluster, "huge")


def test_an_image_that_can_not_be_pulled(cluster: House) -> None:
    cluster.submit(job("unpulled", runtime={"image": "registry.example/none:1"}))
    told(cluster, "unpulled", 'ImagePullBackOff: Back-off pulling image "registry.example/none:1"')
    cancel(cluster, "unpulled")


def test_a_mistyped_image_is_the_users_error_and_frees_the_nodes(cluster: House) -> None:
    cluster.submit(job("mistyped", runtime={"image": "registry.example/mistyped:1"}))
    status = cluster.reaches("mistyped", "Failed", 90)
    assert status["restarts"]["byCause"] == {"user_error": 1}
    assert status["attempt"] == 1
    assert "registry.example/mistyped:1: not found; correct runtime.image" in status["because"]
    assert not status.get("nodeFaults"), "no node is charged"
    assert not status["gang"]["nodes"]
    assert "mistyped:1: not found" in cluster.kubectl("events", "-n", "team", "--for", "trainingjob/mistyped")


def test_a_sidecar_that_fails_is_a_warning_and_ends_no_gang(cluster: House) -> None:
    """As a webhook's log shipper would crash beside the trainer."""
    cluster.submit(job("meshed", steps=200))
    cluster.steps("meshed", 3)
    crashed = {"terminated": {"exitCode": 137, "reason": "Error"}}
    sidecar = {"name": "fluent-bit", "state": crashed, "ready": False, "restartCount": 0, "image": "x", "imageID": "x"}
    path = paths.core("team", "pods", "meshed-1-0")
    statuses = [sidecar, *cluster.get(path)["status"]["containerStatuses"]]
    cluster.do(cluster.kubelets.client.patch(f"{path}/status", {"status": {"containerStatuses": statuses}}, STRATEGIC))

    def warned() -> bool:
        found = {entry["type"]: entry for entry in cluster.status("meshed").get("conditions", ())}
        return "SidecarFailed" in found and "fluent-bit exited with 137" in found["SidecarFailed"]["message"]

    eventually(warned, "the condition", 60)
    status = cluster.reaches("meshed", "Succeeded")
    assert (status["attempt"], status["restarts"]["total"]) == (1, 0)


def test_a_missing_secret_is_waited_for(cluster: House) -> None:
    cluster.submit(job("secretive", steps=3, runtime={"envFrom": [{"secretRef": {"name": "keys"}}]}))
    told(cluster, "secretive", 'CreateContainerConfigError: secret "keys" not found')
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"KEY": "value"}}
    cluster.client.create(paths.core("team", "secrets"), secret)
    cluster.reaches("secretive", "Succeeded")


def test_a_service_account_that_comes_with_its_job_may_come_a_moment_later(cluster: House) -> None:
    """One that does not come at all ends the job (test_cluster_life.py)."""
    cluster.submit(job("accountless", steps=3, runtime={"serviceAccountName": "reader"}))
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "reader"}}
    cluster.client.create(paths.core("team", "serviceaccounts"), account)
    assert cluster.reaches("accountless", "Succeeded", 90)["attempt"] == 1


def test_a_foreign_service_of_that_name(cluster: House) -> None:
    cluster.namespace("foreign")
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "muster-workers"}}
    service["spec"] = {"clusterIP": "None", "selector": {"app": "other"}}  # type: ignore[assignment]
    cluster.client.create(paths.core("foreign", "services"), service)
    document = job("taken")
    document["metadata"]["namespace"] = "foreign"
    cluster.submit(document)
    told(cluster, "taken", "a Service named muster-workers is there that Muster did not make", "foreign")
    cluster.change("taken", {"cancel": True}, "foreign")
    cluster.reaches("taken", "Cancelled", namespace="foreign")


@pytest.fixture(scope="module")
def policy(cluster: House) -> Iterator[None]:
    """The chart's, at work."""
    documents = Chart(tool("get_helm").get_helm()).objects({}, "--show-only", "templates/policy.yaml")
    for document in documents:
        cluster.apply(document)

    def refused() -> bool:
        try:
            cluster.submit(quick_job("early", gang={"nodes": {"min": 3, "max": 2}}))
        except Refused as error:
            return "number of workers" in error.message
        cluster.kubectl("delete", "tj", "-n", "team", "early", "--wait=false")
        return False

    eventually(refused, "the admission policy to hold")
    yield
    for document in documents:
        cluster.kubectl("delete", document["kind"], document["metadata"]["name"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gang": {"nodes": {"min": 3, "max": 2}}}, "spec.gang.nodes: must be a number of workers"),
        ({"gang": {"resources": {"memory": "0"}}}, "must be Kubernetes quantities greater than 0"),
        ({"gang": {"nodes": 7}}, "must be a multiple of sequenceLength"),
        ({"gang": {"deviceClasses": {"gpus": "gpu.nvidia.com"}}}, "claims devices for GPU workers"),
        ({"runtime": {"labels": {"muster.dev/job": "other"}}}, "are set by Muster itself"),
    ],
)
def test_the_admission_policy_refuses_what_the_schema_lets_in(
    cluster: House, policy: None, change: dict[str, object], words: str
) -> None:
    with pytest.raises(Refused) as refused:
        cluster.submit(quick_job("refused", **change))
    assert refused.value.status == 422
    assert words in refused.value.message


def test_the_admission_policy_lets_in_what_is_well(cluster: House, policy: None) -> None:
    cluster.submit(job("well", steps=3))
    assert cluster.reaches("well", "Succeeded", 90)["attempt"] == 1


def test_a_spec_that_is_edited_while_it_runs(cluster: House) -> None:
    cluster.submit(job("edited", steps=10_000))
    cluster.reaches("edited", "Running")
    with pytest.raises(Refused) as refused:
        cluster.change("edited", {"gang": {"nodes": 1}})
    assert "gang is fixed at submission" in refused.value.message
    # The rule lets through what looks like a new status; nobody can make an edit look so.
    both = {"spec": {"gang": {"nodes": 1}}, "status": {"ledger": {"seconds": {"queue": 1.0}}}}
    with pytest.raises(Refused, match="gang is fixed at submission"):
        cluster.client.patch(paths.job("team", "edited"), both)
    cluster.change("edited", {"recovery": {"budgets": {"hang": 1}}, "priority": 5})
    generation = cluster.job("edited")["metadata"]["generation"]
    eventually(lambda: cluster.status("edited")["observedGeneration"] == generation, "the edit to be seen")
    assert cluster.status("edited")["attempt"] == 1
    cancel(cluster, "edited")


def test_a_namespace_that_is_deleted_while_its_job_runs(cluster: House) -> None:
    cluster.namespace("doomed")
    document = job("doomed", steps=10_000)
    document["metadata"]["namespace"] = "doomed"
    cluster.submit(document)
    cluster.reaches("doomed", "Running", namespace="doomed")
    cluster.kubectl("delete", "namespace", "doomed", "--timeout=60s")
    assert cluster.find("/api/v1/namespaces/doomed") is None
    cluster.submit(job("after", steps=2))
    cluster.reaches("after", "Succeeded")


@pytest.mark.parametrize("seconds", ["-3600", "7200"])
def test_workers_whose_clocks_are_hours_off_train_to_the_end(cluster: House, seconds: str) -> None:
    skewed = {"name": "QUICK_CLOCK_SECONDS", "value": seconds}
    name = f"skewed-{seconds.removeprefix('-')}"
    cluster.submit(job(name, steps=60, runtime={"env": [skewed]}))
    cluster.steps(name, 20)
    assert cluster.status(name)["phase"] == "Running"
    status = cluster.reaches(name, "Succeeded")
    assert (status["attempt"], status["restarts"].get("total", 0)) == (1, 0)
    assert all(0 <= seconds < 300 for seconds in status["ledger"]["seconds"].values())


def test_words_of_a_newer_muster_are_left_alone(cluster: House) -> None:
    """Its nodes stay held, and nothing is written; what it says goes back unchanged."""
    cluster.submit(job("newer", steps=10_000))
    cluster.reaches("newer", "Running")
    path = f"{paths.job('team', 'newer')}/status"
    change = {"status": {"schemaVersion": 99, "novelty": {"deep": True}}}
    before = cluster.client.patch(path, change)["metadata"]["resourceVersion"]
    cluster.submit(job("beside", steps=3))
    cluster.reaches("beside", "Succeeded")
    after = cluster.job("newer")
    assert after["metadata"]["resourceVersion"] == before
    assert after["status"]["novelty"] == {"deep": True}
    back = {"status": {"schemaVersion": STATUS_VERSION, "novelty": None}}
    cluster.client.patch(path, back)
    cancel(cluster, "newer")
