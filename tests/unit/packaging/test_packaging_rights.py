"""What the chart lets the operator do and who may reach the gangs, in a whole cluster and in one namespace."""

import json

import pytest
from tests.unit.packaging.chart import Chart, Object, Refused, environment, pod_specs
from tests.unit.packaging.value_sets import EVERYTHING

from muster.api.core.admission_policy import LIMITS, LimitedProject, limit_entries
from muster.api.core.limits import ProjectLimits

EVERY_LIMIT = ProjectLimits(
    service_account="nlp",
    secrets=("s3",),
    claims=("data",),
    namespaces=("default",),
    checkpoint_prefix="s3://checkpoints/nlp/",
    data_prefixes=("s3://data/nlp",),
    endpoints=("https://wandb.example.com",),
    gang_sizes=(1, 2),
    instance_types=("p5.48xlarge",),
    images=("registry.example.com/team/*",),
)


@pytest.mark.parametrize(("version", "there"), [("1.29.0", False), ("1.30.0", True)])
def test_the_admission_policy_is_installed_where_it_is_served(chart: Chart, version: str, there: bool) -> None:
    kinds = {item["kind"] for item in chart.objects({}, "--kube-version", version)}
    assert ({"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"} <= kinds) is there


def test_projects_limits_are_kept_where_there_is_an_api_that_writes_them(chart: Chart) -> None:
    api = {"api": {"enabled": True, "persistence": {"enabled": False}}}
    policy = chart.find(api, "ValidatingAdmissionPolicy", "project-limits.muster.dev")["spec"]
    binding = chart.find(api, "ValidatingAdmissionPolicyBinding", "project-limits.muster.dev")["spec"]
    assert policy["failurePolicy"] == "Fail", "a rule that can't be judged must not let anything in"
    assert policy["matchConditions"][0]["expression"].endswith('!= "system:serviceaccount:muster-system:muster-api"')
    written = {"name": LIMITS, "namespace": "muster-system", "parameterNotFoundAction": "Allow"}
    assert binding["paramRef"] == written
    may = [
        rule
        for rule in chart.find(api, "Role", "muster-api-quotas")["rules"]
        if LIMITS in rule.get("resourceNames", [])
    ]
    assert [rule["verbs"] for rule in may] == [["update"]]
    judged = json.dumps(policy)
    for key in limit_entries([LimitedProject("nlp", "nlp", EVERY_LIMIT, secrets=("own",))]):
        assert f'\\"{key.removeprefix("nlp")}\\"' in judged, f"the policy does not look at {key}"
    for off in ({"api": {"enabled": False}}, api | {"crds": {"policy": False}}):
        kinds = {(item["kind"], item["metadata"]["name"]) for item in chart.objects(off)}
        assert ("ValidatingAdmissionPolicy", "project-limits.muster.dev") not in kinds


def test_no_job_is_in_the_namespaces_of_kubernetes_and_of_the_release(chart: Chart) -> None:
    """Whoever makes it, with an API or without one; and an operator of one namespace has another than its own."""
    for values in ({}, {"api": {"enabled": False}}):
        policy = chart.find(values, "ValidatingAdmissionPolicy", "namespaces.muster.dev")["spec"]
        assert (policy["failurePolicy"], "matchConditions" in policy) == ("Fail", False)
        (rule,) = policy["validations"]
        assert rule["expression"] == (
            "!request.namespace.matches('^(kube|openshift)-') && request.namespace != 'muster-system'"
        )
    (container,) = pod_specs(chart.objects({}))["muster-api"]["containers"]
    assert environment(container)["MUSTER_API_NAMESPACE"] == "muster-system"
    with pytest.raises(Refused, match="the release's own namespace"):
        chart.objects({"operator": {"watchNamespace": "muster-system"}})


