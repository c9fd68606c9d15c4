"""Rights that a cluster must grant, and whether it does: to the person who asks, and to the operator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from muster.cli.cluster_connection import PLURAL
from muster.cli.examined_cluster import ExaminedCluster
from muster.cli.findings import Lines
from muster.words.names import GROUP


@dataclass(frozen=True)
class AccessRight:
    """A verb on a resource; one `of_cluster` belongs to no namespace."""

    verb: str
    resource: str
    group: str = ""
    of_cluster: bool = False

    @property
    def kind(self) -> str:
        """Return the kind as kubectl spells it."""
        resource, slash, subresource = self.resource.partition("/")
        return f"{resource}{f'.{self.group}' if self.group else ''}{slash}{subresource}"


def _rights(verbs: str, resource: str, group: str = "", of_cluster: bool = False) -> tuple[AccessRight, ...]:
    return tuple(AccessRight(verb, resource, group, of_cluster) for verb in verbs.split())


OWN_RIGHTS = (
    *_rights("get list watch create patch", PLURAL, GROUP),
    *_rights("get list", "pods"),
    *_rights("get", "pods/log"),
    *_rights("list", "events"),
)
# What the operator does all day; the chart's roles have the whole list.
OPERATOR_RIGHTS = (
    *_rights("get list watch patch delete", PLURAL, GROUP),
    *_rights("update", f"{PLURAL}/status", GROUP),
    *_rights("get list watch create patch delete", "pods"),
    *_rights("get create", "services"),
    *_rights("get list watch", "nodes", of_cluster=True),
    *_rights("create", "events", "events.k8s.io"),
)


def own_rights(examined: ExaminedCluster) -> Lines:
    """Return the rights that a person needs to submit jobs."""
    namespace = examined.cluster.namespace
    missing = [right for right in OWN_RIGHTS if not _may(examined, right, namespace, None)]
    if missing:
        problem = f"you may not {_describe_rights(missing)} in namespace {namespace}"
        yield "failure", problem, "ask for the role muster-user there (docs/install.md)"
    else:
        yield "ok", f"you may submit, watch and change jobs in namespace {namespace}"


def operator_rights(examined: ExaminedCluster) -> Lines:
    """Return the rights that the operator needs: in the one namespace that it serves, or else in all."""
    account, only = f"system:serviceaccount:{examined.system}:muster-operator", examined.served_namespace
    where = f" in namespace {only}" if only else ""
    missing = [right for right in OPERATOR_RIGHTS if not _may(examined, right, only, account)]
    if missing:
        yield "failure", f"{account} may not {_describe_rights(missing)}{where}", "install or upgrade the chart"
    else:
        yield "ok", f"{account} may do what it must{where}"


def _describe_rights(rights: Iterable[AccessRight]) -> str:
    """Describe the rights, as in `get, list pods; create services`."""
    verbs: dict[str, list[str]] = {}
    for right in rights:
        verbs.setdefault(right.kind, []).append(right.verb)
    return "; ".join(f"{', '.join(each)} {kind}" for kind, each in verbs.items())


def _may(examined: ExaminedCluster, right: AccessRight, namespace: str, account: str | None) -> bool:
    """Return whether we, or that account, have the right, as the API server's authorizers decide. namespace:
    empty for all of them."""
    resource, _, subresource = right.resource.partition("/")
    asked = {"verb": right.verb, "group": right.group, "resource": resource, "subresource": subresource}
    asked |= {"namespace": namespace} if namespace and not right.of_cluster else {}
    spec: dict[str, Any] = {"resourceAttributes": asked}
    api = examined.api("AuthorizationV1Api")
    if account is None:
        answer = examined.ask(api.create_self_subject_access_review, {"spec": spec})
    else:
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{account.split(':')[2]}", "system:authenticated"]
        answer = examined.ask(api.create_subject_access_review, {"spec": spec | {"user": account, "groups": groups}})
    return bool(answer.status.allowed)
