"""The chart as helm renders it: valid for Kubernetes, least privilege, no switch without effect, no typo unnoticed."""

import concurrent.futures
import json
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from pydantic import ValidationError
from tests.tidy.repository import ROOT
from tests.unit.packaging.chart import (
    CHART,
    Chart,
    Object,
    Refused,
    environment,
    leaves,
    merged,
    placed,
    pod_specs,
)
from tests.unit.packaging.value_sets import CHANGES, EVERYTHING, MONITORED, SETS

from muster.api.core.settings import ApiSettings as ApiSettings
from muster.api.openai.models.base_models import load_models
from muster.documents.prices import load_prices
from muster.operator.kubernetes.render import DiskLimits
from muster.operator.kubernetes.settings import TOLERATIONS, KubernetesSettings
from muster.recipe.document import TrainingJob
from muster.words.pods import Toleration

KUBERNETES = ("1.29", "1.34", "1.37")  # the oldest that the chart takes, one between, the newest known
POSTGRESQL: Object = {"database": {"existingSecret": "muster"}, "bootstrapToken": {"existingSecret": "muster"}}


@pytest.fixture(scope="module")
def rendered(chart: Chart) -> dict[str, list[Object]]:
    return {name: chart.objects(values) for name, values in SETS.items()}


def test_helm_has_nothing_to_complain(helm: Path) -> None:
    for name, values in SETS.items():
        done = subprocess.run(
            [helm, "lint", "--strict", CHART, "--values", "-"],
            input=json.dumps(values), capture_output=True, text=True, check=False,
        )  # fmt: skip
        told = [line for line in done.stdout.splitlines() if re.match(r"\[(WARNING|ERROR)\]", line)]
        assert (done.returncode, told) == (0, []), name


@pytest.fixture(scope="module", autouse=True)
def schemas_are_read_once() -> Iterator[None]:
    """Each is some megabytes of JSON, and the library reads it anew for every object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_what_kubernetes_expects(rendered: dict[str, list[Object]], version: str) -> None:
    judged = 0
    for name, objects in rendered.items():
        for item in objects:
            if item["apiVersion"].startswith("monitoring.coreos.com/"):
                continue  # judged below
            if item["kind"].startswith("ValidatingAdmissionPolicy") and version == "1.29":
                continue  # helm leaves it out there, as the next test shows
            place = f"{name}: {item['kind']} {item['metadata']['name']}"
            try:
                kubernetes_validate.validate(item, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                pytest.fail(f"{place}: {'.'.join(map(str, error.absolute_path))}: {error.message}")
            judged += 1
    assert judged > 8 * len(rendered) - 8


def test_the_schemas_would_notice(rendered: dict[str, list[Object]]) -> None:
    deployment = next(item for item in rendered["defaults"] if item["kind"] == "Deployment")
    wrong = merged(deployment, {"spec": {"replica": 2}})
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


def test_monitoring_objects_are_what_the_prometheus_operator_expects(rendered: dict[str, list[Object]]) -> None:
    folder = os.environ.get("MUSTERTESTS_CRDS")
    if not folder:
        pytest.skip("MUSTERTESTS_CRDS is not set: it names a folder with monitoring.coreos.com_*.yaml")
    kinds = set()
    for item in (i for objects in rendered.values() for i in objects):
        if item["apiVersion"].startswith("monitoring.coreos.com/"):
            plural = item["kind"].lower() + "s"
            document = yaml.safe_load((Path(folder) / f"monitoring.coreos.com_{plural}.yaml").read_text())
            schema = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
            jsonschema.validate(item, _closed(schema))
            kinds.add(item["kind"])
    assert kinds == {"PodMonitor", "ServiceMonitor", "PrometheusRule"}


def _closed(schema: Any) -> Any:
    """The API server drops unknown fields; for us they are mistakes. Patterns in Go's own dialect are left out."""
    if isinstance(schema, dict):
        closed = {key: _closed(value) for key, value in schema.items() if "(?i)" not in str(value) or key != "pattern"}
        if closed.get("properties") and schema.get("type") == "object" and "apiVersion" not in schema["properties"]:
            closed.setdefault("additionalProperties", False)
        return closed
    return [_closed(entry) for entry in schema] if isinstance(schema, list) else schema


