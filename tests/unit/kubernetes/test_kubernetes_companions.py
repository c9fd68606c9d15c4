"""What stands beside a gang's pods: only its members, the operator and Prometheus reach them; one account reads."""

import re

import pytest
from tests.tidy.repository import ROOT
from tests.unit.kubernetes.making import make_job

from muster.operator.kubernetes.companions import NAME_LENGTH_MAX, fence_binding, network_policy, service
from muster.operator.kubernetes.render import SiteSettings

OPERATOR = {"podSelector": {"matchLabels": {"app": "muster-operator"}}}


def test_only_members_meet_and_only_watchers_look() -> None:
    policy = network_policy(make_job(), SiteSettings(image="", report_from=(OPERATOR,)))
    assert policy is not None
    members = {"matchLabels": {"muster.dev/job-uid": make_job().uid}}
    assert policy["spec"] == {
        "podSelector": members,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": members}]},
            {"from": [OPERATOR], "ports": [{"protocol": "TCP", "port": 29501}]},
        ],
    }


def test_who_has_no_members_lets_only_watchers_in() -> None:
    alone = make_job(gang={"nodes": 1, "gpusPerNode": 8})
    policy = network_policy(alone, SiteSettings(image="", report_from=(OPERATOR,)))
    assert policy is not None
    assert [rule["from"] for rule in policy["spec"]["ingress"]] == [[OPERATOR]]


def test_an_operator_that_does_not_know_who_it_is_locks_nobody_out() -> None:
    assert network_policy(make_job(), SiteSettings(image="")) is None


def test_the_fence_is_for_the_workers_account_alone() -> None:
    binding = fence_binding("team", "training", namespaced=False)
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "training", "namespace": "team"}]
    assert (binding["metadata"]["name"], binding["roleRef"]["kind"]) == ("muster-worker-training", "ClusterRole")
    assert fence_binding("team", "training", namespaced=True)["roleRef"]["kind"] == "Role"


@pytest.mark.parametrize("length", [1, 239, 240, 253])
def test_accounts_of_any_length_have_bindings_of_their_own(length: int) -> None:
    first, second = (fence_binding("team", "a" * (length - 1) + end, False)["metadata"]["name"] for end in "ab")
    assert first != second
    assert len(first) <= NAME_LENGTH_MAX


def test_the_documents_remove_the_bindings_of_workers_by_their_label() -> None:
    """A name would find none: each account has its own."""
    text = (ROOT / "docs" / "operations.md").read_text()
    ((key, value),) = re.findall(r"kubectl delete rolebinding -n team -l (\S+)=(\w+)", text)
    assert fence_binding("team", "default", namespaced=False)["metadata"]["labels"][key] == value


def test_one_service_names_all_workers_of_a_namespace() -> None:
    made = service("team")
    assert made["spec"]["clusterIP"] == "None"
    assert made["spec"]["selector"].items() <= make_labels().items()


def make_labels() -> dict[str, str]:
    from muster.operator.kubernetes.render import labels_of

    return labels_of(make_job())