def test_the_operators_own_account_is_confined_to_workers(chart: Chart) -> None:
    """tests/cluster/test_cluster_operator_policy.py has the API server judge by them."""
    for values, suffix in (({}, ""), ({"operator": {"watchNamespace": "team"}}, "-team")):
        for name in (f"muster-operator-pods{suffix}", f"muster-operator-objects{suffix}"):
            policy = chart.find(values, "ValidatingAdmissionPolicy", name)["spec"]
            (condition,) = policy["matchConditions"]
            assert condition["expression"] == (
                "request.userInfo.username == 'system:serviceaccount:muster-system:muster-operator'"
            )
            assert policy["failurePolicy"] == "Fail"
            binding = chart.find(values, "ValidatingAdmissionPolicyBinding", name)["spec"]
            assert binding == {"policyName": name, "validationActions": ["Deny"]}
    pods = chart.find({}, "ValidatingAdmissionPolicy", "muster-operator-pods")["spec"]
    assert pods["matchConstraints"]["resourceRules"][0]["operations"] == ["CREATE", "UPDATE", "DELETE"]
    owned, *others = sorted((each["expression"] for each in pods["validations"]), key=lambda each: "asBefore" in each)
    assert "ownerReferences" in owned
    assert all(each.startswith("variables.asBefore || ") for each in others), "what was let in earlier may still go"
    # The API server of the cluster tests admits no privileged pod in the first place.
    assert "each.securityContext.privileged" in json.dumps(pods["validations"])
    judged = {resource for rule in _made_by_the_operator(chart) for resource in rule["resources"]}
    objects = chart.find({}, "ValidatingAdmissionPolicy", "muster-operator-objects")["spec"]
    covered = {rule["resources"][0] for rule in objects["matchConstraints"]["resourceRules"]} | {"pods"}
    # Groups of gang schedulers and templates of claims name devices and counts; an event is a line of text.
    assert judged - covered == {"resourceclaimtemplates", "events", "podgroups", "workloads"}
    off = {item["metadata"]["name"] for item in chart.objects({"operator": {"policy": False}})}
    assert not off & {"muster-operator-pods", "muster-operator-objects"}


def test_the_api_takes_folders_of_nodes_only_where_the_operators_pods_are_not_judged(chart: Chart) -> None:
    for values, said in (({}, None), ({"operator": {"policy": False}}, "true")):
        (container,) = pod_specs(chart.objects(values))["muster-api"]["containers"]
        assert environment(container).get("MUSTER_API_HOST_PATHS") == said


def _made_by_the_operator(chart: Chart) -> list[Object]:
    rules: list[Object] = chart.find({}, "ClusterRole", "muster-operator")["rules"]
    return [rule for rule in rules if "create" in rule["verbs"]]