@pytest.mark.long
def test_every_switch_does_something(chart: Chart) -> None:
    switches = leaves(yaml.safe_load((CHART / "values.yaml").read_text()))
    assert set(CHANGES) == set(switches), "each switch of values.yaml has an entry in CHANGES, and nothing else has"
    # With a database there is no volume, and no first token to be found in it.
    sqlite: Object = merged(EVERYTHING, {"api": {"replicas": 1, "database": {"existingSecret": ""}}})
    hidden = ("api.persistence.", "api.bootstrapToken.existingSecret")

    @cache
    def base(path_is_hidden: bool) -> str:
        return chart.text(sqlite if path_is_hidden else EVERYTHING)

    def changed(path: str) -> bool:
        below = sqlite if path.startswith(hidden) else EVERYTHING
        above = placed(path, CHANGES[path])
        if path in ("api.database.existingSecret", "api.uploads.sticky"):  # which several replicas need
            above = merged(above, {"api": {"replicas": 1}})
        return chart.text(merged(below, above)) != base(path.startswith(hidden))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        idle = [path for path, other in zip(CHANGES, pool.map(changed, CHANGES), strict=True) if not other]
    assert idle == []


@pytest.mark.parametrize(
    ("values", "place", "why"),
    [
        ({"s3": {"endpoint": "minio"}}, "/s3/endpoint", "pattern"),
        ({"operater": {}}, "operater", "not allowed"),
        ({"operator": {"replica": 2}}, "replica", "not allowed"),
        ({"operator": {"replicas": "two"}}, "/operator/replicas", "got string, want integer"),
        ({"operator": {"image": {"digest": "sha256:1"}}}, "/operator/image/digest", "pattern"),
        ({"operator": {"awsRoleArn": "muster"}}, "/operator/awsRoleArn", "pattern"),
        ({"workers": {"checkpointUri": "/data"}}, "/workers/checkpointUri", "pattern"),
        ({"workers": {"namespaceLimits": {"team": "64"}}}, "/workers/namespaceLimits/team", "want integer"),
        ({"api": {"ingress": {"enabled": True}}}, "/api/ingress/host", "minLength"),
        ({"metrics": {"podMonitor": {"interval": "30"}}}, "/metrics/podMonitor/interval", "pattern"),
        ({"metrics": {"prometheusRule": {"enable": True}}}, "enable", "not allowed"),
    ],
)
def test_a_mistake_in_the_values_is_refused(chart: Chart, values: Object, place: str, why: str) -> None:
    with pytest.raises(Refused) as refused:
        chart.text(values)
    told = str(refused.value)
    assert place in told
    assert why in told


def test_the_schema_knows_every_value_and_closes_every_room() -> None:
    """Else a switch could be renamed in one of the two files only."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values, schema)
    open_rooms = []
    for path in {".".join(leaf.split(".")[:depth]) for leaf in leaves(values) for depth in range(leaf.count(".") + 1)}:
        try:
            jsonschema.validate(merged(values, placed(f"{path}.typo".removeprefix("."), 1)), schema)
            open_rooms.append(path)
        except jsonschema.ValidationError:
            pass
    # As a subchart we are handed other charts' globals; what a pod may ask for is Kubernetes' own, judged by it.
    kubernetes = ("podSecurityContext", "podSecurityContext.seccompProfile", "resources.limits", "resources.requests")
    rooms = {f"{room}.{name}" for room in ("api", "operator") for name in kubernetes}
    assert set(open_rooms) == {"global"} | rooms | {f"agent.{name}" for name in kubernetes if "resources" in name}


def test_pods_pass_the_restricted_standard(rendered: dict[str, list[Object]]) -> None:
    """As https://kubernetes.io/docs/concepts/security/pod-security-standards/ lists it; the cluster's tests ask the
    API server itself.
    """
    for objects in rendered.values():
        for name, spec in pod_specs(objects).items():
            if name == "muster-agent":  # test_packaging_agent.py says what it may do instead
                continue
            pod = spec["securityContext"]
            assert pod["runAsNonRoot"] is True, name
            assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
            assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
            for container in spec["containers"]:
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "runAsNonRoot": True,
                    "capabilities": {"drop": ["ALL"]},
                }, name
            kinds = {key for volume in spec.get("volumes", ()) for key in volume} - {"name"}
            assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}, name


def test_no_service_writes_into_our_environment(rendered: dict[str, list[Object]]) -> None:
    """A Service named muster-api sets MUSTER_API_PORT=tcp://… in every pod beside it that does not decline."""
    for objects in rendered.values():
        specs = pod_specs(objects)
        assert [name for name, spec in specs.items() if spec.get("enableServiceLinks") is not False] == []
        assert specs


