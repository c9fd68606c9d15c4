"""A job of an API in a cluster names no namespace, service account, Secret or claim that its project does not list."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.api.platform import Platform, document, platform

from muster.api.core.cluster.cluster import LocalJobCluster
from muster.local.cluster import LocalCluster
from muster.secrets.box import SecretBox
from muster.words.state_folder import StateFolder

SYSTEM = "platform-system"
DEFAULT = "/api/v1/projects/default"


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Platform]:
    async with with_rules_of_a_cluster(tmp_path, monkeypatch) as running:
        yield running


@contextlib.asynccontextmanager
async def with_rules_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> AsyncIterator[Platform]:
    """Its jobs are in a folder."""
    monkeypatch.setenv("MUSTER_API_CLUSTER", "kubernetes")
    (tmp_path / "cluster").mkdir()
    layout = StateFolder(tmp_path)
    there = LocalJobCluster(LocalCluster(layout.cluster), SecretBox(layout.secret_key, None))
    options = {"namespace": SYSTEM, "checkpoint_uri": "s3://checkpoints/all", **more}
    async with platform(tmp_path, there, **options) as running:
        yield running


async def refused(here: Platform, namespace: str | None = None, **runtime: Any) -> dict[str, str]:
    """The faults of a job, by path; none where it would be taken."""
    job = document("demo", runtime=runtime)
    if namespace is not None:
        job["metadata"]["namespace"] = namespace
    reply = await here.client.post("/api/v1/jobs?dryRun=true", json=job)
    assert reply.status_code == 200, reply.text
    return {fault["path"]: fault["message"] for fault in reply.json()["refusals"]}


async def limit(here: Platform, **limits: Any) -> int:
    return (await here.client.put(DEFAULT, json={"limits": limits})).status_code


async def test_a_folder_of_the_node_is_refused_when_it_is_submitted(here: Platform) -> None:
    """The chart's policy would refuse its workers, after the job has waited in the queue."""
    disk = {"name": "disk", "hostPath": {"path": "/var"}}
    found = await refused(here, volumes=[{"name": "scratch", "emptyDir": {}}, disk])
    assert list(found) == ["spec.runtime.volumes[1].hostPath"]
    assert "name a persistentVolumeClaim" in found["spec.runtime.volumes[1].hostPath"]


async def test_a_folder_of_the_node_is_taken_where_the_operators_pods_are_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_rules_of_a_cluster(tmp_path, monkeypatch, host_paths=True) as here:
        assert await refused(here, volumes=[{"name": "disk", "hostPath": {"path": "/var"}}]) == {}


@pytest.mark.parametrize("namespace", [SYSTEM, "kube-system", "kube-public", "openshift-etcd"])
async def test_the_platforms_and_kubernetes_own_namespaces_are_never_a_jobs(here: Platform, namespace: str) -> None:
    assert await limit(here, namespaces=["*"]) == 200
    assert "never a job's" in (await refused(here, namespace))["metadata.namespace"]
    for name, body in ((namespace, {}), ("nlp", {"namespace": namespace})):
        taken = await here.client.put(f"/api/v1/projects/{name}", json=body)
        assert (taken.status_code, taken.json()["code"]) == (409, "namespace_taken")


async def test_the_default_project_has_the_namespaces_that_an_admin_lists(here: Platform) -> None:
    assert await refused(here) == {}
    words = (await refused(here, "team"))["metadata.namespace"]
    assert "muster projects set default --set 'namespaces=[default,team]'" in words
    assert await limit(here, namespaces=["team", "ml-*"]) == 200
    assert [await refused(here, name) for name in ("team", "ml-a")] == [{}, {}]
    assert [list(await refused(here, name)) for name in ("teams", "ml", None)] == [["metadata.namespace"]] * 3
    other = await here.client.put("/api/v1/projects/nlp", json={"limits": {"namespaces": ["team"]}})
    assert (other.status_code, other.json()["code"]) == (422, "invalid_project")


async def test_what_took_the_platform_over_is_refused(here: Platform) -> None:
    """The very job of the report: the operator's account, the API's Secret as a volume and as a variable."""
    found = await refused(
        here,
        SYSTEM,
        serviceAccountName="muster-operator",
        volumes=[{"name": "loot", "secret": {"secretName": "muster"}}],
        env=[{"name": "URL", "valueFrom": {"secretKeyRef": {"name": "muster", "key": "url"}}}],
    )
    assert set(found) == {
        "metadata.namespace",
        "spec.runtime.serviceAccountName",
        "spec.runtime.volumes[0].secret.secretName",
        "spec.runtime.env[0].valueFrom.secretKeyRef.name",
    }


async def test_a_project_lists_what_its_jobs_may_name(here: Platform) -> None:
    runtime: dict[str, Any] = {
        "serviceAccountName": "trainer",
        "imagePullSecrets": ["pull"],
        "envFrom": [{"secretRef": {"name": "s3-keys"}}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    }
    assert len(await refused(here, **runtime)) == 4
    assert await limit(here, serviceAccounts=["trainer"], secrets=["pull", "s3-*"], claims=["data"]) == 200
    assert await refused(here, **runtime) == {}


async def test_a_projects_own_secrets_are_its_own_in_its_own_namespace(here: Platform) -> None:
    runtime = {"envFrom": [{"secretRef": {"name": "hf-token"}}]}
    words = (await refused(here, **runtime))["spec.runtime.envFrom[0].secretRef.name"]
    assert "muster secrets set hf-token" in words
    made = await here.client.put(f"{DEFAULT}/secrets/hf-token", json={"data": {"value": "x"}})
    assert made.status_code == 201, made.text
    assert await refused(here, **runtime) == {}
    assert await limit(here, namespaces=["default", "team"]) == 200
    assert list(await refused(here, "team", **runtime)) == ["spec.runtime.envFrom[0].secretRef.name"]
