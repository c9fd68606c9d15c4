"""A decision about a worker as a pod. Pure: the same job, attempt and worker make the same manifest.

Every pod passes the *restricted* Pod Security Standard, except that EFA needs IPC_LOCK (docs/kubernetes.md).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache

from muster.kube.client import Object
from muster.operator.core.decision import CreateWorker
from muster.operator.kubernetes import network
from muster.operator.kubernetes.jobs import CachedJob
from muster.operator.kubernetes.nodes import GPU
from muster.operator.kubernetes.pods import KEEPER, PREFLIGHT, PREPARE, TRAINER
from muster.words.address import AddressError, job_folder
from muster.words.base import Spec, dump, dump_json
from muster.words.gang import Quantity, Resources
from muster.words.job import worker_config
from muster.words.names import (
    FIRST_INCARNATION,
    GROUP,
    KEEPER_STATE,
    KIND,
    VERSION,
    Env,
    Label,
    Rendezvous,
    WorkerId,
    worker_name,
)
from muster.words.notices import NOTICES_ENV, NOTICES_PATH
from muster.words.pods import Toleration
from muster.words.quantities import quantity

SCHEDULER_LABEL = f"{GROUP}/scheduler"
OVERRIDES = f"{GROUP}/overrides"
RENDEZVOUS_PORT, REPORT_PORT = 29_500, 29_501
USER = 1000  # in the trainer image
# A spot notice gives two minutes (AWS); the core gives 110 s to commit, and the kubelet must not be quicker than that.
GRACE_SECONDS = 120
ROOT = "/muster"
FENCE_FOLDER = "/var/run/secrets/muster.dev"
TERMINATION_LOG = "/dev/termination-log"
TOKEN_SECONDS = 3600
CLAIMS_API = "resource.k8s.io/v1"  # Dynamic Resource Allocation, from Kubernetes 1.34 on
DEVICES = "devices"
WORKERS = "muster-workers"  # the headless service of each namespace that has gangs of several workers
OURS = {"app.kubernetes.io/name": "muster-worker", "app.kubernetes.io/managed-by": "muster"}
HOST = "kubernetes.io/hostname"
LAUNCHER = f"{ROOT}/launcher"  # where a program's image finds its launcher
LAUNCHER_VOLUME = "muster-launcher"
# The keeper reads and sends files in blocks. It asks for nothing, so that it fits wherever the program does, and a node
# that runs out of memory ends it first; a namespace with quotas wants both to be named.
KEEPER_RESOURCES: Object = {"requests": {"cpu": "0", "memory": "0"}, "limits": {"memory": "4Gi"}}
# Of the job's own variables those by which a store or a hub is reached; others may steer an interpreter that is ours.
_STORE_VARIABLES = ("AWS_", "HF_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_MOUNT_KEYS = ("mountPath", "subPath", "readOnly")


class DiskLimits(Spec):
    """Size limits of a worker's folders, as Kubernetes quantities; None means no limit.

    A pod that holds more is evicted by its kubelet, which is then its job's fault and not the node's.
    """

    tmp: Quantity | None = "20Gi"
    """The folder for temporary files: programs' own files, and what is compiled at run time."""
    worker: Quantity | None = "20Gi"
    """Logs, metrics and records of the attempt."""
    cache: Quantity | None = None
    """Prepared data, fetched models, HOME. As large as the data are, so only an installation can limit it."""


