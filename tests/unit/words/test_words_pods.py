"""What a job says of its pods: typed, refused with its place where Kubernetes would refuse it, and meant as there."""

from typing import Any

import pytest

from muster.words.base import InvalidDocument, parse
from muster.words.job import Runtime
from muster.words.pods import NodeRequirement, Toleration, tolerated

TAINT = ("dedicated", "training", "NoSchedule")


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"labels": {"-team": "a"}}, r"labels.*-team.*at most 63"),
        ({"labels": {"team": "a b"}}, "labels.team: must be at most 63"),
        ({"labels": {"x" * 64: "a"}}, "at most 63"),
        ({"labels": {"Example.com/team": "a"}}, "not 'Example.com/team'"),
        ({"labels": {"muster.dev/job": "other"}}, "set by Muster itself"),
        ({"annotations": {"app.kubernetes.io/name": "x"}}, "set by Muster itself"),
        ({"nodeSelector": {"disk": "not this!"}}, "nodeSelector.disk: must be at most 63"),
        ({"tolerations": [{"operator": "Equal", "value": "x"}]}, r"tolerations\[0\]: without a key"),
        ({"tolerations": [{"key": "a", "operator": "Exists", "value": "x"}]}, "takes no value"),
        ({"tolerations": [{"key": "a", "effect": "Never"}]}, r"tolerations\[0\].effect"),
        ({"tolerations": [{"key": "a", "tolerationSeconds": 5}]}, "only for effect: NoExecute"),
        ({"affinity": {"podAffinity": {}}}, "podAffinity: unknown key"),
        ({"affinity": {"nodeAffinity": {"required": {}}}}, "required: unknown key"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_with_its_place(document: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidDocument, match=words):
        parse(Runtime, document, "runtime")


@pytest.mark.parametrize(
    ("toleration", "covers"),
    [
        ({"key": "dedicated", "value": "training"}, True),
        ({"key": "dedicated", "value": "training", "effect": "NoSchedule"}, True),
        ({"key": "dedicated", "value": "training", "effect": "NoExecute"}, False),
        ({"key": "dedicated"}, False),
        ({"key": "dedicated", "operator": "Exists"}, True),
        ({"key": "other", "operator": "Exists"}, False),
        ({"operator": "Exists"}, True),
        ({"operator": "Exists", "effect": "NoExecute"}, False),
    ],
)
def test_a_toleration_covers_what_it_covers_in_kubernetes(toleration: dict[str, Any], covers: bool) -> None:
    assert tolerated(TAINT, [parse(Toleration, toleration)]) is covers


@pytest.mark.parametrize(
    ("operator", "values", "has", "met"),
    [
        ("In", ["a", "b"], "a", True),
        ("In", ["a"], "c", False),
        ("In", ["a"], None, False),
        ("NotIn", ["a"], "c", True),
        ("NotIn", ["a"], None, True),
        ("NotIn", ["a"], "a", False),
        ("Exists", [], "", True),
        ("Exists", [], None, False),
        ("DoesNotExist", [], None, True),
        ("DoesNotExist", [], "a", False),
        ("Gt", ["4"], "8", True),
        ("Gt", ["4"], "4", False),
        ("Gt", ["4"], "many", False),
        ("Lt", ["4"], "2", True),
        ("Lt", ["4"], None, False),
    ],
)
def test_a_requirement_is_met_as_in_kubernetes(operator: str, values: list[str], has: str | None, met: bool) -> None:
    requirement = parse(NodeRequirement, {"key": "size", "operator": operator, "values": values})
    assert requirement.met_by({"size": has} if has is not None else {}) is met
