"""What `muster doctor` looks at: a function per line of its table, in the order in which an installation needs them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from muster.cli.cluster_connection import PLURAL, TIMEOUT_SECONDS, Cluster, cluster_errors, message_of
from muster.contract.names import GROUP, VERSION
from muster.contract.schema import definition
from muster.contract.text import plural

State = Literal["ok", "warning", "failure"]

# CEL rules in definitions are general since 1.29, and the TrainingJob has some.
MINOR_MIN = 29
STORE_SECONDS_MAX = 90.0
POLL_SECONDS = 1.0
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
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


@dataclass(frozen=True)
class Right:
    """A verb on a resource, in the namespace of the jobs or (cluster-wide) everywhere."""

    verb: str
    resource: str
    group: str = ""
    everywhere: bool = False

    @property
    def kind(self) -> str:
        """As kubectl spells it."""
        resource, slash, subresource = self.resource.partition("/")
        return f"{resource}{f'.{self.group}' if self.group else ''}{slash}{subresource}"


def _rights(verbs: str, resource: str, group: str = "", everywhere: bool = False) -> tuple[Right, ...]:
    return tuple(Right(verb, resource, group, everywhere) for verb in verbs.split())


OWN_RIGHTS = (
    *_rights("get list watch create patch", PLURAL, GROUP),
    *_rights("get list", "pods"),
    *_rights("get", "pods/log"),
    *_rights("list", "events"),
)
# What the operator does all day; the chart's ClusterRole has the whole list.
OPERATOR_RIGHTS = (
    *_rights("get list watch patch delete", PLURAL, GROUP, everywhere=True),
    *_rights("update", f"{PLURAL}/status", GROUP, everywhere=True),
    *_rights("get list watch create patch delete", "pods", everywhere=True),
    *_rights("get create", "services", everywhere=True),
    *_rights("get list watch", "nodes", everywhere=True),
    *_rights("create", "events", "events.k8s.io", everywhere=True),
)


@dataclass(frozen=True)
class Finding:
    """One line. next_step: empty when nothing needs to be done."""

    check: str
    state: State
    message: str
    next_step: str = ""

    def document(self) -> dict[str, str]:
        line = asdict(self)
        return {"check": line["check"], "state": line["state"], "message": line["message"], "next": line["next_step"]}


@dataclass
class Clinic:
    """The cluster that is examined. store, image: given by the person, else found in the installation."""

    cluster: Cluster
    system: str
    store: str | None = None
    image: str | None = None
    tolerance: float = STORE_SECONDS_MAX  # seconds that the store's pod may take

    def api(self, name: str) -> Any:
        """An API of the official client, such as AppsV1Api."""
        from kubernetes import client

        return getattr(client, name)(self.cluster.api)

    def ask(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        return call(*arguments, _request_timeout=TIMEOUT_SECONDS, **more)

    def find(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The object, or None where there is none."""
        from kubernetes.client.exceptions import ApiException

        try:
            return self.ask(call, *arguments)
        except ApiException as error:
            if error.status != 404:
                raise
            return None

    @cached_property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The API groups that are served, each with its versions."""
        served = self.ask(self.api("ApisApi").get_api_versions).groups
        return {group.name: tuple(version.version for version in group.versions) for group in served}

    @cached_property
    def nodes(self) -> list[Any]:
        return list(self.ask(self.api("CoreV1Api").list_node).items)

    @cached_property
    def operator(self) -> Any:
        """The operator's Deployment, or None."""
        return self.find(self.api("AppsV1Api").read_namespaced_deployment, "muster-operator", self.system)

    def setting(self, name: str) -> str | None:
        """A variable of the operator's container."""
        containers = self.operator.spec.template.spec.containers if self.operator is not None else ()
        found = (each.value for container in containers for each in container.env or () if each.name == name)
        return next(found, None)