@dataclass(frozen=True, slots=True, eq=False)  # known by identity: a key of what is kept per gang
class SiteSettings:
    """Settings that are the same for every worker of a cluster.

    `image` and `checkpoint_uri` hold for jobs that name none. `api_server` is its address as workers reach it. Workers
    look at their node before the gang meets if `preflight` says so; None means where it has GPUs. `preflight_answers`
    (`gpus=exclude,disk=retry`) says what follows a failed check where the job does not. The node agents listen on
    `agent_port` of their nodes; 0 means that there are none. `report_from` are the peers, in a NetworkPolicy's form,
    that may reach the workers' report port in addition to their own gang; if it is empty, no policy is made.
    `fence_audience` is the audience of the token by which workers ask whether their attempt is current; empty means the
    API server's own. Only jobs of `watch_namespace` are served, by the rights of a Role there; empty means all. `s3`
    holds variables of muster.storage.settings. Each worker also gets the variables of `env_from`, over which those of
    its job win, and asks for `resources` where its job asks for none. `read_only_root`: it can write to its volumes
    alone, each of which holds as much as `disk` says.
    """

    image: str
    api_server: str = "https://kubernetes.default.svc"
    checkpoint_uri: str = ""
    tolerations: tuple[Toleration, ...] = ()
    service_account: str = "default"
    image_pull_secrets: tuple[str, ...] = ()
    preflight: bool | None = None
    preflight_answers: str = ""
    agent_port: int = 0
    report_from: tuple[Object, ...] = ()
    fence_audience: str = ""
    watch_namespace: str = ""
    s3: dict[str, str] = field(default_factory=dict)
    env_from: tuple[Object, ...] = ()
    resources: Resources = field(default_factory=Resources)
    read_only_root: bool = True
    disk: DiskLimits = field(default_factory=DiskLimits)

    def account(self, job: CachedJob) -> str:
        """The service account of the job's workers."""
        return job.spec.runtime.service_account_name or self.service_account


class UnrenderableJob(ValueError):
    """The job can't become a pod; the message names the path in its spec and what to do."""


def owner_reference(job: CachedJob) -> Object:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def checkpoint_folder(job: CachedJob, site: SiteSettings) -> str:
    uri = job.spec.checkpoint.uri or site.checkpoint_uri
    if not uri:
        raise UnrenderableJob(
            "spec.checkpoint.uri: is not set, and this cluster has no default; name an s3:// folder there, "
            "or let your administrator set the operator's checkpoint address"
        )
    if job.status.checkpoint is not None and job.status.checkpoint.uri:
        return job.status.checkpoint.uri  # whatever became of labels and defaults since
    try:
        return str(job_folder(uri, job.id))
    except AddressError as error:
        raise UnrenderableJob(f"spec.checkpoint.uri: {error}") from None


def claims_name(job: str) -> str:
    return f"{job}-{DEVICES}"


def claimed_by(job: CachedJob) -> dict[str, str]:
    """Device classes by which the job claims devices, by what they are."""
    classes = job.spec.gang.device_classes
    by_kind = {"gpus": classes.gpus, "efa": classes.efa if job.spec.gang.network.efa == "auto" else None}
    return {what: name for what, name in by_kind.items() if name}


def render_pod(
    job: CachedJob, action: CreateWorker, site: SiteSettings, scheduler: str, instance_type: str = ""
) -> Object:
    """The pod of one worker, before its gang scheduler has a say."""
    spec = job.spec
    same = _same_for_all(job, site, instance_type, action.id.attempt, len(action.nodes), action.resume_step)
    which = {
        Env.WORKER: str(action.id.worker),
        Env.INCARNATION: str(action.id.incarnation),
        Rendezvous.NODE_RANK: str(action.id.worker),
    }
    container = same.container | {"env": [*same.container["env"], *_variables(which)]}
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": worker_name(job.name, action.id),
            "namespace": job.namespace,
            "labels": spec.runtime.labels
            | labels_of(job)
            | {
                Label.ATTEMPT: str(action.id.attempt),
                Label.WORKER: str(action.id.worker),
                Label.INCARNATION: str(action.id.incarnation),
                SCHEDULER_LABEL: scheduler,
            },
            "annotations": spec.runtime.annotations | same.annotations,
            "ownerReferences": [owner_reference(job)],
        },
        "spec": {
            "restartPolicy": "Never",
            "hostname": worker_name(job.name, replace(action.id, incarnation=FIRST_INCARNATION)),
            "subdomain": WORKERS,
            "serviceAccountName": site.account(job),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "tolerations": [dump(each) for each in (*site.tolerations, *spec.runtime.tolerations)],
            "containers": [container],
            "volumes": same.volumes,
        },
    }
    if secrets := dict.fromkeys((*spec.runtime.image_pull_secrets, *site.image_pull_secrets)):
        pod["spec"]["imagePullSecrets"] = [{"name": secret} for secret in secrets]
    if spec.runtime.node_selector:
        pod["spec"]["nodeSelector"] = dict(spec.runtime.node_selector)
    if spec.runtime.affinity is not None:
        pod["spec"]["affinity"] = dump(spec.runtime.affinity)
    if claimed_by(job):
        pod["spec"]["resourceClaims"] = [{"name": DEVICES, "resourceClaimTemplateName": claims_name(job.name)}]
    if spec.priority_class_name:
        pod["spec"]["priorityClassName"] = spec.priority_class_name
    helper = _in_own_image(job, site, container) if spec.program is not None else None
    before: list[Object] = []
    if spec.gang.gpus_per_node > 0 if site.preflight is None else site.preflight:
        before.append(_preflight(container if helper is None else container | helper, _answers(job, site)))
    if helper is not None:
        before += _program_helpers(container | helper, site)
    if before:
        pod["spec"]["initContainers"] = before
    return pod


