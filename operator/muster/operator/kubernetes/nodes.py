"""Nodes: what Muster may use of each, whether new workers may go there, and whether it was announced to go away."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from muster.kube.client import Object
from muster.kube.timestamps import seconds_of
from muster.operator.core.fleet import FleetNode
from muster.operator.core.observed import NodeReservation
from muster.words import notices as agents
from muster.words import quantities
from muster.words.pods import Toleration, tolerated
from muster.words.signals import SignalKind

GPU = "nvidia.com/gpu"

# Which labels name a node's pool, the most explicit first.
POOL_LABELS = (
    "muster.dev/pool",
    "karpenter.sh/nodepool",
    "eks.amazonaws.com/nodegroup",
    "cloud.google.com/gke-nodepool",
    "kubernetes.azure.com/agentpool",
    "node.kubernetes.io/instance-type",
)
SPOT_LABELS = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-spot": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
# Taints by which somebody announces that the node will go: the training there should commit and leave.
LEAVING_TAINTS = {
    "aws-node-termination-handler/spot-itn": SignalKind.SPOT_NOTICE,
    "aws-node-termination-handler/asg-lifecycle-termination": SignalKind.NODE_DRAIN,
    "aws-node-termination-handler/scheduled-maintenance": SignalKind.NODE_DRAIN,
    "karpenter.sh/disrupted": SignalKind.NODE_DRAIN,
    "karpenter.sh/disruption": SignalKind.NODE_DRAIN,
    "cloud.google.com/impending-node-termination": SignalKind.SPOT_NOTICE,
    "ToBeDeletedByClusterAutoscaler": SignalKind.NODE_DRAIN,
} | {taint: kind for kind, taint in agents.TAINTS.items()}
# Taints by which Kubernetes itself tells how a node fares. Like the ones above they say nothing of whom it is for.
PASSING_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
# The agent renews its condition every five minutes; a node object is too dear for more.
AGENT_SILENT_SECONDS = 900.0
# HyperPod's own word for a node that it is about to replace or reboot.
HEALTH_LABEL = "sagemaker.amazonaws.com/node-health-status"


@dataclass(frozen=True, slots=True)
class NodeNotice:
    """Notice that the node will go, or that it is broken. `at` is the time of the announcement, or when it was first
    seen if none was given.
    """

    kind: SignalKind
    at: float
    message: str
    source: str


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Known state of one node.

    `node` is all of it, as if nobody else used it. Its kubelet reports if it `answers`, else it is silent since
    `silent_since`. `unfit` says why no new worker should go there; if it is empty, those may that tolerate its taints.
    `faults` is what the agent found that hits the processes there and not the node.
    """

    node: FleetNode
    answers: bool
    silent_since: float
    unfit: str
    notice: NodeNotice | None
    faults: tuple[agents.Notice, ...] = ()

    def unfit_for(self, tolerations: Iterable[Toleration]) -> str:
        """Return why no new worker with these tolerations, besides the platform's, should go there; empty if it may."""
        keeping_out = next((taint for taint in self.node.taints if not tolerated(taint, tolerations)), None)
        return self.unfit or (f"it has the taint {keeping_out[0]}" if keeping_out else "")


def read_node(item: Object, tolerations: tuple[Toleration, ...], now: float) -> NodeFacts:
    """Return the relevant state of a node. `tolerations` are those that every worker has."""
    meta, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    labels, free = meta.get("labels") or {}, status.get("allocatable") or {}
    ready: Object = next((entry for entry in status.get("conditions") or () if entry["type"] == "Ready"), {})
    answers = ready.get("status") == "True"
    taints = [
        (str(taint["key"]), str(taint.get("value") or ""), str(taint.get("effect") or ""))
        for taint in spec.get("taints") or ()
        if taint.get("effect") != "PreferNoSchedule"
    ]
    notices = _notices_in(meta.get("annotations") or {})
    notice = _notice(spec.get("taints") or (), labels, notices, now)
    passing = [key for key, _, _ in taints if key in LEAVING_TAINTS or key.startswith(PASSING_TAINTS)]
    unfit = _unfit(answers, bool(spec.get("unschedulable")), labels, notice, passing)
    node = FleetNode(
        name=meta["name"],
        pool=next((labels[label] for label in POOL_LABELS if labels.get(label)), "default"),
        capacity="spot" if any(labels.get(label) == value for label, value in SPOT_LABELS.items()) else "on-demand",
        gpus=int(quantity(free.get(GPU))),
        cpus=quantity(free.get("cpu")),
        memory_bytes=int(quantity(free.get("memory"))),
        slots=int(quantity(free.get("pods", "110"))),
        instance_type=labels.get("node.kubernetes.io/instance-type", ""),
        labels=labels,
        ready=not unfit,
        away=_away(answers, bool(spec.get("unschedulable")), notice),
        taints=tuple(taint for taint in taints if taint[0] not in passing and not tolerated(taint, tolerations)),
    )
    silent_since = 0.0 if answers else seconds_of(ready.get("lastTransitionTime")) or now
    faults = tuple(each for each in notices if each.remedy is agents.Remedy.RESTART)
    return NodeFacts(node, answers, silent_since, unfit, notice, faults)


