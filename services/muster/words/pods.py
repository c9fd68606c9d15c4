"""Settings of a job's pods in Kubernetes' own words: allowed nodes, labels and annotations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from muster.words.base import Many, Spec
from muster.words.fields import Text
from muster.words.names import GROUP

_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
PREFIX_LENGTH_MAX = 253


def label_key(text: str) -> str:
    """Check a label's key: `team` or `example.com/team`. Raises ValueError for what Kubernetes would refuse."""
    prefix, slash, name = text.rpartition("/")
    if not _NAME.fullmatch(name) or (slash and (len(prefix) > PREFIX_LENGTH_MAX or not _PREFIX.fullmatch(prefix))):
        raise ValueError(
            "must be at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit, "
            f"with a domain and '/' before it if you like (`example.com/team`), not {text!r}"
        )
    return text


def label_value(text: str) -> str:
    """Check a label's value: empty, or like a label's name. Raises ValueError for what Kubernetes would refuse."""
    if text and not _NAME.fullmatch(text):
        raise ValueError(
            "must be at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit, "
            f"not {text!r}"
        )
    return text


def _not_ours(key: str) -> str:
    if label_key(key).partition("/")[0] == GROUP or key.startswith("app.kubernetes.io/"):
        raise ValueError(f"{key} is set by Muster itself; choose another key")
    return key


LabelKey = Annotated[str, AfterValidator(label_key)]
LabelValue = Annotated[str, AfterValidator(label_value)]
OwnKey = Annotated[str, AfterValidator(_not_ours)]


class Toleration(Spec):
    """A taint of nodes that the pods put up with, as in a pod's spec."""

    key: LabelKey | None = None
    """The key of the taint; left out, every taint is meant."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Whether the taint's value must be equal to `value` or may be any."""
    value: LabelValue | None = None
    """The value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The effect of the taint; left out, every effect is meant."""
    toleration_seconds: int | None = None
    """Time that the pod stays on a node with effect NoExecute; left out, for ever."""

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.operator == "Exists" and self.value:
            raise ValueError("operator Exists takes no value")
        if self.key is None and self.operator != "Exists":
            raise ValueError("without a key the operator must be Exists, which tolerates everything")
        if self.toleration_seconds is not None and self.effect != "NoExecute":
            raise ValueError("tolerationSeconds is only for effect: NoExecute")
        return self

    def covers(self, key: str, value: str, effect: str) -> bool:
        """Return whether it tolerates that taint."""
        named = self.key is None or self.key == key
        return named and self.effect in (None, effect) and (self.operator == "Exists" or (self.value or "") == value)


class NodeRequirement(Spec):
    """Requirement on a node's label, as in a pod's node affinity."""

    key: LabelKey
    """The key of the label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """Comparison of the label with `values`."""
    values: Many[LabelValue] = ()
    """Several values for In and NotIn, none for Exists and DoesNotExist, one integer for Gt and Lt."""

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        if self.operator in ("In", "NotIn") and not self.values:
            raise ValueError(f"operator {self.operator} needs values")
        if self.operator in ("Exists", "DoesNotExist") and self.values:
            raise ValueError(f"operator {self.operator} takes no values")
        if self.operator in ("Gt", "Lt") and (len(self.values) != 1 or not _is_integer(self.values[0])):
            raise ValueError(f"operator {self.operator} needs one value, an integer")
        return self

    def met_by(self, labels: Mapping[str, str]) -> bool:
        has = labels.get(self.key)
        match self.operator:
            case "In":
                return has in self.values
            case "NotIn":
                return has not in self.values
            case "Exists":
                return has is not None
            case "DoesNotExist":
                return has is None
            case "Gt":
                return has is not None and _is_integer(has) and int(has) > int(self.values[0])
            case "Lt":
                return has is not None and _is_integer(has) and int(has) < int(self.values[0])


class NodeTerm(Spec):
    """All of its requirements hold. One without any matches no node, as in Kubernetes."""

    match_expressions: Many[NodeRequirement]
    """The requirements."""

    def met_by(self, labels: Mapping[str, str]) -> bool:
        return bool(self.match_expressions) and all(each.met_by(labels) for each in self.match_expressions)


class RequiredNodes(Spec):
    """Required properties of a node: at least one of the terms holds."""

    node_selector_terms: Annotated[Many[NodeTerm], Field(min_length=1)]
    """The terms."""


class PreferredNodes(Spec):
    """Preferred properties of a node."""

    weight: Annotated[int, Field(ge=1, le=100)]
    """Weight of the preference relative to others."""
    preference: NodeTerm
    """Preferred nodes."""


class NodeAffinity(Spec):
    """Node affinity of the pods, as in a pod's spec."""

    required_during_scheduling_ignored_during_execution: RequiredNodes | None = None
    """Requirements that every node must meet."""
    preferred_during_scheduling_ignored_during_execution: Many[PreferredNodes] = ()
    """Preferences for other schedulers; the builtin one places a gang close together and on the tightest fit."""


class Affinity(Spec):
    """Affinity of the pods. How near workers are to each other is set by gang.topology and gang.shareNodes."""

    node_affinity: NodeAffinity | None = None
    """Nodes that the pods may run on."""


class PodMarks(Spec):
    """Allowed nodes, labels and annotations of the pods."""

    node_selector: dict[LabelKey, LabelValue] = {}
    """Labels that each node must have."""
    tolerations: Many[Toleration] = ()
    """Taints of nodes that the pods tolerate, in addition to those that the platform tolerates."""
    affinity: Affinity | None = None
    """Nodes that the pods may run on, where labels alone can't say it."""
    labels: dict[OwnKey, LabelValue] = {}
    """Labels of the pods, in addition to Muster's own."""
    annotations: dict[OwnKey, str] = {}
    """Annotations of the pods, in addition to Muster's own."""
    image_pull_secrets: Many[Text] = ()
    """Names of Secrets in the job's namespace with which the image is pulled, in addition to the platform's own."""

    @property
    def node_terms(self) -> tuple[NodeTerm, ...]:
        """The terms of which a node must meet any; where there are none, every node will do."""
        towards = self.affinity.node_affinity if self.affinity is not None else None
        required = towards.required_during_scheduling_ignored_during_execution if towards is not None else None
        return required.node_selector_terms if required is not None else ()


def tolerated(taint: tuple[str, str, str], tolerations: Iterable[Toleration]) -> bool:
    """Return whether any of the tolerations covers a taint, given as its key, value and effect."""
    return any(toleration.covers(*taint) for toleration in tolerations)


def _is_integer(text: str) -> bool:
    return bool(re.fullmatch(r"-?[0-9]{1,18}", text))