def pin(pod: Object, node: str) -> None:
    """The scheduler may choose only this node, as with a DaemonSet: it is still asked, so ports and volumes count."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    pod["spec"]["affinity"] = {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": [term]}}}


def hold_back(pod: Object, gate: str) -> None:
    """Keep the pod from being scheduled before the gate is lifted."""
    pod["spec"].setdefault("schedulingGates", []).append({"name": gate})


def require_node_affinity(pod: Object, job: CachedJob, now: float) -> None:
    """Require nodes, for schedulers that choose them themselves: only suitable instance types, no excluded node, and
    one worker of the gang on each unless it may share them."""
    affinity = pod["spec"].setdefault("affinity", {})
    if job.status.gang.wanted > 1 and not job.spec.gang.share_nodes:
        # Not by attempt: Kueue takes a pod into the group that it admitted only where its spec is as the others' were.
        apart = {"labelSelector": {"matchLabels": {Label.JOB_UID: job.uid}}, "topologyKey": HOST}
        affinity["podAntiAffinity"] = {_REQUIRED: [apart]}
    expressions: list[Object] = []
    if job.spec.gang.instance_types:
        expressions.append(
            {
                "key": "node.kubernetes.io/instance-type",
                "operator": "In",
                "values": list(job.spec.gang.instance_types),
            }
        )
    avoided = sorted({entry.node for entry in job.status.excluded_nodes if entry.until > now})
    if avoided:
        expressions.append({"key": HOST, "operator": "NotIn", "values": avoided})
    if expressions:
        towards = affinity.setdefault("nodeAffinity", {})
        terms = towards.get(_REQUIRED, {}).get("nodeSelectorTerms") or [{"matchExpressions": []}]
        both = [{"matchExpressions": [*term["matchExpressions"], *expressions]} for term in terms]
        towards[_REQUIRED] = {"nodeSelectorTerms": both}
    if not affinity:
        del pod["spec"]["affinity"]


def labels_of(job: CachedJob) -> dict[str, str]:
    return {Label.JOB: job.name, Label.JOB_UID: job.uid} | OURS


def _annotations(net: network.NetworkPlan) -> dict[str, str]:
    """Return the annotations of a pod. Nobody should move a training pod to save a node; the operator moves the whole
    gang when it must."""
    kept = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    return kept | ({OVERRIDES: "; ".join(net.overrides)} if net.overrides else {})


def _image(job: CachedJob, site: SiteSettings) -> str:
    image = job.spec.runtime.image or site.image
    if not image:
        raise UnrenderableJob(
            "spec.runtime.image: is not set, and this cluster has no default; name the trainer's image there"
        )
    return image


def _own_image(site: SiteSettings) -> str:
    """Return the image of Muster's trainer that runs beside a program."""
    if not site.image:
        raise UnrenderableJob(
            "spec.program: needs the cluster's trainer image in addition to the program's own, and this cluster has no "
            "default; let your administrator set the operator's trainer image"
        )
    return site.image