def examine(clinic: Clinic) -> list[Finding]:
    """Every check's lines. A check that may not look says so as a warning; a cluster that does not answer ends it all.

    Raises CliError when the cluster does not answer or does not know us.
    """
    from kubernetes.client.exceptions import ApiException

    with cluster_errors(clinic.cluster, "ask for its version"):
        found = [_version(clinic)]
    for title, check in CHECKS.items():
        with cluster_errors(clinic.cluster, f"look at {title}"):
            try:
                found += [Finding(title, *line) for line in check(clinic)]
            except ApiException as error:
                if error.status == 401:
                    raise
                next_step = "ask somebody who may to run this, or for the right to look"
                found.append(Finding(title, "warning", f"can't look: {message_of(error)}", next_step))
    return found


Lines = Iterator[tuple[State, str] | tuple[State, str, str]]


def _version(clinic: Clinic) -> Finding:
    version = clinic.ask(clinic.api("VersionApi").get_code)
    minor = int("".join(letter for letter in version.minor if letter.isdigit()) or 0)
    if int(version.major) > 1 or minor >= MINOR_MIN:
        return Finding("kubernetes", "ok", version.git_version)
    return Finding("kubernetes", "failure", version.git_version, f"upgrade the cluster to 1.{MINOR_MIN} or later")


def _definition(clinic: Clinic) -> Lines:
    name, install = f"{PLURAL}.{GROUP}", "install or upgrade the chart (docs/install.md)"
    found = clinic.find(clinic.api("CustomObjectsApi").get_cluster_custom_object, *_CRDS, name)
    if found is None:
        yield "failure", f"there is no {name}", install
        return
    conditions = {each["type"]: each["status"] for each in found.get("status", {}).get("conditions", ())}
    versions = {version["name"]: version for version in found["spec"]["versions"]}
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
    """Without the descriptions, which may be told better from version to version."""
    return _without_text(version["schema"]["openAPIV3Schema"].get("properties", {}).get("spec"))


def _without_text(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_text(value) for key, value in node.items() if not _is_text(key, value)}
    return [_without_text(item) for item in node] if isinstance(node, list) else node


def _is_text(key: str, value: Any) -> bool:
    return key == "description" and isinstance(value, str)


def _own_rights(clinic: Clinic) -> Lines:
    missing = [right for right in OWN_RIGHTS if not _may(clinic, right, None)]
    where = f"in namespace {clinic.cluster.namespace}"
    if missing:
        told = f"you may not {_told(missing)} {where}"
        yield "failure", told, "ask for the role muster-user there (docs/install.md)"
    else:
        yield "ok", f"you may submit, watch and change jobs {where}"


def _operator_rights(clinic: Clinic) -> Lines:
    account = f"system:serviceaccount:{clinic.system}:muster-operator"
    missing = [right for right in OPERATOR_RIGHTS if not _may(clinic, right, account)]
    if missing:
        yield "failure", f"{account} may not {_told(missing)}", "install or upgrade the chart"
    else:
        yield "ok", f"{account} may do what it must"


def _told(rights: Iterable[Right]) -> str:
    """`get, list pods; create services`."""
    verbs: dict[str, list[str]] = {}
    for right in rights:
        verbs.setdefault(right.kind, []).append(right.verb)
    return "; ".join(f"{', '.join(each)} {kind}" for kind, each in verbs.items())


def _may(clinic: Clinic, right: Right, account: str | None) -> bool:
    """Whether we, or that account, have the right: the API server decides, by whatever authorizes there."""
    resource, _, subresource = right.resource.partition("/")
    asked = {"verb": right.verb, "group": right.group, "resource": resource, "subresource": subresource}
    asked |= {} if right.everywhere else {"namespace": clinic.cluster.namespace}
    spec: dict[str, Any] = {"resourceAttributes": asked}
    api = clinic.api("AuthorizationV1Api")
    if account is None:
        answer = clinic.ask(api.create_self_subject_access_review, {"spec": spec})
    else:
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{account.split(':')[2]}", "system:authenticated"]
        answer = clinic.ask(api.create_subject_access_review, {"spec": spec | {"user": account, "groups": groups}})
    return bool(answer.status.allowed)


