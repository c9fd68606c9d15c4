"""Two operators of different versions over the same jobs: the newer one takes them over, the older one then lets go."""

import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.house import House, quick_job
from tests.cluster.official import Object, Refused
from tests.polling import eventually

from muster.kube import paths
from muster.recipe.schema import document_schema
from muster.words.base import dump
from muster.words.status import STATUS_VERSION, JobStatus, Phase

KIND = {"instanceTypes": ["versions"]}
NEWER = (str(Path(__file__).with_name("newer_operator.py")),)


@pytest.fixture(autouse=True)
def alone(house: House) -> Iterator[None]:
    yield
    house.stop_operators()


@pytest.fixture(scope="module")
def nodes(house: House) -> None:
    for index in range(4):
        house.node(f"versions-{index}", {"node.kubernetes.io/instance-type": "versions"})


def patched(house: House, path: str, change: Object) -> str:
    """Its resourceVersion; empty while the schema refuses it."""
    try:
        return str(house.client.patch(path, change)["metadata"]["resourceVersion"])
    except Refused:
        return ""


def hand_over(first: "subprocess.Popen[bytes]") -> None:
    first.terminate()
    assert first.wait(15) == 0


def test_a_newer_operator_upgrades_what_it_finds_and_an_older_one_keeps_off(house: House, nodes: None) -> None:
    older = house.start_operator("older")
    house.submit(quick_job("lasting", steps=10_000, gang=KIND))
    house.reaches("lasting", "Running")
    assert house.status("lasting")["schemaVersion"] == STATUS_VERSION

    newer = house.start_operator("newer", program=NEWER)
    eventually(lambda: '"leader": "older"' in house.log.read_text(), "the newer one to wait its turn")
    hand_over(older)
    house.change("lasting", {"priority": 7})
    eventually(
        lambda: house.status("lasting").get("schemaVersion") == STATUS_VERSION + 1, f"the upgrade\n{house.tail()}"
    )
    assert house.status("lasting")["novelty"] == "of version 2"
    assert (house.status("lasting")["phase"], house.status("lasting")["attempt"]) == ("Running", 1)

    house.start_operator("older-again")
    hand_over(newer)
    eventually(lambda: '"identity": "older-again"' in house.log.read_text(), "the older one to lead")
    house.submit(quick_job("beside-it", steps=5, gang=KIND))
    house.reaches("beside-it", "Succeeded")
    before = house.job("lasting")["metadata"]["resourceVersion"]
    house.change("lasting", {"cancel": True})
    told = f"the status has schema version {STATUS_VERSION + 1} and this operator knows {STATUS_VERSION}: not touched"
    eventually(lambda: told in house.kubectl("get", "events", "-n", "team", "-o", "json"), "an event that says so")
    house.submit(quick_job("after-it", steps=5, gang=KIND))
    house.reaches("after-it", "Succeeded")
    left = house.job("lasting")
    assert (left["status"]["phase"], left["status"]["novelty"]) == ("Running", "of version 2")
    assert int(left["metadata"]["resourceVersion"]) > int(before)  # by our own edit
    assert {pod["spec"]["nodeName"] for pod in house.pods("lasting")} == set(left["status"]["gang"]["nodes"])

    house.stop_operators()
    house.start_operator("newer-again", program=NEWER)
    house.reaches("lasting", "Cancelled")


def test_pods_of_a_release_without_incarnations_are_taken_over(house: House, nodes: None) -> None:
    """A rolling upgrade: the gang trains on in the pods that it has, which have no such label."""
    before = house.start_operator("before")
    house.submit(quick_job("kept", steps=20, gang=KIND, runtime=house.holds("kept", 8)))
    house.steps("kept", 8)
    hand_over(before)
    pods = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in house.pods("kept")}
    for name in pods:
        change: Object = {"metadata": {"labels": {"muster.dev/incarnation": None}}}
        house.client.patch(f"{paths.core('team', 'pods')}/{name}", change)
    house.start_operator("after")
    house.change("kept", {"priority": 7})
    eventually(
        lambda: house.status("kept")["observedGeneration"] == house.job("kept")["metadata"]["generation"],
        f"the new operator to look at it\n{house.tail()}",
    )
    assert {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in house.pods("kept")} == pods
    house.let_go("kept")
    house.reaches("kept", "Succeeded")
    status = house.status("kept")
    assert (status["attempt"], status["restarts"]["total"]) == (1, 0)


