"""Kueue's pod groups: its webhook gates the pods, its quota admits them together, and a lost pod may be replaced.

Kueue owns the Workload, which has the group's name. A pod group whose pods are all gone keeps its quota for their
replacements, so the Workload is deleted when the job has given its nodes back, and only then.
"""

from __future__ import annotations

from muster.kube import paths
from muster.kube.client import Object
from muster.operator.kubernetes.gangs.protocol import (
    GangObject,
    GangRef,
    MisnamedObject,
    UnservedApi,
    condition,
    unplaced,
)
from muster.operator.kubernetes.pods import PodState

API_GROUP = "kueue.x-k8s.io"
VERSIONS = ("v1beta2", "v1beta1")
QUEUE = f"{API_GROUP}/queue-name"
GROUP_NAME = f"{API_GROUP}/pod-group-name"
TOTAL_COUNT = f"{API_GROUP}/pod-group-total-count"
ADMISSION_GATE = f"{API_GROUP}/admission"
FINALIZER = f"{API_GROUP}/managed"
# Lets Kueue, too, give up on pods of a node that does not answer (its FailureRecoveryPolicy).
FORCEFULLY = f"{API_GROUP}/safe-to-forcefully-delete"


class KueueScheduler:
    """Kueue. `version` is that of its API which the API server serves, or None if Kueue is not installed."""

    kind = "kueue"
    places = False
    gate: str | None = None

    def __init__(self, version: str | None) -> None:
        self.version = version

    def objects(self, gang: GangRef) -> tuple[GangObject, ...]:
        if self.version is None:
            raise UnservedApi("Kueue is not installed in this cluster (no kueue.x-k8s.io API)")
        if not gang.queue:
            raise MisnamedObject(
                f"no queue is named: label the job {QUEUE}, or name it in spec.gang.scheduler.queue (a LocalQueue)"
            )
        return ()

    def decorate(self, pod: Object, gang: GangRef) -> None:
        meta = pod["metadata"]
        meta["labels"] |= {QUEUE: gang.queue, GROUP_NAME: gang.group}
        meta["annotations"] |= {TOTAL_COUNT: str(gang.size), FORCEFULLY: "true"}
        topology = gang.spec.gang.topology
        for strength, label in (("required", topology.required), ("preferred", topology.preferred)):
            if label:
                meta["annotations"][f"{API_GROUP}/podset-{strength}-topology"] = label

    def refusal(self, pod: Object) -> str:
        """Return why a pod that Kueue's webhook has not changed is refused: it would run past every quota."""
        if FINALIZER in (pod["metadata"].get("finalizers") or ()):
            return ""
        return (
            "Kueue did not take the pod into its care: its integration `pod` is off, or does not cover this namespace"
        )

    def status_path(self, gang: GangRef) -> str | None:
        if self.version is None:
            return None
        return paths.group(f"{API_GROUP}/{self.version}", gang.namespace, "workloads", gang.group)

    def waiting(self, pods: tuple[PodState, ...], group: Object | None) -> str:
        waiting = unplaced(pods)
        if not waiting:
            return ""
        if not any(ADMISSION_GATE in pod.gates for pod in waiting):
            words = next((pod.trouble for pod in waiting if pod.trouble), "")
            return f"admitted by Kueue; {len(waiting)} of {len(pods)} workers have no node yet" + (
                f": {words}" if words else ""
            )
        verdict = condition(group, "QuotaReserved")
        words = verdict.get("message", "") if verdict.get("status") == "False" else ""
        return f"waiting for Kueue to admit {len(pods)} workers" + (f": {words}" if words else "")

    def lost(self, group: Object | None) -> str:
        evicted = condition(group, "Evicted")
        if evicted.get("status") == "True":
            return f"Kueue evicted the gang: {evicted.get('reason', '')}: {evicted.get('message', '')}"
        if group is not None and condition(group, "Finished").get("status") == "True":
            return "Kueue regards the gang as finished"
        return ""

    def remains(self, gang: GangRef) -> tuple[str, ...]:
        path = self.status_path(gang)
        return (path,) if path else ()