def _operator(clinic: Clinic) -> Lines:
    if clinic.operator is None:
        told = f"no Deployment muster-operator in namespace {clinic.system}"
        yield "failure", told, "install the chart, or name its namespace with --system"
        return
    status, image = clinic.operator.status, clinic.operator.spec.template.spec.containers[0].image
    wanted, ready = clinic.operator.spec.replicas or 0, status.ready_replicas or 0
    if ready:
        yield "ok", f"{ready} of {wanted} ready, {image}"
    else:
        next_step = f"kubectl -n {clinic.system} describe deployment muster-operator"
        yield "failure", f"none of {plural(wanted, 'replica')} is ready, {image}", next_step


def _agents(clinic: Clinic) -> Lines:
    agent = clinic.find(clinic.api("AppsV1Api").read_namespaced_daemon_set, "muster-agent", clinic.system)
    if agent is None:
        yield "warning", "no agents: Xid errors, spot notices and ill disks are not heard of", "agent.enabled=true"
        return
    wanted, ready = agent.status.desired_number_scheduled, agent.status.number_ready
    if ready < wanted:
        next_step = f"kubectl -n {clinic.system} get pods -l app.kubernetes.io/component=agent -o wide"
        yield "warning", f"{ready} of {plural(wanted, 'agent')} ready", next_step
    else:
        yield "ok", f"{plural(wanted, 'agent')} ready"


def _schedulers(clinic: Clinic) -> Lines:
    found = sorted(kind for group, kind in SCHEDULERS.items() if group in clinic.groups and _serves(clinic, group))
    if found:
        yield "ok", f"builtin, and {', '.join(found)} (gang.scheduler.kind)"
    else:
        yield "ok", "builtin: the operator itself starts gangs whole; Kueue, Volcano, KAI and others are not installed"


def _serves(clinic: Clinic, group: str) -> bool:
    """scheduling.k8s.io is everywhere (priority classes); gangs are in its alpha and beta versions only."""
    return group != "scheduling.k8s.io" or any(version != "v1" for version in clinic.groups[group])


def _devices(clinic: Clinic) -> Lines:
    if not clinic.nodes:
        yield "failure", "the cluster has no nodes", "add nodes: without them no gang starts"
        return
    totals = {name: sum(int(_allocatable(node).get(name, 0)) for node in clinic.nodes) for name in DEVICES}
    plugins = [f"{count} × {name}" for name, count in totals.items() if count]
    classes = []
    if "resource.k8s.io" in clinic.groups:
        versions = sorted(clinic.groups["resource.k8s.io"], key=lambda version: ("alpha" in version, "beta" in version))
        listed = clinic.ask(
            clinic.api("CustomObjectsApi").list_cluster_custom_object, "resource.k8s.io", versions[0], "deviceclasses"
        )
        classes = [item["metadata"]["name"] for item in listed["items"]]
    parts = [*plugins, *([f"DRA classes: {', '.join(classes)}"] if classes else [])]
    if parts:
        yield "ok", f"{'; '.join(parts)} on {plural(len(clinic.nodes), 'node')}"
    else:
        next_step = "install the GPU operator (or a DRA driver); jobs with gpusPerNode: 0 need none"
        yield "warning", f"no accelerators on {plural(len(clinic.nodes), 'node')}", next_step


def _allocatable(node: Any) -> dict[str, str]:
    return dict(node.status.allocatable or {})


# Instance families whose network between nodes is EFA (docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html).
_EFA_FAMILIES = ("p4d.", "p4de.", "p5.", "p5e.", "p5en.", "p6", "trn1.", "trn1n.", "trn2.", "g6e.48", "g5.48")


def _efa(clinic: Clinic) -> Lines:
    able = [node for node in clinic.nodes if _instance_type(node).startswith(_EFA_FAMILIES)]
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


def _storage_class(clinic: Clinic) -> Lines:
    classes = clinic.ask(clinic.api("StorageV1Api").list_storage_class).items
    default = [each.metadata.name for each in classes if (each.metadata.annotations or {}).get(DEFAULT_CLASS) == "true"]
    if default:
        yield "ok", default[0]
    else:
        next_step = (
            "the API's volume then needs api.persistence.storageClass, or PostgreSQL elsewhere (docs/install.md)"
        )
        yield "warning", f"none of {plural(len(classes), 'storage class')[:-1]}es is the default", next_step


