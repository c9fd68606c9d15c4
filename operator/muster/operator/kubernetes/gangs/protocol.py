"""The questions that the operator asks of whoever schedules a gang."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from muster.kube import paths
from muster.kube.client import Object
from muster.operator.kubernetes.pods import PodState
from muster.words.job import JobSpec


class UnservedApi(OSError):
    """Error that something the gang needs is not installed or not enabled in this cluster; the message names it."""


class MisnamedObject(ValueError):
    """The job names what is not in this cluster, or does not name what it has to; the message says what."""


@dataclass(frozen=True, slots=True)
class GangRef:
    """One gang that asks for nodes together.

    Its scheduler knows it as `group`, which stays the same while the job keeps its nodes over several attempts. `queue`
    is the user's queue, empty if none is named. `owner` is the reference to the job.
    """

    namespace: str
    job: str
    job_uid: str
    attempt: int
    reservation: int
    size: int
    spec: JobSpec
    queue: str
    owner: Object = field(hash=False)

    @property
    def group(self) -> str:
        return f"{self.job}-r{self.reservation}"


@dataclass(frozen=True, slots=True)
class GangObject:
    """An object of a gang. `path` is that of its collection; `needs` says in words what has to be installed for it."""

    path: str
    body: Object
    needs: str

    @property
    def place(self) -> str:
        return f"{self.path}/{self.body['metadata']['name']}"


class GangScheduler(Protocol):
    kind: str
    places: bool  # Muster chooses the nodes itself; else the scheduler does
    gate: str | None  # behind which pods are made where some were refused; lifted from the whole gang together

    def objects(self, gang: GangRef) -> tuple[GangObject, ...]:
        """Return the objects that must exist before the pods, in this order. Raises UnservedApi, MisnamedObject."""

    def decorate(self, pod: Object, gang: GangRef) -> None:
        """Make the pod one of the gang."""

    def refusal(self, pod: Object) -> str:
        """Return why the pod that the API server made is not part of the gang after all; empty if it is."""

    def status_path(self, gang: GangRef) -> str | None:
        """Path of the object that reports the group's state; None if only the pods show it."""

    def waiting(self, pods: tuple[PodState, ...], group: Object | None) -> str:
        """Return why the gang has no nodes yet, in the scheduler's words; empty once every pod has one."""

    def lost(self, group: Object | None) -> str:
        """Return why the group must leave its nodes (its quota was taken back); empty if it may stay."""

    def remains(self, gang: GangRef) -> tuple[str, ...]:
        """Paths of objects to delete when the job has given its nodes back."""


def unplaced(pods: tuple[PodState, ...]) -> tuple[PodState, ...]:
    """Return the pods that have no node and have not ended."""
    return tuple(pod for pod in pods if not pod.node and not pod.over and not pod.deleting)


def describe_scheduler_wait(name: str, pods: tuple[PodState, ...], reason: str = "") -> str:
    """`waiting` of a scheduler that says its reasons in its group's conditions (told), or in those of the pods."""
    waiting = unplaced(pods)
    if not waiting:
        return ""
    words = reason or next((pod.trouble for pod in waiting if pod.trouble), "")
    return f"waiting for {name} to place {len(waiting)} of {len(pods)} workers" + (f": {words}" if words else "")


def condition(group: Object | None, kind: str) -> Object:
    """The group's condition of that type; empty if there is none."""
    match: Object = next(
        (entry for entry in ((group or {}).get("status") or {}).get("conditions") or () if entry["type"] == kind), {}
    )
    return match


def pod_group(api: str, gang: GangRef, spec: Object, needs: str, kind: str = "PodGroup") -> GangObject:
    """An object of that API that belongs to the job."""
    plural = f"{kind.lower()}s"
    meta = {
        "name": gang.group,
        "namespace": gang.namespace,
        "labels": {"app.kubernetes.io/managed-by": "muster"},
        "ownerReferences": [gang.owner],
    }
    body = {"apiVersion": api, "kind": kind, "metadata": meta, "spec": spec}
    return GangObject(paths.group(api, gang.namespace, plural), body, needs)


def minimal_resources(gang: GangRef) -> Object:
    """Return the gang's total needs, as far as the job states them."""
    from muster.operator.core.placement import shape_of
    from muster.operator.kubernetes.nodes import GPU

    shape = shape_of(gang.spec)
    amounts = {"cpu": shape.cpus * gang.size, "memory": shape.memory_bytes * gang.size, GPU: shape.gpus * gang.size}
    return {name: f"{amount:g}" if name == "cpu" else str(int(amount)) for name, amount in amounts.items() if amount}