@pytest.fixture
def prices(chart: Chart, tmp_path: Path) -> Path:
    """The table of prices, as it would be mounted."""
    path = tmp_path / "prices.json"
    path.write_text(chart.find(EVERYTHING, "ConfigMap", "muster-prices")["data"]["prices.json"])
    return path


def test_the_operator_reads_its_settings_as_meant(chart: Chart, prices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (container,) = pod_specs(chart.objects(EVERYTHING))["muster-operator"]["containers"]
    for name, value in environment(container).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MUSTER_OPERATOR_PRICES_FILE", str(prices))
    settings = KubernetesSettings()
    assert load_prices(settings.prices_file).types["p5.48xlarge"].spot == 20.5
    assert settings.prometheus_url == "http://prometheus.monitoring:9090"
    mounted = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
    assert settings.webhook_token_file is not None
    assert settings.webhook_token_file.parent in mounted
    assert settings.namespace == "muster-system"
    assert settings.image == "registry.example.com/ml/muster-trainer:0.1.0"
    assert settings.checkpoint_uri == "s3://ckpt/muster"
    assert settings.namespace_limits == {"team": 64}
    assert settings.image_pull_secrets == ("pull",)
    assert settings.tolerations == (Toleration(key="gpu", operator="Exists"),)
    assert settings.env_from == ({"secretRef": {"name": "s3"}},)
    assert (settings.resources.cpu, settings.resources.memory, settings.disk.cache) == ("2", "64Gi", "1Ti")
    assert (settings.port, settings.host) == (8080, "0.0.0.0")
    known = {f"MUSTER_OPERATOR_{field.upper()}" for field in KubernetesSettings.model_fields}
    told = {entry["name"] for entry in container["env"] if entry["name"].startswith("MUSTER_OPERATOR_")}
    assert told <= known, "pydantic-settings would silently ignore the others"


def test_unset_values_leave_the_operators_defaults(chart: Chart, monkeypatch: pytest.MonkeyPatch) -> None:
    (container,) = pod_specs(chart.objects({}))["muster-operator"]["containers"]
    for name, value in environment(container).items():
        monkeypatch.setenv(name, value)
    settings = KubernetesSettings()
    assert (settings.tolerations, settings.checkpoint_uri) == (TOLERATIONS, "")
    assert (settings.env_from, settings.read_only_root, settings.disk) == ((), True, DiskLimits())
    assert (settings.resources.cpu, settings.resources.memory) == ("100m", None), "no worker is BestEffort"


def test_the_api_reads_its_settings_as_meant(
    chart: Chart, prices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (container,) = pod_specs(chart.objects(EVERYTHING))["muster-api"]["containers"]
    told = {entry["name"] for entry in container["env"] if entry["name"].startswith("MUSTER_API_")}
    assert told == {
        f"MUSTER_API_{name}" for name in
        (
            "NAMESPACE",
            "CLUSTER", "STATE", "HOST", "PORT", "PUBLIC_URL", "CHECKPOINT_URI", "FILES_URI", "DATABASE_URL",
            "BOOTSTRAP_TOKEN", "UPLOADS_BYTES_MAX", "SHUTDOWN_SECONDS",
            "PRICES_FILE",
            "BASE_MODELS_FILE",
            "OIDC_ISSUER", "OIDC_CLIENT_ID", "OIDC_LOGIN_CLIENT_ID", "OIDC_AUDIENCE", "OIDC_SCOPES",
            "OIDC_PERSON_CLAIM", "OIDC_GROUPS_CLAIM", "OIDC_ROLES",
            "OPERATOR_URL", "OPERATOR_TOKEN_FILE", "SECRET_KEY_FILE",
        )
    }  # fmt: skip
    for name, value in environment(container).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MUSTER_API_DATABASE_URL", "postgresql://muster:secret@db/muster")
    monkeypatch.setenv("MUSTER_API_PRICES_FILE", str(prices))
    models = tmp_path / "base-models.json"
    models.write_text(chart.find(EVERYTHING, "ConfigMap", "muster-base-models")["data"]["base-models.json"])
    monkeypatch.setenv("MUSTER_API_BASE_MODELS_FILE", str(models))
    monkeypatch.setenv("MUSTER_API_BOOTSTRAP_TOKEN", f"muster_{'a' * 32}")
    settings = ApiSettings()
    assert settings.base_models_file == models
    assert load_models(models).models, "they can be used"
    assert (settings.cluster, settings.auth, settings.port) == ("kubernetes", True, 8642)
    assert settings.default_checkpoint_uri == "s3://ckpt/muster"
    assert settings.operator_url == "http://muster-operator.muster-system", "the Service's name"
    assert settings.operator_token_file is not None
    mounted = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
    assert settings.operator_token_file.parent in mounted
    assert settings.secret_key_file is not None
    assert settings.secret_key_file.parent in mounted
    assert str(settings.files_place) == "s3://files/muster"
    assert settings.uploads_bytes_max == 10 << 30, "the size of the volume, else the pod is evicted with what arrives"
    monkeypatch.delenv("MUSTER_API_CHECKPOINT_URI")
    assert ApiSettings().default_checkpoint_uri is None, "the operator's own; never a folder of the API's pod"


@pytest.mark.parametrize(
    ("api", "replicas", "strategy", "claim"),
    [
        ({}, 1, "Recreate", "muster-api"),
        ({"persistence": {"existingClaim": "mine"}}, 1, "Recreate", "mine"),
        ({"persistence": {"enabled": False}}, 1, "Recreate", None),
        ({"replicas": 2, **POSTGRESQL}, 2, "RollingUpdate", None),
    ],
)
def test_the_api_keeps_its_history(chart: Chart, api: Object, replicas: int, strategy: str, claim: str | None) -> None:
    """In a volume with one writer, or in a database, where replicas may replace each other without a pause."""
    objects = chart.objects({"api": api})
    (deployment,) = [o for o in objects if (o["kind"], o["metadata"]["name"]) == ("Deployment", "muster-api")]
    spec = deployment["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (replicas, strategy)
    (container,) = spec["template"]["spec"]["containers"]
    assert "preStop" in container["lifecycle"], "else it refuses what proxies send to it that do not know yet"
    (state,) = [volume for volume in spec["template"]["spec"]["volumes"] if volume["name"] == "state"]
    assert state.get("persistentVolumeClaim", {}).get("claimName") == claim
    made = [o["metadata"]["name"] for o in objects if o["kind"] == "PersistentVolumeClaim"]
    assert made == (["muster-api"] if claim == "muster-api" else [])


@pytest.mark.parametrize(
    ("api", "why"),
    [
        ({"replicas": 2}, "api.replicas: SQLite has one writer"),
        ({"database": {"existingSecret": "muster"}}, "api.bootstrapToken.existingSecret: with a database"),
        ({"replicas": 2, **POSTGRESQL}, "api.uploads: an upload lies on the disk of the replica that it began at"),
    ],
)
def test_an_api_that_could_not_work_is_refused(chart: Chart, api: Object, why: str) -> None:
    with pytest.raises(Refused, match=re.escape(why)):
        chart.text({"api": api, "workers": {"filesUri": "s3://files/muster"}})


SHARED = {"name": "uploads", "persistentVolumeClaim": {"claimName": "mine"}}
OWN = {"name": "uploads", "emptyDir": {"sizeLimit": "3Gi"}}


@pytest.mark.parametrize(
    ("api", "volume", "bound"),
    [
        ({"replicas": 2, "uploads": {"existingClaim": "mine"}, **POSTGRESQL}, SHARED, None),
        ({"replicas": 2, "uploads": {"sticky": True, "size": "3Gi"}, **POSTGRESQL}, OWN, "3Gi"),
        ({"uploads": {"size": "3Gi"}, "persistence": {"enabled": False}}, OWN, "3Gi"),
        ({}, None, None),
    ],
)
def test_uploads_lie_where_every_replica_that_is_asked_finds_them(
    chart: Chart, api: Object, volume: Object | None, bound: str | None
) -> None:
    """In a shared claim; on a pod's own disk, whose bound the API knows; or in the API's own claim."""
    objects = chart.objects({"api": api, "workers": {"filesUri": "s3://files/muster"}})
    pod = pod_specs(objects)["muster-api"]
    assert [each for each in pod["volumes"] if each["name"] == "uploads"] == ([volume] if volume else [])
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    uploads = ApiSettings(state=Path(mounts["state"])).layout.uploads
    assert mounts.get("uploads", str(uploads)) == str(uploads)
    assert ("uploads" in mounts, environment(container).get("MUSTER_API_UPLOADS_BYTES_MAX")) == (bool(volume), bound)
    (service,) = [o for o in objects if (o["kind"], o["metadata"]["name"]) == ("Service", "muster-api")]
    sticky = "ClientIP" if api.get("uploads", {}).get("sticky") else None
    assert service["spec"].get("sessionAffinity") == sticky


def test_an_image_with_the_trainer_in_it_serves_and_does_not_train(chart: Chart) -> None:
    """Its own command is a worker's."""
    values = {"api": {"image": {"repository": "muster-trainer", "tag": "0.1.0-api"}}}
    (container,) = pod_specs(chart.objects(values))["muster-api"]["containers"]
    assert (container["image"], container["command"]) == ("muster-trainer:0.1.0-api", ["python", "-m", "muster.api"])


def test_the_pods_are_ready_by_an_answer_of_the_api_server_and_alive_without(chart: Chart) -> None:
    """A restart brings no API server back."""
    (container,) = pod_specs(chart.objects({}))["muster-operator"]["containers"]
    asked = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert asked == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}


def test_values_of_an_earlier_release_are_completed(chart: Chart) -> None:
    """`helm upgrade --reuse-values` hands over what the last release had, without the defaults that came since."""
    workers = dict.fromkeys(("envFrom", "resources", "readOnlyRootFilesystem", "disk"))
    metrics = {"serviceMonitor": {"enabled": True, "token": None}}
    objects = chart.objects({"workers": workers, "operator": {"policy": None}, "metrics": metrics})
    (container,) = pod_specs(objects)["muster-operator"]["containers"]
    given = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert given["MUSTER_OPERATOR_ENV_FROM"] == "[]"
    assert given["MUSTER_OPERATOR_READ_ONLY_ROOT"] == "true"
    policies = {item["metadata"]["name"] for item in objects if item["kind"] == "ValidatingAdmissionPolicy"}
    assert {"muster-operator-pods", "muster-operator-objects"} <= policies


PROMETHEUS: Object = {
    "namespaceSelector": {
        "matchExpressions": [
            {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["monitoring", "prometheus"]}
        ]
    },
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
}


def test_prometheus_may_scrape_the_operator_behind_its_policy(chart: Chart) -> None:
    """As it may the workers; it was shut out unless one knew of a second setting. A label alone let everybody in."""
    values: Object = merged(MONITORED, {"networkPolicy": {"enabled": True}})
    (rule,) = chart.find(values, "NetworkPolicy", "muster-operator")["spec"]["ingress"]
    assert PROMETHEUS in rule["from"]
    assert all("podSelector" in peer and peer.get("namespaceSelector") != {} for peer in rule["from"])
    assert rule["ports"] == [{"protocol": "TCP", "port": "metrics"}]
    closed: Object = merged(values, {"networkPolicy": {"metricsFrom": []}})
    assert chart.find(closed, "NetworkPolicy", "muster-operator")["spec"]["ingress"] == []


@pytest.mark.parametrize("scraped", [False, True])
def test_prometheus_reaches_the_api_only_where_it_is_to_scrape_it(chart: Chart, scraped: bool) -> None:
    """For the API's metrics are on its one port."""
    gateway = {"podSelector": {"matchLabels": {"app": "gateway"}}}
    values = {
        "networkPolicy": {"enabled": True, "apiFrom": [gateway]},
        "metrics": {"serviceMonitor": {"enabled": scraped}},
    }
    (rule,) = chart.find(values, "NetworkPolicy", "muster-api")["spec"]["ingress"]
    assert (gateway in rule["from"], PROMETHEUS in rule["from"]) == (True, scraped)


def test_workers_are_scraped_where_they_listen(chart: Chart) -> None:
    """In every namespace, by the label and the named port that the operator gives each of them."""
    spec = chart.find(MONITORED, "PodMonitor", "muster-workers")["spec"]
    pod = yaml.safe_load((ROOT / "tests/contract/golden/gpu-builtin.yaml").read_text())
    assert spec["namespaceSelector"] == {"any": True}
    assert {entry["key"] for entry in spec["selector"]["matchExpressions"]} <= set(pod["metadata"]["labels"])
    (container,) = pod["spec"]["containers"]
    assert spec["podMetricsEndpoints"][0]["port"] in [port["name"] for port in container["ports"]]


def test_the_api_may_handle_jobs_read_logs_and_nothing_else(chart: Chart) -> None:
    jobs, logs = chart.find({}, "ClusterRole", "muster-api")["rules"]
    assert (jobs["apiGroups"], jobs["resources"]) == (["muster.dev"], ["trainingjobs"])
    assert set(jobs["verbs"]) == {"get", "list", "watch", "create", "patch", "delete"}
    assert logs == {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]}
    assert [o for o in chart.objects({}) if o["kind"] == "Role" and o["metadata"]["name"] == "muster-api"] == []


def test_nothing_runs_as_an_install_hook(rendered: dict[str, list[Object]]) -> None:
    """Hooks for migrations deadlock with --wait: the pods wait for the hook, and the hook for the pods."""
    for objects in rendered.values():
        hooks = {(item["metadata"].get("annotations") or {}).get("helm.sh/hook") for item in objects}
        assert hooks == {None, "test"}


def test_the_rights_of_helm_test_go_with_it(chart: Chart) -> None:
    """An uninstall leaves hooks where they are; the pod stays for `helm test --logs`."""
    policies = {
        item["kind"]: item["metadata"]["annotations"]["helm.sh/hook-delete-policy"].split(",")
        for item in chart.objects({"operator": {"watchNamespace": "team"}})
        if "helm.sh/hook" in (item["metadata"].get("annotations") or {})
    }
    assert "hook-succeeded" not in policies.pop("Pod")
    assert set(policies) == {"ServiceAccount", "Role", "RoleBinding"}
    assert all("hook-succeeded" in policy for policy in policies.values()), policies


def test_the_definition_is_the_models_own_and_is_kept(chart: Chart) -> None:
    file = yaml.safe_load((CHART / "files" / "trainingjobs.yaml").read_text())
    name = "trainingjobs.muster.dev"
    kept = {"metadata": {"annotations": {"helm.sh/resource-policy": "keep"}}}
    assert chart.find({}, "CustomResourceDefinition", name) == merged(file, kept)
    assert chart.find({"crds": {"keep": False}}, "CustomResourceDefinition", name) == file
    role = chart.find({}, "ClusterRole", "muster-worker")  # without it no worker commits
    assert role == merged(chart.find({"crds": {"keep": False}}, "ClusterRole", "muster-worker"), kept)


def test_the_smoke_tests_job_is_a_job_and_its_mistake_the_only_one() -> None:
    """Compiled out of the program, which would ask an API server when imported."""
    source = (CHART / "files" / "smoke.py").read_text()
    (function,) = re.findall(r"^def job\(.*?(?=^\S)", source, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(function, names)
    assert TrainingJob.model_validate(names["job"]({"steps": 1})).metadata.name == "smoke"
    with pytest.raises(ValidationError) as refused:
        TrainingJob.model_validate(names["job"]({"steps": 1, "epochs": 1}))
    assert [error["loc"] for error in refused.value.errors()] == [("spec", "training", "length")]


def test_the_version_of_the_chart_is_the_programs() -> None:
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version


def test_selectors_name_nothing_that_an_upgrade_changes(rendered: dict[str, list[Object]]) -> None:
    """They are immutable: a version in one would make every upgrade fail."""
    for item in rendered["everything"]:
        if item["kind"] == "Deployment":
            assert set(item["spec"]["selector"]["matchLabels"]) == {
                "app.kubernetes.io/name",
                "app.kubernetes.io/instance",
                "app.kubernetes.io/component",
            }


def test_references_lead_to_objects_of_the_release(rendered: dict[str, list[Object]]) -> None:
    for name, objects in rendered.items():
        there = {(item["kind"], item["metadata"]["name"]) for item in objects}
        wanted = {
            (kind, item[key]["name"] if key == "roleRef" else item["metadata"]["name"])
            for item in objects
            for key, kind in (("roleRef", item.get("roleRef", {}).get("kind", "")),)
            if key in item
        }
        wanted |= {("ServiceAccount", spec["serviceAccountName"]) for spec in pod_specs(objects).values()}
        assert wanted <= there, name