def _prometheus(clinic: Clinic) -> Lines:
    if "monitoring.coreos.com" in clinic.groups:
        yield "ok", "the Prometheus Operator is installed: PodMonitors and rules of the chart are taken up"
    else:
        yield "warning", "no Prometheus Operator", "scrape the annotated pods another way (docs/monitoring.md)"


def _store(clinic: Clinic) -> Lines:
    """A pod of the workers' image and service account asks the store, as a worker would."""
    uri = clinic.store or clinic.setting("MUSTER_OPERATOR_CHECKPOINT_URI")
    image = clinic.image or clinic.setting("MUSTER_OPERATOR_IMAGE")
    if not uri or not image:
        lack = "checkpoint store (--store)" if not uri else "worker image (--image)"
        yield "warning", f"not tried: the installation names no {lack}", "give it, or set it in the chart's values"
        return
    core, namespace = clinic.api("CoreV1Api"), clinic.cluster.namespace
    name = f"muster-doctor-{uuid.uuid4().hex[:8]}"
    account = clinic.setting("MUSTER_OPERATOR_SERVICE_ACCOUNT") or None
    clinic.ask(core.create_namespaced_pod, namespace, _pod(name, image, uri, account))
    try:
        phase, why = _wait_for(clinic, name)
        if phase == "Succeeded":
            yield "ok", f"{uri} answers a pod of {image}"
        elif phase == "Failed":
            log = (clinic.ask(core.read_namespaced_pod_log, name, namespace) or "").strip().splitlines()
            yield "failure", f"a pod of {image} can't use {uri}: {log[-1] if log else why}", _STORE_NEXT
        else:
            next_step = f"kubectl -n {namespace} describe nodes; try again with --image of one that can be pulled"
            yield (
                "warning",
                f"not known: the pod that tries it did not run within {clinic.tolerance:g} s ({why})",
                next_step,
            )
    finally:
        clinic.ask(core.delete_namespaced_pod, name, namespace, grace_period_seconds=0)


_STORE_NEXT = "check address, bucket policy and the workers' service account (docs/install.md)"


def _pod(name: str, image: str, uri: str, account: str | None) -> dict[str, Any]:
    """Such as the restricted Pod Security Standard lets in."""
    container = {
        "name": "store",
        "image": image,
        "command": ["python", "-m", "muster.trainer.checkpoint", "ls", uri, "--json"],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": int(STORE_SECONDS_MAX) + 30,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    labels = {"app.kubernetes.io/name": "muster-doctor"}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": spec | ({"serviceAccountName": account} if account else {}),
    }


def _wait_for(clinic: Clinic, name: str) -> tuple[str, str]:
    """The pod's phase when it has ended or the patience has, and why it is not further."""
    deadline = time.monotonic() + clinic.tolerance
    while True:
        pod = clinic.ask(clinic.api("CoreV1Api").read_namespaced_pod, name, clinic.cluster.namespace)
        phase = str(pod.status.phase)
        if phase in ("Succeeded", "Failed") or time.monotonic() > deadline:
            return phase, _reason(pod)
        time.sleep(POLL_SECONDS)


def _reason(pod: Any) -> str:
    states = [status.state.waiting for status in pod.status.container_statuses or () if status.state.waiting]
    messages: Iterable[str] = (each.message or "" for each in pod.status.conditions or () if each.status != "True")
    return (states[0].reason if states else "") or next((text for text in messages if text), str(pod.status.phase))


CHECKS: dict[str, Callable[[Clinic], Lines]] = {
    "definition": _definition,
    "your rights": _own_rights,
    "operator": _operator,
    "operator's rights": _operator_rights,
    "agents": _agents,
    "gang schedulers": _schedulers,
    "devices": _devices,
    "efa": _efa,
    "storage class": _storage_class,
    "checkpoint store": _store,
    "monitoring": _prometheus,
}