def test_an_operator_of_one_namespace_has_rights_in_that_one_only(chart: Chart) -> None:
    objects = chart.objects({"operator": {"watchNamespace": "team"}})
    kept = {"muster-operator-nodes-team", "muster-edit", "muster-view"}
    assert {item["metadata"]["name"] for item in objects if item["kind"] == "ClusterRole"} == kept
    (nodes,) = [
        item for item in objects if item["metadata"]["name"] == "muster-operator-nodes-team" and "rules" in item
    ]
    assert {verb for rule in nodes["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    everywhere = {rule["resources"][0] for rule in nodes["rules"]}
    assert everywhere == {"nodes", "priorityclasses", "deviceclasses"}
    roles = {(item["metadata"]["name"], item["metadata"]["namespace"]) for item in objects if item["kind"] == "Role"}
    assert roles == {
        ("muster-operator-jobs", "team"), ("muster-worker", "team"), ("muster-api", "team"),
        ("muster-operator", "muster-system"), ("muster-api-quotas", "muster-system"), ("muster-test", "muster-system"),
        ("muster-test", "team"),
    }  # fmt: skip
    wide = next(
        o for o in chart.objects({}) if (o["kind"], o["metadata"]["name"]) == ("ClusterRole", "muster-operator")
    )
    narrow = next(o for o in objects if (o["kind"], o["metadata"]["name"]) == ("Role", "muster-operator-jobs"))
    renamed = [
        rule | {"resources": ["roles"]} if rule["resources"] == ["clusterroles"] else rule for rule in wide["rules"]
    ]
    assert narrow["rules"] == renamed
    specs = pod_specs(objects)
    for name, variable in (("muster-operator", "MUSTER_OPERATOR_"), ("muster-api", "MUSTER_API_")):
        assert environment(specs[name]["containers"][0])[f"{variable}WATCH_NAMESPACE"] == "team"


def test_gangs_have_a_network_policy_unless_told_otherwise(chart: Chart) -> None:
    objects = chart.objects({})
    (container,) = pod_specs(objects)["muster-operator"]["containers"]
    operator, prometheus = json.loads(environment(container)["MUSTER_OPERATOR_REPORT_FROM"])
    (deployment,) = [o for o in objects if (o["kind"], o["metadata"]["name"]) == ("Deployment", "muster-operator")]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert operator["podSelector"]["matchLabels"].items() <= labels.items(), "or no heartbeat would be heard"
    assert operator["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "muster-system"}}
    assert prometheus["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "prometheus"}
    (names,) = prometheus["namespaceSelector"]["matchExpressions"]
    assert names["values"] == ["monitoring", "prometheus"], "whoever makes pods elsewhere chooses their labels"
    off = chart.objects({"workers": {"networkPolicy": {"enabled": False}}})
    (container,) = pod_specs(off)["muster-operator"]["containers"]
    assert "MUSTER_OPERATOR_REPORT_FROM" not in environment(container)


def test_the_api_writes_secrets_where_it_is_told_to_and_reads_none(chart: Chart) -> None:
    roles = [item for item in chart.objects(EVERYTHING) if item["kind"] in ("Role", "ClusterRole")]
    rules = [(item["kind"], item["metadata"], rule) for item in roles for rule in item["rules"]]
    found = [each for each in rules if "secrets" in each[2]["resources"]]
    assert [(kind, meta["namespace"], rule["verbs"]) for kind, meta, rule in found] == [
        ("Role", "nlp", ["create", "patch", "delete"]),
        ("Role", "cv", ["create", "patch", "delete"]),
    ]


def test_permissions_hold_no_wildcard_and_no_secret(chart: Chart) -> None:
    told = EVERYTHING | {"api": EVERYTHING["api"] | {"secrets": {"namespaces": []}}}
    rules = [rule for item in chart.objects(told) for rule in item.get("rules") or () if "verbs" in rule]
    own = chart.objects({}, "--show-only", "templates/operator-rbac.yaml")
    assert len(rules) > len([rule for item in own for rule in item.get("rules") or ()]) > 15
    for rule in rules:
        assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]], rule
        assert "secrets" not in rule["resources"], rule


def test_the_settings_of_the_sign_in_are_those_that_the_api_reads(
    chart: Chart, monkeypatch: pytest.MonkeyPatch
) -> None:
    from muster.api.core.settings import ApiSettings

    (container,) = pod_specs(chart.objects(EVERYTHING))["muster-api"]["containers"]
    for name, value in environment(container).items():
        if name.startswith(("MUSTER_API_OIDC_", "MUSTER_API_PUBLIC_URL")):
            monkeypatch.setenv(name, value)
    found = ApiSettings()
    assert (found.oidc_issuer, found.oidc_client_id, found.oidc_login_client_id, found.oidc_audience) == (
        "https://id.example.com", "muster", "muster-login", "muster-api",
    )  # fmt: skip
    assert (found.oidc_scopes, found.oidc_person_claim, found.oidc_groups_claim) == (
        ("openid", "groups"), "email", "realm_access.roles",
    )  # fmt: skip
    assert found.oidc_roles == {"ml": {"nlp": "member"}, "platform": "admin"}
    assert found.public_url == "https://muster.example.com"


def test_behind_the_chart_s_ingress_the_api_knows_its_own_address(chart: Chart) -> None:
    told = {"api": {"ingress": {"enabled": True, "host": "m.example.com", "tlsSecretName": "tls"}}}
    (container,) = pod_specs(chart.objects(told))["muster-api"]["containers"]
    assert environment(container)["MUSTER_API_PUBLIC_URL"] == "https://m.example.com"