def _agent_seen(item: Object) -> float | None:
    """Return when the node's agent last wrote; 0 if it said that it stops, None if there never was one."""
    for entry in (item.get("status") or {}).get("conditions") or ():
        if entry["type"] == agents.AGENT_CONDITION:
            return (seconds_of(entry.get("lastHeartbeatTime")) or 0.0) if entry.get("status") == "True" else 0.0
    return None


def _notices_in(annotations: dict[str, str]) -> tuple[agents.Notice, ...]:
    """Return the notices of the node's agent; unreadable ones are ignored."""
    try:
        text = annotations.get(agents.NOTICES)
        return agents.NodeNotices.model_validate_json(text).notices if text else ()
    except ValidationError:
        return ()


def _notice(
    taints: Iterable[Object], labels: dict[str, str], notices: tuple[agents.Notice, ...], now: float
) -> NodeNotice | None:
    """A taint that somebody removed by hand is settled, whatever an annotation still says; it only explains."""
    for taint in taints:
        kind = LEAVING_TAINTS.get(taint["key"])
        if kind is not None and taint.get("effect") != "PreferNoSchedule":
            why = [notice for notice in notices if notice.kind is kind and notice.keeps_out]
            if why and taint["key"] == agents.TAINTS.get(kind):
                return NodeNotice(kind, why[0].at, why[0].message, why[0].source)
            at = seconds_of(taint.get("timeAdded")) or now
            return NodeNotice(kind, at, f"the node has the taint {taint['key']}: it will go away", taint["key"])
    health = labels.get(HEALTH_LABEL, "")
    if health.startswith("UnschedulablePending"):
        return NodeNotice(SignalKind.NODE_DRAIN, now, f"HyperPod marked the node {health}", HEALTH_LABEL)
    return None


def _away(answers: bool, cordoned: bool, notice: NodeNotice | None) -> str:
    """Return why such nodes take no workers, in words for a sentence about several nodes."""
    if not answers:
        return "not ready"
    if cordoned:
        return "cordoned"
    return "going away or at fault" if notice is not None else "unhealthy or tainted"


def _unfit(
    answers: bool, cordoned: bool, labels: dict[str, str], notice: NodeNotice | None, passing: Sequence[str]
) -> str:
    if not answers:
        return "it is not ready"
    if cordoned:
        return "it is cordoned"
    if notice is not None:
        return notice.message
    if labels.get(HEALTH_LABEL, "Schedulable") != "Schedulable":
        return f"its health is {labels[HEALTH_LABEL]}"
    return f"it has the taint {passing[0]}" if passing else ""


class NodeCache:
    """All nodes as last read. `on_change` is called with the name of each node that changed in a way that matters."""

    def __init__(
        self, tolerations: tuple[Toleration, ...], now: Callable[[], float], on_change: Callable[[str], None]
    ) -> None:
        self._tolerations, self._now, self._on_change = tolerations, now, on_change
        self._facts: dict[str, NodeFacts] = {}
        self._names: dict[str, str] = {}  # uid → name
        self._agents: dict[str, float] = {}  # name → when its agent last said that it watches

    def get(self, name: str) -> NodeFacts | None:
        return self._facts.get(name)

    def put(self, item: Object) -> None:
        name = item["metadata"]["name"]
        before, after = self._facts.get(name), read_node(item, self._tolerations, self._now())
        if before is not None and before.notice and after.notice and before.notice.kind == after.notice.kind:
            after = replace(after, notice=before.notice)  # keep when it was first seen
        self._names[item["metadata"]["uid"]] = name
        self._facts[name] = after
        if (seen := _agent_seen(item)) is not None:
            self._agents[name] = seen
        if before != after:
            self._on_change(name)

    def drop(self, item: Object) -> None:
        self._forget(item["metadata"]["uid"])

    def keep_only(self, uids: set[str]) -> None:
        for uid in self._names.keys() - uids:
            self._forget(uid)

    def _forget(self, uid: str) -> None:
        name = self._names.pop(uid, None)
        if name is not None and name not in self._names.values():
            self._facts.pop(name, None)
            self._agents.pop(name, None)
            self._on_change(name)

    def agents(self) -> dict[str, int]:
        """Count the nodes with a watching agent, a silent one, or none. It is only reported."""
        now = self._now()
        silent = sum(now - at > AGENT_SILENT_SECONDS for at in list(self._agents.values()))
        return {
            "watching": len(self._agents) - silent,
            "silent": silent,
            "none": max(0, len(self._facts) - len(self._agents)),
        }

    def facts(self) -> tuple[NodeFacts, ...]:
        return tuple(self._facts.values())

    def fleet(self, others: ForeignUsage) -> tuple[FleetNode, ...]:
        """All nodes, without what daemons take of each for ever."""
        return tuple(others.without_daemons(facts.node) for facts in self._facts.values())


