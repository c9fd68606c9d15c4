"""The limits of a project hold for whoever goes round the API: the chart's policy on a real API server, with the
entries that the API writes."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.house import House
from tests.cluster.official import Object, Refused
from tests.polling import eventually
from tests.unit.api.project_limit_cases import CASES, LIMITS, OWN_SECRET, WELL, Case, merged
from tests.unit.packaging.chart import Chart
from tests.unit.packaging.conftest import tool

from muster.api.core.admission_policy import LimitedProject, limit_entries
from muster.api.core.cluster.kubernetes_config_maps import write_limits
from muster.api.core.limits import ProjectLimits
from muster.kube import paths
from muster.kube.client import ApiClient
from muster.kube.connection import connect

PROJECTS = (
    LimitedProject("nlp", "limited", LIMITS, secrets=(OWN_SECRET,)),
    LimitedProject("default", None, ProjectLimits()),
)
LABELS = {"muster.dev/project": "nlp"}


def job(name: str, namespace: str = "limited", labels: Any = LABELS, spec: Any = WELL) -> Object:
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "muster.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}


@pytest.fixture(scope="module")
def limits(house: House) -> Iterator[None]:
    values = {"api": {"enabled": True, "persistence": {"enabled": False}}}
    documents = [
        document
        for document in Chart(tool("get_helm").get_helm()).objects(values, "--show-only", "templates/policy.yaml")
        if document["metadata"]["name"] in ("project-limits.muster.dev", "namespaces.muster.dev")
    ]
    house.namespace("limited")
    house.kubectl("create", "namespace", "muster-system", check=False)

    async def write() -> None:
        async with ApiClient(connect(house.plane.kubeconfig), "test") as client:
            for entries in ({}, limit_entries(PROJECTS)):  # first made, then replaced
                await write_limits(client, "muster-system", entries)

    asyncio.run(write())
    for document in documents:
        house.apply(document)

    def refused() -> bool:
        try:
            house.submit(job("early", spec=merged(WELL, {"gang": {"nodes": 3}})))
        except Refused:
            return True
        house.kubectl("delete", "tj", "-n", "limited", "early", "--wait=false")
        return False

    eventually(refused, "the limits to hold")
    yield
    for document in documents:
        house.kubectl("delete", document["kind"], document["metadata"]["name"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_policy_refuses_what_the_api_refuses(house: House, limits: None, case: Case) -> None:
    """By a dry run of the API server, which judges all the same."""
    path, document = f"{paths.jobs('limited')}?dryRun=All", job("judged", spec=case.spec)
    if case.refused_by_policy is None and not case.only_api:
        house.client.create(path, document)
        return
    with pytest.raises(Refused) as refused:
        house.client.create(path, document)
    words = "for Muster's API" if case.only_api else f"denied request: {case.refused_by_policy}: "
    assert words in refused.value.message


@pytest.mark.parametrize(
    ("namespace", "labels", "words"),
    [
        ("limited", {}, "metadata.labels[muster.dev/project]: jobs in namespace limited belong to project nlp"),
        ("limited", {"muster.dev/project": "default"}, "jobs in namespace limited belong to project nlp"),
        ("team", LABELS, "jobs in namespace team belong to project default"),
    ],
)
def test_a_job_says_the_project_of_its_namespace(
    house: House, limits: None, namespace: str, labels: dict[str, str], words: str
) -> None:
    with pytest.raises(Refused) as refused:
        house.submit(job("refused", namespace, labels))
    assert words in refused.value.message
    assert refused.value.status == 422


@pytest.mark.parametrize(("namespace", "labels", "nodes"), [("limited", LABELS, 2), ("team", {}, 3)])
def test_what_was_let_in_stays_in_its_project(
    house: House, limits: None, namespace: str, labels: dict[str, str], nodes: int
) -> None:
    house.submit(job("allowed", namespace, labels, merged(WELL, {"gang": {"nodes": nodes}})))
    try:
        if namespace == "limited":
            moved = {"metadata": {"labels": {"muster.dev/project": "default"}}}
            with pytest.raises(Refused) as refused:
                house.client.patch(paths.job(namespace, "allowed"), moved)
            assert "belong to project nlp" in refused.value.message
        house.kubectl("annotate", "tj", "allowed", "-n", namespace, "note=kept")
    finally:
        house.kubectl("delete", "tj", "-n", namespace, "allowed", "--timeout=20s")


@pytest.mark.parametrize("namespace", ["muster-system", "kube-system"])
@pytest.mark.parametrize("account", ["system:serviceaccount:muster-system:muster-api", "admin"])
def test_nobody_has_a_job_in_the_namespaces_of_kubernetes_and_of_the_release(
    house: House, limits: None, namespace: str, account: str
) -> None:
    document = json.dumps(job("thief", namespace, {}))
    words = ("create", "--dry-run=server", "-f", "-", f"--as={account}", "--as-group=system:masters")
    assert f"{namespace} is the platform's or Kubernetes' own" in house.kubectl(*words, given=document, check=False)


def test_the_default_project_has_the_namespaces_that_it_lists(house: House, limits: None) -> None:
    """Where it lists none, Kubernetes' own rights decide; a Secret of the project's own is so in its own namespace."""
    listed = ProjectLimits(namespaces=("team", "ml-*"), secrets=("s3",))

    async def write(limits: ProjectLimits) -> None:
        default = LimitedProject("default", None, limits, secrets=("own",))
        async with ApiClient(connect(house.plane.kubeconfig), "test") as client:
            await write_limits(client, "muster-system", limit_entries((PROJECTS[0], default)))

    def answer(namespace: str, secret: str = "s3") -> str:
        runtime = {"envFrom": [{"secretRef": {"name": secret}}]}
        document = json.dumps(job("judged", namespace, {}, merged(WELL, {"runtime": runtime})))
        return house.kubectl("create", "--dry-run=server", "-f", "-", given=document, check=False)

    for namespace in ("ml-a", "elsewhere"):
        house.kubectl("create", "namespace", namespace, check=False)
    assert "created" in answer("elsewhere")
    asyncio.run(write(listed))
    try:
        eventually(lambda: "metadata.namespace: project default has" in answer("elsewhere"), "the list to hold")
        assert "created" in answer("ml-a")
        assert "metadata.namespace: project default has" in answer("default")
        assert "names a Secret that project default does not list" in answer("team", "own")
        asyncio.run(write(ProjectLimits(secrets=("s3",))))
        eventually(lambda: "created" in answer("elsewhere"), "the list to be gone")
        assert "created" in answer("default", "own")
    finally:
        asyncio.run(write(ProjectLimits()))


def test_the_api_itself_is_not_judged_twice(house: House, limits: None) -> None:
    """It keeps the limits when a job is submitted, and may know better which sizes an elastic gang can have."""
    api = "--as=system:serviceaccount:muster-system:muster-api"
    house.kubectl("create", "clusterrolebinding", "limits-api", "--clusterrole=cluster-admin",
                  "--serviceaccount=muster-system:muster-api", check=False)  # fmt: skip
    document = job("handed-over", spec=merged(WELL, {"gang": {"nodes": {"min": 1, "max": 4}}}))
    assert "created" in house.kubectl("create", "-f", "-", api, given=json.dumps(document))
    house.kubectl("delete", "tj", "-n", "limited", "handed-over", "--wait=false")
    house.kubectl("delete", "clusterrolebinding", "limits-api")