@dataclass(frozen=True, slots=True)
class _CommonPodParts:
    """Common part of a gang's pods. It is shared by all of them and must not be changed."""

    container: Object
    volumes: list[Object]
    annotations: dict[str, str]


@lru_cache(maxsize=64)
def _same_for_all(
    job: CachedJob, site: SiteSettings, instance_type: str, attempt: int, size: int, resume_step: int
) -> _CommonPodParts:
    spec = job.spec
    net = network.plan(instance_type, spec.gang, {variable.name: variable.value for variable in spec.runtime.env})
    volumes, mounts = _volumes(job, site)
    container: Object = {
        "name": TRAINER,
        "image": _image(job, site),
        "command": ["python", "-m", "muster.trainer.launch"] if spec.program is None else ["python3", LAUNCHER],
        "env": _environment(job, site, net, attempt, size, resume_step),
        "envFrom": [*_platform_sources(job, site), *spec.runtime.env_from],  # of one name, the last one holds
        "ports": [
            {"name": "rendezvous", "containerPort": RENDEZVOUS_PORT},
            {"name": "report", "containerPort": REPORT_PORT},
        ],
        "resources": _resources(job, net),
        "volumeMounts": mounts,
        "securityContext": _container_security(net, site.read_only_root),
        "terminationMessagePath": TERMINATION_LOG,
        # Where the worker could not even write its own record, the last lines of its log say why.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return _CommonPodParts(container, volumes, _annotations(net))


def _platform_sources(job: CachedJob, site: SiteSettings) -> tuple[Object, ...]:
    """Return the sources of variables that the platform gives a worker's main container. They hold the store's
    credentials, which a training needs and a program does not: its helpers read and write the store."""
    return site.env_from if job.spec.program is None else ()


def _environment(
    job: CachedJob, site: SiteSettings, net: network.NetworkPlan, attempt: int, size: int, resume_step: int
) -> list[Object]:
    spec, meta = job.spec, job.summary
    first = worker_name(job.name, WorkerId(attempt, 0))
    # A worker that has nobody to meet needs no name service to do so.
    meeting = f"{first}.{WORKERS}.{job.namespace}.svc" if size > 1 else "127.0.0.1"
    settings = {
        "PYTHONUNBUFFERED": "1",
        "HOME": f"{ROOT}/cache",  # the image's user owns nothing else
        "USER": "muster",
    }
    settings |= net.environment | {variable.name: variable.value for variable in spec.runtime.env}
    read = {each.name: dump(each.value_from) for each in spec.runtime.env if each.value_from is not None}
    settings |= {
        Env.JOB: job.name,
        Env.JOB_UID: meta.uid,
        Env.ATTEMPT: str(attempt),
        Env.RESUME_STEP: str(resume_step),
        Env.CHECKPOINT_URI: checkpoint_folder(job, site),
        **(_store_settings(job, site) if spec.program is None else {}),
        Env.CONFIG: dump_json(worker_config(job.spec, job.status)),
        Env.WORKER_DIR: f"{ROOT}/worker",
        Env.CACHE_DIR: f"{ROOT}/cache",
        Env.FENCE: f"{site.api_server}/apis/{GROUP}/{VERSION}/namespaces/{job.namespace}/trainingjobs/{job.name}",
        Env.FENCE_TOKEN_FILE: f"{FENCE_FOLDER}/token",
        Env.FENCE_CA_FILE: f"{FENCE_FOLDER}/ca.crt",
        Env.REPORT_PORT: str(REPORT_PORT),
        Env.TERMINATION_LOG: TERMINATION_LOG,
        Rendezvous.NODES: str(size),
        Rendezvous.RANKS_PER_NODE: str(spec.gang.ranks_per_node),
        Rendezvous.HOST: meeting,
        Rendezvous.PORT: str(RENDEZVOUS_PORT),
    }
    settings[Env.DEVICE] = "cuda" if spec.gang.gpus_per_node else "cpu"
    if "OMP_NUM_THREADS" not in settings:
        cores = quantity(spec.gang.resources.cpu) or 1.0
        settings["OMP_NUM_THREADS"] = str(max(1, int(cores) // spec.gang.ranks_per_node))
    addresses = {Env.POD_IP: "status.podIP"}
    if site.agent_port:
        settings[NOTICES_ENV] = f"http://{{host}}:{site.agent_port}{NOTICES_PATH}"
        addresses[Env.HOST_IP] = "status.hostIP"
    addressed = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in addresses.items()]
    given = {name: value for name, value in settings.items() if name not in read}
    return [*_variables(given), *({"name": name, "valueFrom": source} for name, source in read.items()), *addressed]


def _store_settings(job: CachedJob, site: SiteSettings) -> dict[str, str]:
    return site.s3 | job.spec.checkpoint.variables


def _variables(settings: dict[str, str]) -> list[Object]:
    return [{"name": name, "value": value} for name, value in settings.items()]


def _resources(job: CachedJob, net: network.NetworkPlan) -> Object:
    gang = job.spec.gang
    # Memory that may be exceeded is memory that is not there when a step needs it; cores may be shared.
    limits: dict[str, str] = {}
    if gang.gpus_per_node and not gang.device_classes.gpus:
        limits[GPU] = str(gang.gpus_per_node)
    limits |= net.resources
    if gang.resources.memory:
        limits["memory"] = gang.resources.memory
    cpu = {"cpu": gang.resources.cpu} if gang.resources.cpu else {}
    claims: Object = {"claims": [{"name": DEVICES}]} if claimed_by(job) else {}
    return {"requests": limits | cpu, "limits": limits} | claims


def _volumes(job: CachedJob, site: SiteSettings) -> tuple[list[Object], list[Object]]:
    memory = job.spec.gang.resources.memory
    shared: Object = {"medium": "Memory"}
    if memory:  # it counts as the container's memory; half of it is what Linux itself gives /dev/shm
        shared["sizeLimit"] = str(int(quantity(memory) / 2))
    own = {"audience": site.fence_audience} if site.fence_audience else {}
    token = {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_SECONDS} | own}
    authority = {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
    training = job.spec.program is None
    volumes: list[Object] = [
        {"name": "shm", "emptyDir": shared},
        # A program's checkpoints and inputs lie there, too, and are as large as they are.
        {"name": "worker", "emptyDir": _limited(site.disk.worker if training else site.disk.cache)},
        {"name": "cache", "emptyDir": _limited(site.disk.cache)},
        {"name": "fence", "projected": {"sources": [token, authority]}},
    ]
    mounts: list[Object] = [
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - where torch looks for it
        {"name": "worker", "mountPath": f"{ROOT}/worker"},
        {"name": "cache", "mountPath": f"{ROOT}/cache"},
        {"name": "fence", "mountPath": FENCE_FOLDER, "readOnly": True},
    ]
    if not training:
        volumes.append({"name": LAUNCHER_VOLUME, "emptyDir": {}})
        mounts.append({"name": LAUNCHER_VOLUME, "mountPath": LAUNCHER, "readOnly": True})
        mounts += [
            {"name": "worker", "mountPath": f"{ROOT}/worker/{folder}", "subPath": folder, "readOnly": True}
            for folder in _READ_ONLY
        ]
    for index, volume in enumerate(job.spec.runtime.volumes):
        name = volume.get("name")
        if not isinstance(name, str) or name in _OWN_VOLUMES:
            raise UnrenderableJob(
                f"spec.runtime.volumes[{index}].name: must be text other than Muster's own, not {name!r}"
            )
        volumes.append({key: value for key, value in volume.items() if key not in _MOUNT_KEYS})
        mount = {key: volume[key] for key in _MOUNT_KEYS if key in volume}
        mounts.append({"name": name, "mountPath": f"/mnt/{name}"} | mount)
    if all(str(mount["mountPath"]).rstrip("/") != _TMP for mount in mounts):  # the job may have brought its own
        volumes.append({"name": "muster-tmp", "emptyDir": _limited(site.disk.tmp)})
        mounts.append({"name": "muster-tmp", "mountPath": _TMP})
    return volumes, mounts


_OWN_VOLUMES = ("shm", "worker", "cache", "fence", "muster-tmp", LAUNCHER_VOLUME)
_READ_ONLY = ("source", "inputs")  # folders of the worker's that a program may not change; its working folder is a copy
_TMP = "/tmp"  # noqa: S108 - where every program looks for it


def _limited(size: str | None) -> Object:
    return {"sizeLimit": size} if size else {}


def _container_security(net: network.NetworkPlan, read_only_root: bool) -> Object:
    capabilities: Object = {"drop": ["ALL"]}
    if net.capabilities:
        capabilities["add"] = list(net.capabilities)
    read_only: Object = {"readOnlyRootFilesystem": True} if read_only_root else {}
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities} | read_only


def _answers(job: CachedJob, site: SiteSettings) -> str:
    """Return the preflight answers. Those of the job come last, so they win."""
    from_spec = [f"{check}={answer}" for check, answer in job.spec.recovery.preflight.items()]
    return ",".join([*([site.preflight_answers] if site.preflight_answers else []), *from_spec])


def _preflight(trainer: Object, answers: str) -> Object:
    """The same container, which looks before the gang meets: GPUs, disk, the way to the others."""
    environment = [*trainer["env"], *([{"name": Env.PREFLIGHT, "value": answers}] if answers else [])]
    command = ["python", "-m", "muster.trainer.launch.preflight"]
    return copy.deepcopy(trainer) | {"name": PREFLIGHT, "command": command, "env": environment, "ports": []}


def _in_own_image(job: CachedJob, site: SiteSettings, main: Object) -> Object:
    """Return what changes where Muster's own image runs beside a program: it has what the program has not, the store's
    credentials and leave to write, and nothing of the program's that would steer it."""
    steering = {variable.name for variable in job.spec.runtime.env if not variable.name.startswith(_STORE_VARIABLES)}
    settings = {**_store_settings(job, site), Env.LAUNCHER_DIR: LAUNCHER}
    return {
        "image": _own_image(site),
        "env": [each for each in main["env"] if each["name"] not in {*steering, *settings}] + _variables(settings),
        "envFrom": [*site.env_from, *job.spec.runtime.env_from],
        "volumeMounts": [
            mount | {"readOnly": False} if mount["name"] == LAUNCHER_VOLUME else mount
            for mount in main["volumeMounts"]
            # A kubelet would make these folders as root, before they are made by who fills them.
            if mount["name"] != "worker" or "subPath" not in mount
        ],
        "ports": [],
    }


def _program_helpers(own: Object, site: SiteSettings) -> list[Object]:
    """Return the container that fetches what a program needs, and the one that keeps its checkpoints while it runs."""
    own = own | {"securityContext": _container_security(network.NetworkPlan({}, {}), site.read_only_root)}
    prepare = {"name": PREPARE, "command": ["python", "-m", "muster.trainer.launch.program"]}
    asked = {kind: _without_devices(own["resources"].get(kind) or {}) for kind in ("requests", "limits")}
    keeper = {
        "name": KEEPER,
        "command": ["python", "-m", "muster.trainer.programs.keeper"],
        "restartPolicy": "Always",
        # The program starts once the keeper watches: what it saves before that would not be kept.
        "startupProbe": {
            "exec": {"command": ["test", "-f", f"{ROOT}/worker/{KEEPER_STATE}"]},
            "periodSeconds": 1,
            "failureThreshold": 120,
        },
    }
    return [
        copy.deepcopy(own | prepare | {"resources": asked}),
        copy.deepcopy(own | keeper | {"resources": KEEPER_RESOURCES}),
    ]


def _without_devices(asked: Object) -> Object:
    return {name: amount for name, amount in asked.items() if name in ("cpu", "memory")}
