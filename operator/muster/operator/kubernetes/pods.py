"""Memory of a pod: some fifteen of its several hundred fields, because there are many pods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from muster.kube.client import Object
from muster.kube.fields import Fields
from muster.kube.timestamps import seconds_of
from muster.operator.kubernetes.refusals import is_refusal, says_no_cause
from muster.words.names import FIRST_INCARNATION, Label, WorkerId
from muster.words.status import JobStatus

TRAINER = "trainer"  # the container that trains
PREFLIGHT = "preflight"  # the init container that looks at the node first
PREPARE = "prepare"  # the init container that fetches what a program needs
KEEPER = "keeper"  # the native sidecar that keeps the checkpoints of a program
_OURS = frozenset({TRAINER, PREFLIGHT, PREPARE, KEEPER})
# Waiting reasons that pass by themselves; any other one is worth telling.
_ORDINARY = frozenset({"ContainerCreating", "PodInitializing"})


@dataclass(frozen=True, slots=True)
class ContainerEnd:
    """End of a container, as the kubelet reports it. `message` is what it left in its termination message."""

    container: str
    exit_code: int
    reason: str
    message: str
    at: float


@dataclass(frozen=True, slots=True)
class PodState:
    """Known state of one pod.

    `gates` are the scheduling gates that still hold it. `node` is empty until it is scheduled. `trouble` says why it
    does not start, in the kubelet's or scheduler's words, and it is `refused` where that lasts until its user changes
    something. `disruption` is the reason of its condition DisruptionTarget (or Kueue's TerminationTarget), and `reason`
    the pod's own (Evicted, NodeLost). It is `over` when its phase is Succeeded or Failed. `failing` says which
    containers other than ours have failed.
    """

    namespace: str
    name: str
    uid: str
    job_uid: str
    attempt: int
    worker: int
    incarnation: int
    version: int
    created_at: float
    gates: tuple[str, ...]
    node: str
    ip: str
    over: bool
    running_since: float
    scheduled_at: float
    end: ContainerEnd | None
    trouble: str
    refused: bool
    failing: str
    disruption: str
    reason: str
    message: str
    deleting: bool
    given_up: bool

    @property
    def id(self) -> WorkerId:
        return WorkerId(self.attempt, self.worker, self.incarnation)

    @property
    def gone(self) -> bool:
        """Return whether its processes have ended, or it was deleted by force, and only somebody's finalizer keeps
        it."""
        return self.deleting and (self.over or self.given_up)


# That `read_pod` reads.
FIELDS: Fields = {
    "metadata": dict.fromkeys((
        "namespace", "name", "uid", "labels", "resourceVersion", "creationTimestamp", "deletionTimestamp",
        "deletionGracePeriodSeconds",
    )),
    "spec": dict.fromkeys(("schedulingGates", "nodeName"))
    | {"initContainers": [dict.fromkeys(("name", "restartPolicy"))]},
    "status": dict.fromkeys((
        "initContainerStatuses", "containerStatuses", "conditions", "podIP", "phase", "reason", "message",
    )),
}  # fmt: skip


def read_pod(item: Object) -> PodState | None:
    """Parse a pod, or return None for one whose labels are invalid: it is not one of ours, whatever it says."""
    meta, spec, status = item["metadata"], item["spec"], item.get("status") or {}
    labels = meta.get("labels") or {}
    try:
        attempt, worker = int(labels[Label.ATTEMPT]), int(labels[Label.WORKER])
        incarnation = int(labels.get(Label.INCARNATION, FIRST_INCARNATION))  # of earlier releases' pods none says it
    except (KeyError, ValueError):
        return None
    sidecars = {entry["name"] for entry in spec.get("initContainers") or () if entry.get("restartPolicy") == "Always"}
    inits: list[Object] = status.get("initContainerStatuses") or []
    containers = [*inits, *(status.get("containerStatuses") or ())]
    refusal = _refusal(containers)
    conditions = {entry["type"]: entry for entry in status.get("conditions") or ()}
    trainer: Object = next((entry for entry in containers if entry["name"] == TRAINER), {})
    running = (trainer.get("state") or {}).get("running") or {}
    scheduled = conditions.get("PodScheduled", {})
    return PodState(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        job_uid=labels.get(Label.JOB_UID, ""),
        attempt=attempt,
        worker=worker,
        incarnation=incarnation,
        version=int(meta["resourceVersion"]),
        created_at=seconds_of(meta["creationTimestamp"]),
        gates=tuple(gate["name"] for gate in spec.get("schedulingGates") or ()),
        node=spec.get("nodeName", ""),
        ip=status.get("podIP", ""),
        over=status.get("phase") in ("Succeeded", "Failed"),
        running_since=seconds_of(running.get("startedAt")),
        scheduled_at=seconds_of(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else 0.0,
        end=_end(trainer, [entry for entry in inits if entry["name"] not in sidecars]),
        trouble=refusal or _trouble(containers, scheduled),
        refused=bool(refusal),
        failing=_failing([entry for entry in containers if entry["name"] in sidecars or entry not in inits]),
        disruption=_disruption(conditions),
        reason=status.get("reason", ""),
        message=status.get("message", ""),
        deleting="deletionTimestamp" in meta,
        given_up=meta.get("deletionGracePeriodSeconds") == 0,
    )


def _end(trainer: Object, inits: list[Object]) -> ContainerEnd | None:
    """The trainer's end; before it has begun, that of an init container which keeps it from beginning.

    What else is in the pod ends no worker: a mesh's proxy or a log shipper that somebody's webhook put there may crash
    and be restarted, and a kubelet kills native sidecars (init containers that restart) once the trainer is done.
    """
    state = trainer.get("state") or {}
    if "running" in state:
        return None
    ended = [trainer] if state.get("terminated") else inits
    for entry in ended:
        end = (entry.get("state") or {}).get("terminated")
        if end and (entry is trainer or end["exitCode"]):
            return ContainerEnd(
                entry["name"],
                int(end["exitCode"]),
                end.get("reason", ""),
                end.get("message", ""),
                seconds_of(end.get("finishedAt")),
            )
    return None


def _failing(containers: list[Object]) -> str:
    """Return the containers besides the trainer that have failed, now or before their last restart."""
    failures = []
    for entry in containers:
        ends = [(entry.get(state) or {}).get("terminated") or {} for state in ("state", "lastState")]
        code = next((end["exitCode"] for end in ends if end.get("exitCode")), 0)
        # A worker has its own word on how it ended; that the keeper fails is said nowhere else.
        if code and (entry["name"] not in _OURS or entry["name"] == KEEPER):
            failures.append(f"container {entry['name']} exited with {code}")
    return ", ".join(failures)


def _refusal(containers: list[Object]) -> str:
    """Return why our own containers can't start until the job's user changes something; empty if they can."""
    for entry in containers:
        waiting = (entry.get("state") or {}).get("waiting") or {}
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        if entry["name"] in _OURS and is_refusal(reason, message):
            return f"{reason}: {message}".rstrip(": ")
    return ""


def _trouble(containers: list[Object], scheduled: Object) -> str:
    for entry in containers:
        waiting = (entry.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in _ORDINARY:
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    if scheduled.get("status") == "False" and scheduled.get("reason") != "SchedulingGated":
        return f"{scheduled.get('reason', 'Unschedulable')}: {scheduled.get('message', '')}".rstrip(": ")
    return ""


def _disruption(conditions: dict[str, Object]) -> str:
    for kind in ("DisruptionTarget", "TerminationTarget"):
        condition = conditions.get(kind, {})
        if condition.get("status") == "True":
            return str(condition.get("reason") or kind)
    return ""


def _only_comes(before: PodState, pod: PodState) -> bool:
    """Return whether the pod was only placed, or runs now, or has no change that anybody reads."""
    return pod == replace(
        before, version=pod.version, node=pod.node, ip=pod.ip, scheduled_at=pod.scheduled_at,
        running_since=pod.running_since or before.running_since,
    )  # fmt: skip


def _only_leaves(before: PodState, pod: PodState) -> bool:
    """Return whether the pod had ended, and is now only being deleted."""
    return before.over and pod == replace(before, version=pod.version, deleting=pod.deleting, given_up=pod.given_up)


def gang_of(pods: Iterable[PodState], status: JobStatus) -> list[PodState]:
    """Return the pods of the current attempt's workers, each in its current incarnation."""
    return [pod for pod in pods if pod.id == status.current(pod.worker)]


class PodCache:
    """The pods of all jobs, by job.

    `enqueue` is called with the uid of each job whose pods changed. `enqueue_later` is called instead where further
    changes of the job are expected, so that one look sees them together.
    """

    def __init__(self, enqueue: Callable[[str], None], enqueue_later: Callable[[str], None] | None = None) -> None:
        self._enqueue, self._enqueue_later = enqueue, enqueue_later or enqueue
        self._by_job: dict[str, dict[str, PodState]] = {}  # job uid → pod uid → pod
        self._job_of: dict[str, str] = {}
        self._leaving: dict[str, PodState] = {}

    def of(self, job_uid: str) -> tuple[PodState, ...]:
        return tuple(self._by_job.get(job_uid, {}).values())

    def jobs(self) -> tuple[str, ...]:
        """Return the uids of the jobs that have pods."""
        return tuple(self._by_job)

    def __len__(self) -> int:
        return len(self._job_of)

    def all(self) -> Iterator[PodState]:
        for pods in self._by_job.values():
            yield from pods.values()

    def leaving(self, job_uid: str) -> tuple[PodState, ...]:
        """The last pod that was asked to end, as it was then: between two looks it may have left altogether."""
        return (self._leaving[job_uid],) if job_uid in self._leaving else ()

    def forget_leaving(self, job_uid: str) -> None:
        self._leaving.pop(job_uid, None)

    def put(self, item: Object) -> None:
        pod = read_pod(item)
        if pod is not None:
            self.keep(pod)

    def keep(self, pod: PodState) -> None:
        """Unless a newer version is known."""
        pods = self._by_job.setdefault(pod.job_uid, {})
        before = pods.get(pod.uid)
        if before is not None and before.version >= pod.version:
            return
        if before is not None and before.refused and says_no_cause(pod.trouble):
            pod = replace(pod, trouble=before.trouble, refused=True)  # an older kubelet says why only when it pulls
        pods[pod.uid] = pod
        self._job_of[pod.uid] = pod.job_uid
        # Of one that we don't know this is old news: a fresh list without it came first.
        if before and not before.deleting and pod.deleting and not (pod.over or pod.given_up):
            self._leaving[pod.job_uid] = pod
        if before is None:
            if pod.node or pod.over or pod.deleting or pod.trouble:  # of one just made its maker tells
                self._enqueue(pod.job_uid)
        elif _only_comes(before, pod):
            self._enqueue_later(pod.job_uid)  # news comes from its ranks, once they are there
        elif not _only_leaves(before, pod) or all(other.gone for other in pods.values()):
            self._enqueue(pod.job_uid)

    def drop(self, item: Object) -> None:
        self._forget(item["metadata"]["uid"])

    def keep_only(self, uids: set[str]) -> None:
        for uid in self._job_of.keys() - uids:
            self._forget(uid)

    def replace(self, job_uid: str, pods: tuple[PodState, ...]) -> None:
        """A fresh list of one job's pods."""
        here = {pod.uid for pod in pods}
        for uid in self._by_job.get(job_uid, {}).keys() - here:
            self._forget(uid)
        for pod in pods:
            self.keep(pod)

    def _forget(self, uid: str) -> None:
        job_uid = self._job_of.pop(uid, None)
        if job_uid is None:
            return
        pods = self._by_job[job_uid]
        left = pods.pop(uid)
        if not pods:
            self._by_job.pop(job_uid)
        swept = left.over and all(pod.over for pod in pods.values())  # a gang that has ended: only its last is news
        if not swept or all(pod.gone for pod in pods.values()):
            self._enqueue(job_uid)
