"""The limits of a project hold for whoever goes round the API: the chart's policy on a real API server, with the
entries that the API writes."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.house import House, quick_job
from tests.cluster.official import Object, Refused
from tests.polling import eventually
from tests.unit.packaging.chart import Chart
from tests.unit.packaging.conftest import tool

from muster.api.kubernetes_limits import write_limits
from muster.contract.admission import LimitedProject, limit_entries
from muster.contract.projects import ProjectLimits
from muster.kube import paths
from muster.kube.client import Client
from muster.kube.connection import connect

LIMITS = ProjectLimits(
    gang_sizes=(1, 2, 4),
    instance_types=("p5.48xlarge", "p5e.48xlarge"),
    images=("registry.example.com/trainer:1", "registry.example.com/team/*"),
    data_prefixes=("s3://data/nlp/",),
    checkpoint_prefix="s3://checkpoints/nlp",
    endpoints=("https://wandb.example.com",),
    service_account="nlp",
)
PROJECTS = (LimitedProject("nlp", "limited", LIMITS), LimitedProject("default", None, ProjectLimits()))
LABELS = {"muster.dev/project": "nlp"}
WELL: dict[str, Any] = {
    "gang": {"nodes": 2, "instanceTypes": ["p5.48xlarge"]},
    "checkpoint": {"uri": "s3://checkpoints/nlp/mine"},
}


def job(name: str, namespace: str = "limited", labels: Any = LABELS, **changes: Any) -> Object:
    document = quick_job(name, suspend=True, **{**WELL, **changes})
    document["metadata"] |= {"namespace": namespace, "labels": labels}
    return document


@pytest.fixture(scope="module")
def limits(house: House) -> Iterator[None]:
    values = {"api": {"enabled": True, "persistence": {"enabled": False}}}
    documents = [
        document
        for document in Chart(tool("get_helm").get_helm()).objects(values, "--show-only", "templates/policy.yaml")
        if document["metadata"]["name"] == "project-limits.muster.dev"
    ]
    house.namespace("limited")
    house.kubectl("create", "namespace", "muster-system", check=False)

    async def write() -> None:
        async with Client(connect(house.plane.kubeconfig), "test") as client:
            for entries in ({}, limit_entries(PROJECTS)):  # first made, then replaced
                await write_limits(client, "muster-system", entries)

    asyncio.run(write())
    for document in documents:
        house.apply(document)

    def refused() -> bool:
        try:
            house.submit(job("early", gang={"nodes": 3, "instanceTypes": ["p5.48xlarge"]}))
        except Refused:
            return True
        house.kubectl("delete", "tj", "-n", "limited", "early", "--wait=false")
        return False

    eventually(refused, "the limits to hold", 60)
    yield
    for document in documents:
        house.kubectl("delete", document["kind"], document["metadata"]["name"])


def data(source: str) -> Object:
    return {"training": {"data": {"train": [{"source": source}], "sequenceLength": 64}}}


def training(**parts: Any) -> Object:
    return {"training": parts}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gang": {"nodes": 3}}, "spec.gang.nodes: project nlp has gangs of 1, 2, 4 nodes; choose one of these"),
        ({"gang": {"nodes": {"min": 1, "max": 4}}}, "spec.gang.nodes: project nlp has gangs of 1, 2, 4 nodes"),
        ({"gang": {"nodes": 2, "instanceTypes": ["p4d.24xlarge"]}}, "project nlp has p5.48xlarge, p5e.48xlarge"),
        ({"gang": {"nodes": 2, "instanceTypes": []}}, "spec.gang.instanceTypes"),
        ({"runtime": {"image": "registry.example.com/trainer:10"}}, "spec.runtime.image: project nlp has the images"),
        ({"runtime": {"serviceAccountName": "admin"}}, "spec.runtime.serviceAccountName: project nlp has nlp"),
        ({"checkpoint": {"uri": "s3://checkpoints/nlp-too"}}, "spec.checkpoint.uri: project nlp commits under"),
        ({"checkpoint": {"uri": "s3://checkpoints/nlp/../cv"}}, "spec.checkpoint.uri"),
        (data("s3://data/cv/x.jsonl"), "spec.training: project nlp reads from s3://data/nlp, s3://checkpoints/nlp"),
        (data("s3://data/nlp/../cv/x.jsonl"), "spec.training: project nlp reads from"),
        (data("s3://data/nlp/%2E%2e/cv/x.jsonl"), "spec.training: project nlp reads from"),
        (
            training(distillation={"teacher": {"source": "s3://models/cv/large"}}),
            "spec.training: project nlp reads from",
        ),
        (training(evaluation={"every": 5, "data": [{"source": "s3://data/cv/x"}]}), "spec.training: project nlp reads"),
        (
            training(evaluation={"every": 5, "sets": {"cv": {"data": [{"source": "s3://data/cv/x"}]}}}),
            "project nlp reads",
        ),
        (training(model={"preset": None, "source": "hf://other/model"}), "spec.training: project nlp reads"),
        ({"runtime": {"env": [{"name": "WANDB", "value": "https://wandb.example.com.evil/"}]}}, "names another server"),
        ({"labels": {}}, "metadata.labels[muster.dev/project]: jobs in namespace limited belong to project nlp"),
        ({"labels": {"muster.dev/project": "default"}}, "jobs in namespace limited belong to project nlp"),
        ({"namespace": "team"}, "jobs in namespace team belong to project default"),
    ],
)
def test_what_a_project_may_not_name_is_refused(house: House, limits: None, change: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused) as refused:
        house.submit(merged(job("refused"), change))
    assert words in refused.value.message
    assert refused.value.status == 422


def merged(document: Object, change: dict[str, Any]) -> Object:
    """The job with parts of its spec changed, or its labels or namespace."""
    change = dict(change)
    for key in ("labels", "namespace"):
        if key in change:
            document["metadata"][key] = change.pop(key)
    return _merge(document, {"spec": change})


def _merge(into: Object, change: Object) -> Object:
    for key, value in change.items():
        if value is None:
            into.pop(key, None)
        else:
            into[key] = (
                _merge(dict(into.get(key) or {}), value) if isinstance(value, dict) and key != "nodes" else value
            )
    return into


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"gang": {"nodes": {"min": 1, "max": 2}}},
        {"runtime": {"image": "registry.example.com/team/mine:7", "serviceAccountName": "nlp"}},
        data("s3://data/nlp/x.jsonl"),
        training(evaluation={"every": 5, "sets": {"own": {"data": [{"source": "s3://checkpoints/nlp/x"}]}}}),
        {
            "runtime": {
                "env": [{"name": "WANDB", "value": "https://wandb.example.com/api"}, {"name": "A", "value": "b"}]
            }
        },
        {"namespace": "team", "labels": {}, "gang": {"nodes": 3, "instanceTypes": []}},
    ],
)
def test_what_it_may_is_let_in_and_stays_in_its_project(house: House, limits: None, change: dict[str, Any]) -> None:
    document = merged(job("allowed"), change)
    namespace = document["metadata"]["namespace"]
    if namespace == "team":
        document["spec"]["training"]["batch"] = {"tokensPerStep": 64 * 3}
    house.submit(document)
    try:
        if namespace == "limited":
            moved = {"metadata": {"labels": {"muster.dev/project": "default"}}}
            with pytest.raises(Refused) as refused:
                house.client.patch(paths.job(namespace, "allowed"), moved)
            assert "belong to project nlp" in refused.value.message
        house.kubectl("annotate", "tj", "allowed", "-n", namespace, "note=kept")
    finally:
        house.kubectl("delete", "tj", "-n", namespace, "allowed", "--timeout=20s")


def test_the_api_itself_is_not_judged_twice(house: House, limits: None) -> None:
    """It keeps the limits when a job is submitted, and may know better which sizes an elastic gang can have."""
    api = "--as=system:serviceaccount:muster-system:muster-api"
    house.kubectl("create", "clusterrolebinding", "limits-api", "--clusterrole=cluster-admin",
                  "--serviceaccount=muster-system:muster-api", check=False)  # fmt: skip
    document = merged(job("handed-over"), {"gang": {"nodes": {"min": 1, "max": 4}}})
    assert "created" in house.kubectl("create", "-f", "-", api, given=json.dumps(document))
    house.kubectl("delete", "tj", "-n", "limited", "handed-over", "--wait=false")
    house.kubectl("delete", "clusterrolebinding", "limits-api")