def allow(house: House, phase: str) -> None:
    """As the definition of a newer release would."""
    crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.muster.dev"
    place = "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties/phase/enum/-"
    change = [{"op": "add", "path": place, "value": phase}]
    house.client.patch(crd, change, "application/json-patch+json")


def test_a_phase_that_only_a_newer_muster_knows_is_left_alone(house: House, nodes: None) -> None:
    house.start_operator("today")
    house.submit(quick_job("fancy", steps=10_000, gang=KIND))
    house.reaches("fancy", "Running")
    allow(house, "Hibernating")
    path = f"{paths.job('team', 'fancy')}/status"
    change = {"status": {"schemaVersion": STATUS_VERSION + 2, "phase": "Hibernating"}}
    version = eventually(lambda: patched(house, path, change), "the definition to be served")
    house.submit(quick_job("after-fancy", steps=5, gang=KIND))
    house.reaches("after-fancy", "Succeeded")
    assert house.job("fancy")["metadata"]["resourceVersion"] == version
    assert len(house.pods("fancy")) == 2
    eventually(lambda: "it is left to a newer operator" in house.log.read_text(), "the operator to say so")
    house.client.patch(path, {"status": {"schemaVersion": STATUS_VERSION, "phase": "Running"}})
    house.change("fancy", {"cancel": True})
    house.reaches("fancy", "Cancelled")


def with_numbers(schema: Any) -> Any:
    """With numbers wherever it has times."""
    if isinstance(schema, list):
        return [with_numbers(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    whole = {name: with_numbers(value) for name, value in schema.items()}
    if whole.get("format") == "date-time":
        del whole["format"]
        whole["type"] = "number"
    return whole


def test_a_status_of_the_release_before_is_written_anew(house: House, nodes: None) -> None:
    """That release wrote times as numbers, which today's definition refuses. The job is over: nothing else changes."""
    crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.muster.dev"
    place = "/spec/versions/0/schema/openAPIV3Schema/properties/status"

    def define(status: Object) -> None:
        change = [{"op": "replace", "path": place, "value": status}]
        house.client.patch(crd, change, "application/json-patch+json")

    today = document_schema()["properties"]["status"]
    before = with_numbers(today)
    assert before != today
    house.submit(quick_job("old", gang=KIND))
    old = dump(JobStatus(schema_version=1, phase=Phase.SUCCEEDED, code="Finished", because="5 of 5 steps"))
    old |= {"since": 1795418698.1234567, "finishedAt": 1795418698.1234567, "ledger": {"seconds": {}, "since": 5}}
    define(before)
    try:
        eventually(lambda: patched(house, f"{paths.job('team', 'old')}/status", {"status": old}), "the old definition")
    finally:
        define(today)
    path, numbers = f"{paths.job('team', 'old')}/status", itertools.count()  # what does not change is let through
    eventually(lambda: not patched(house, path, {"status": {"since": next(numbers)}}), "today's definition")
    assert isinstance(house.status("old")["since"], int | float)
    house.start_operator("today")
    eventually(lambda: house.status("old").get("schemaVersion") == STATUS_VERSION, f"the upgrade\n{house.tail()}")
    assert house.status("old")["finishedAt"] == "2026-11-23T07:24:58.1234567Z"
    assert house.status("old")["phase"] == "Succeeded"
    house.change("old", {"ttlSecondsAfterFinished": 0})
    eventually(lambda: house.find(paths.job("team", "old")) is None, f"its end\n{house.tail()}")
