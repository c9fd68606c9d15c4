"""Checks of `muster doctor`: one function per line of its table, in the order in which an installation needs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from muster.cli.cluster_connection import PLURAL, cluster_errors, message_of
from muster.cli.cluster_rights import operator_rights, own_rights
from muster.cli.examined_cluster import ExaminedCluster
from muster.cli.findings import Finding, Lines
from muster.cli.store_probe import checkpoint_store
from muster.recipe.schema import definition
from muster.words.names import GROUP, VERSION
from muster.words.text import plural

# CEL rules in definitions are general since 1.29, and the TrainingJob has some.
MINOR_MIN = 29
# Group of each gang scheduler that `gang.scheduler.kind` can name, and what it is called there.
SCHEDULERS = {
    "kueue.x-k8s.io": "kueue",
    "scheduling.volcano.sh": "volcano",
    "scheduling.run.ai": "kai",
    "scheduling.x-k8s.io": "coscheduling",
    "scheduling.k8s.io": "workload",
}
DEVICES = ("nvidia.com/gpu", "amd.com/gpu", "habana.ai/gaudi", "google.com/tpu")
EFA = "vpc.amazonaws.com/efa"
LEASE_SECONDS = 60.0  # several times what a leader may be silent
RENEWAL_SECONDS_MAX = 8.0  # a leader renews its lease every three seconds
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


def examine(examined: ExaminedCluster) -> list[Finding]:
    """Return the findings of every check. A check without permission reports that as a warning; a cluster that does not
    answer ends them all.

    Raises CliError when the cluster does not answer or does not know us.
    """
    from kubernetes.client.exceptions import ApiException

    with cluster_errors(examined.cluster, "ask for its version"):
        findings = [_version(examined)]
    for title, check in CHECKS.items():
        with cluster_errors(examined.cluster, f"look at {title}"):
            try:
                findings += [Finding(title, *line) for line in check(examined)]
            except ApiException as error:
                if error.status == 401:
                    raise
                next_step = "ask somebody who may to run this, or for the right to look"
                findings.append(Finding(title, "warning", f"can't look: {message_of(error)}", next_step))
    return findings


def _version(examined: ExaminedCluster) -> Finding:
    version = examined.ask(examined.api("VersionApi").get_code)
    minor = int("".join(letter for letter in version.minor if letter.isdigit()) or 0)
    if int(version.major) > 1 or minor >= MINOR_MIN:
        return Finding("kubernetes", "ok", version.git_version)
    return Finding("kubernetes", "failure", version.git_version, f"upgrade the cluster to 1.{MINOR_MIN} or later")


def _definition(examined: ExaminedCluster) -> Lines:
    name, install = f"{PLURAL}.{GROUP}", "install or upgrade the chart (docs/install.md)"
    definition = examined.find(examined.api("CustomObjectsApi").get_cluster_custom_object, *_CRDS, name)
    if definition is None:
        yield "failure", f"there is no {name}", install
        return
    conditions = {each["type"]: each["status"] for each in definition.get("status", {}).get("conditions", ())}
    versions = {version["name"]: version for version in definition["spec"]["versions"]}
    if conditions.get("Established") != "True":
        yield "failure", f"{name} is not established", "kubectl describe crd " + name
    elif VERSION not in versions or not versions[VERSION]["served"]:
        yield "failure", f"{name} serves {', '.join(versions)}, and this Muster speaks {VERSION}", install
    elif _schema(versions[VERSION]) != _schema(_own_version()):
        yield "warning", f"{name} {VERSION} is not the schema of this Muster: another version installed it", install
    else:
        yield "ok", f"{name} {VERSION}, as this Muster has it"


_CRDS = ("apiextensions.k8s.io", "v1", "customresourcedefinitions")


def _own_version() -> dict[str, Any]:
    return next(version for version in definition()["spec"]["versions"] if version["name"] == VERSION)


def _schema(version: dict[str, Any]) -> Any:
    """Return the schema without its descriptions, whose words may change from version to version."""
    return _without_text(version["schema"]["openAPIV3Schema"].get("properties", {}).get("spec"))


def _without_text(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_text(value) for key, value in node.items() if not _is_text(key, value)}
    return [_without_text(item) for item in node] if isinstance(node, list) else node


def _is_text(key: str, value: Any) -> bool:
    return key == "description" and isinstance(value, str)


def _operator(examined: ExaminedCluster) -> Lines:
    if examined.operator is None:
        problem = f"no Deployment muster-operator in namespace {examined.system}"
        yield "failure", problem, "install the chart, or name its namespace with --system"
        return
    only, namespace = examined.served_namespace, examined.cluster.namespace
    if only and namespace != only:
        yield (
            "failure",
            f"the operator serves namespace {only} alone, not {namespace}",
            f"submit to it: --namespace {only}",
        )
    status, image = examined.operator.status, examined.operator.spec.template.spec.containers[0].image
    replicas, ready = examined.operator.spec.replicas or 0, status.ready_replicas or 0
    if ready:
        yield "ok", f"{ready} of {replicas} ready, {image}"
    else:
        next_step = f"kubectl -n {examined.system} describe deployment muster-operator"
        yield "failure", f"none of {plural(replicas, 'replica')} is ready, {image}", next_step


def _leader(examined: ExaminedCluster) -> Lines:
    """Ready operators may still have nobody who leads; then jobs get no status at all."""
    lease = _lease(examined)
    if lease is None or not lease.spec.holder_identity or lease.spec.renew_time is None:
        yield "failure", "no operator holds the lease muster-operator, so nobody acts on jobs", _operator_log(examined)
        return
    renewed = lease.spec.renew_time
    if abs((datetime.now(UTC) - renewed).total_seconds()) > LEASE_SECONDS:
        # This machine's clock may be the one that is wrong: a lease that is renewed before our eyes is held.
        time.sleep(RENEWAL_SECONDS_MAX)
        lease = _lease(examined)
        if lease is None or lease.spec.renew_time == renewed:
            problem = f"the operator's lease was last renewed at {renewed:%Y-%m-%dT%H:%M:%SZ}, so nobody acts on jobs"
            yield "failure", problem, _operator_log(examined)
            return
    yield "ok", f"{lease.spec.holder_identity} leads"


def _lease(examined: ExaminedCluster) -> Any:
    read = examined.api("CoordinationV1Api").read_namespaced_lease
    return examined.find(read, "muster-operator", examined.system)


def _operator_log(examined: ExaminedCluster) -> str:
    return f"kubectl -n {examined.system} logs -l app.kubernetes.io/component=operator --tail=20"


def _agents(examined: ExaminedCluster) -> Lines:
    agent = examined.find(examined.api("AppsV1Api").read_namespaced_daemon_set, "muster-agent", examined.system)
    if agent is None:
        yield "warning", "no agents: Xid errors, spot notices and ill disks are not heard of", "agent.enabled=true"
        return
    desired, ready = agent.status.desired_number_scheduled, agent.status.number_ready
    if ready < desired:
        next_step = f"kubectl -n {examined.system} get pods -l app.kubernetes.io/component=agent -o wide"
        yield "warning", f"{ready} of {plural(desired, 'agent')} ready", next_step
    else:
        yield "ok", f"{plural(desired, 'agent')} ready"


def _schedulers(examined: ExaminedCluster) -> Lines:
    names = sorted(kind for group, kind in SCHEDULERS.items() if group in examined.groups and _serves(examined, group))
    if names:
        yield "ok", f"builtin, and {', '.join(names)} (gang.scheduler.kind)"
    else:
        yield "ok", "builtin: the operator itself starts gangs whole; Kueue, Volcano, KAI and others are not installed"


def _serves(examined: ExaminedCluster, group: str) -> bool:
    """scheduling.k8s.io is everywhere (priority classes); gangs are in its alpha and beta versions only."""
    return group != "scheduling.k8s.io" or any(version != "v1" for version in examined.groups[group])


def _devices(examined: ExaminedCluster) -> Lines:
    if not examined.nodes:
        yield "failure", "the cluster has no nodes", "add nodes: without them no gang starts"
        return
    totals = {name: sum(int(_allocatable(node).get(name, 0)) for node in examined.nodes) for name in DEVICES}
    plugins = [f"{count} × {name}" for name, count in totals.items() if count]
    classes = []
    if "resource.k8s.io" in examined.groups:
        served = examined.groups["resource.k8s.io"]
        versions = sorted(served, key=lambda version: ("alpha" in version, "beta" in version))
        listed = examined.ask(
            examined.api("CustomObjectsApi").list_cluster_custom_object, "resource.k8s.io", versions[0], "deviceclasses"
        )
        classes = [item["metadata"]["name"] for item in listed["items"]]
    parts = [*plugins, *([f"DRA classes: {', '.join(classes)}"] if classes else [])]
    if parts:
        yield "ok", f"{'; '.join(parts)} on {plural(len(examined.nodes), 'node')}"
    else:
        next_step = "install the GPU operator (or a DRA driver); jobs with gpusPerNode: 0 need none"
        yield "warning", f"no accelerators on {plural(len(examined.nodes), 'node')}", next_step


def _allocatable(node: Any) -> dict[str, str]:
    return dict(node.status.allocatable or {})


# Instance families whose network between nodes is EFA (docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html).
_EFA_FAMILIES = ("p4d.", "p4de.", "p5.", "p5e.", "p5en.", "p6", "trn1.", "trn1n.", "trn2.", "g6e.48", "g5.48")


def _efa(examined: ExaminedCluster) -> Lines:
    able = [node for node in examined.nodes if _instance_type(node).startswith(_EFA_FAMILIES)]
    without = [node.metadata.name for node in able if not int(_allocatable(node).get(EFA, 0))]
    if not able:
        yield "ok", "no nodes with EFA hardware: gangs speak over TCP"
    elif without:
        next_step = "install the EFA device plugin (aws-efa-k8s-device-plugin)"
        yield (
            "warning",
            f"{len(without)} of {plural(len(able), 'node')} with EFA hardware do not offer {EFA}",
            next_step,
        )
    else:
        yield "ok", f"{plural(len(able), 'node')} offer {EFA}"


def _instance_type(node: Any) -> str:
    return str((node.metadata.labels or {}).get("node.kubernetes.io/instance-type", ""))


def _storage_class(examined: ExaminedCluster) -> Lines:
    classes = examined.ask(examined.api("StorageV1Api").list_storage_class).items
    default = [each.metadata.name for each in classes if (each.metadata.annotations or {}).get(DEFAULT_CLASS) == "true"]
    if default:
        yield "ok", default[0]
    else:
        if examined.keeps_no_volume:
            yield "ok", "none is the default, and the API keeps its history in a database"
            return
        next_step = (
            "name one in api.persistence.storageClassName for the API's volume, or use PostgreSQL (docs/install.md)"
        )
        yield "warning", f"none of {len(classes)} storage classes is the default", next_step


def _prometheus(examined: ExaminedCluster) -> Lines:
    if "monitoring.coreos.com" in examined.groups:
        yield "ok", "the Prometheus Operator is installed: PodMonitors and rules of the chart are taken up"
    else:
        yield (
            "warning",
            "no Prometheus Operator",
            "scrape port 8080 of the operator's pods another way (docs/install.md)",
        )


CHECKS: dict[str, Callable[[ExaminedCluster], Lines]] = {
    "definition": _definition,
    "your rights": own_rights,
    "operator": _operator,
    "leader": _leader,
    "operator's rights": operator_rights,
    "agents": _agents,
    "gang schedulers": _schedulers,
    "devices": _devices,
    "efa": _efa,
    "storage class": _storage_class,
    "checkpoint store": checkpoint_store,
    "monitoring": _prometheus,
}
