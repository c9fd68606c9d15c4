"""Devices claimed by class, on a real scheduler: slices of drivers, a claim per worker, devices that are its own."""

from collections.abc import Iterator

import pytest
from tests.cluster.house import House, quick_job
from tests.cluster.official import Object
from tests.polling import eventually

from muster.kube import paths
from muster.operator.kubernetes.render import CLAIMS_API

SPACE = "devices"
DRIVERS = {"gpu.nvidia.com": ("gpu", 4), "dra.net": ("efa", 2)}
CLASSES = {"gpus": "gpu.nvidia.com", "efa": "efa.networking.k8s.aws"}


@pytest.fixture(scope="module")
def cluster(house: House) -> Iterator[House]:
    for name, driver in zip(CLASSES.values(), DRIVERS, strict=True):
        selector = {"cel": {"expression": f"device.driver == '{driver}'"}}
        body = {"apiVersion": CLAIMS_API, "kind": "DeviceClass", "metadata": {"name": name}}
        house.client.create(f"/apis/{CLAIMS_API}/deviceclasses", body | {"spec": {"selectors": [selector]}})
    for index in range(2):
        node = f"claimed-{index}"
        # EFA asks for huge pages, which a hollow node has to own up to as well.
        house.node(node, {"node.kubernetes.io/instance-type": "claimed"}, **{"hugepages-2Mi": "6Gi"})
        for driver, (kind, count) in DRIVERS.items():
            house.client.create(paths.SLICES, published(node, driver, kind, count))
    house.namespace(SPACE)  # EFA locks memory, which the restricted standard forbids
    house.kubectl("label", "namespace", SPACE, "pod-security.kubernetes.io/enforce=privileged", "--overwrite")
    house.start_operator(MUSTER_OPERATOR_PREFLIGHT="false")
    yield house
    house.stop_operators()


def published(node: str, driver: str, kind: str, count: int) -> Object:
    """What a driver on the node says that it has."""
    devices = [{"name": f"{kind}-{index}", "attributes": {"type": {"string": kind}}} for index in range(count)]
    spec = {"driver": driver, "nodeName": node, "devices": devices}
    spec["pool"] = {"name": node, "generation": 1, "resourceSliceCount": 1}
    meta = {"name": f"{node}-{kind}"}
    return {"apiVersion": CLAIMS_API, "kind": "ResourceSlice", "metadata": meta, "spec": spec}


def job(name: str, classes: dict[str, str], **changes: object) -> Object:
    training: Object = quick_job(name)["spec"]["training"] | {"batch": {"tokensPerStep": 64 * 8}}
    gang = {"gpusPerNode": 4, "deviceClasses": classes, "instanceTypes": ["claimed"]}
    document = quick_job(name, gang=gang, training=training, **changes)
    document["metadata"]["namespace"] = SPACE
    return document


def test_a_gang_gets_the_devices_that_it_claims(cluster: House) -> None:
    cluster.submit(job("claims", CLASSES, steps=10_000))
    cluster.reaches("claims", "Running", namespace=SPACE)
    claims = cluster.get(paths.group(CLAIMS_API, SPACE, "resourceclaims"))["items"]
    got = [
        sorted((device["request"], device["driver"]) for device in claim["status"]["allocation"]["devices"]["results"])
        for claim in claims
    ]
    assert got == [[("efa", "dra.net")] * 2 + [("gpus", "gpu.nvidia.com")] * 4] * 2
    for pod in cluster.pods("claims", SPACE):
        resources = pod["spec"]["containers"][0]["resources"]
        assert resources["claims"] == [{"name": "devices"}]
        assert not {"nvidia.com/gpu", "vpc.amazonaws.com/efa"} & resources["limits"].keys()
    cluster.change("claims", {"cancel": True}, SPACE)
    cluster.reaches("claims", "Cancelled", namespace=SPACE)
    eventually(lambda: not cluster.get(paths.group(CLAIMS_API, SPACE, "resourceclaims"))["items"], "the claims to go")


def test_a_class_that_is_not_there_is_named(cluster: House) -> None:
    cluster.submit(job("classless", {"gpus": "tpu.example"}))
    words = "spec.gang.deviceClasses.gpus: this cluster has no DeviceClass named tpu.example"
    eventually(lambda: words in cluster.status("classless", SPACE).get("because", ""), "the class to be named")
    assert cluster.pods("classless", SPACE) == []
    cluster.reaches("classless", "Failed", namespace=SPACE)