@dataclass(frozen=True, slots=True)
class _PodUse:
    node: str
    daemon: bool
    gpus: int
    cpus: float
    memory_bytes: int


class ForeignUsage:
    """Usage of each node by pods that Muster did not place: daemons, other people's work, gangs of other schedulers."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._uses: dict[str, _PodUse] = {}
        self._totals: dict[tuple[str, bool], list[float]] = {}  # (node, daemons?) → gpus, cpus, bytes, pods

    def put(self, item: Object) -> None:
        uid, use = item["metadata"]["uid"], _use(item)
        before = self._uses.get(uid)
        if before == use:
            return
        if before is not None:
            self._add(before, -1)
        self._uses[uid] = use
        self._add(use, 1)
        self._on_change()

    def drop(self, item: Object) -> None:
        self._forget(item["metadata"]["uid"])

    def keep_only(self, uids: set[str]) -> None:
        for uid in self._uses.keys() - uids:
            self._forget(uid)

    def without_daemons(self, node: FleetNode) -> FleetNode:
        gpus, cpus, memory, pods = self._totals.get((node.name, True), _NOTHING)
        others = self._totals.get((node.name, False), _NOTHING)[3]
        if not pods and not others:
            return node
        return replace(
            node,
            gpus=max(0, node.gpus - int(gpus)),
            cpus=max(0.0, node.cpus - cpus),
            memory_bytes=max(0, node.memory_bytes - int(memory)),
            slots=max(0, node.slots - int(pods) - int(others)),
        )

    def reservations(self) -> tuple[NodeReservation, ...]:
        """Return what the others use, node by node; it may become free."""
        return tuple(
            NodeReservation(f"others/{node}", 0, "", (node,), "", "", int(gpus), cpus, int(memory))
            for (node, daemons), (gpus, cpus, memory, pods) in self._totals.items()
            if pods and not daemons
        )

    def _forget(self, uid: str) -> None:
        if (use := self._uses.pop(uid, None)) is not None:
            self._add(use, -1)
            self._on_change()

    def _add(self, use: _PodUse, sign: int) -> None:
        totals = self._totals.setdefault((use.node, use.daemon), [0.0, 0.0, 0.0, 0.0])
        for index, amount in enumerate((use.gpus, use.cpus, use.memory_bytes, 1)):
            totals[index] += sign * amount


_NOTHING = [0.0, 0.0, 0.0, 0.0]


def _use(item: Object) -> _PodUse:
    spec = item["spec"]
    needs = [_requests(container) for container in spec["containers"]]
    initial = [_requests(container) for container in spec.get("initContainers") or ()]
    gpus, cpus, memory = (
        max(sum(need[index] for need in needs), max((need[index] for need in initial), default=0.0))
        for index in range(3)
    )
    owners = item["metadata"].get("ownerReferences") or ()
    daemon = any(owner["kind"] == "DaemonSet" for owner in owners)
    return _PodUse(spec.get("nodeName", ""), daemon, int(gpus), cpus, int(memory))


def _requests(container: Object) -> tuple[float, float, float]:
    asked = (container.get("resources") or {}).get("requests") or {}
    return quantity(asked.get(GPU)), quantity(asked.get("cpu")), quantity(asked.get("memory"))


def quantity(text: object) -> float:
    """A quantity that other people wrote; one in a spelling that Muster does not know counts as nothing."""
    try:
        return quantities.quantity(str(text)) if text is not None else 0.0
    except ValueError:
        return 0.0
