"""Volcano: a PodGroup in a queue, and an annotation that names it."""

from __future__ import annotations

from muster.kube.client import Object
from muster.operator.kubernetes.gangs.protocol import (
    GangObject,
    GangRef,
    condition,
    describe_scheduler_wait,
    minimal_resources,
    pod_group,
)
from muster.operator.kubernetes.pods import PodState

API = "scheduling.volcano.sh/v1beta1"
ANNOTATION = "scheduling.k8s.io/group-name"
QUEUE = "default"


class VolcanoScheduler:
    kind = "volcano"
    places = False
    gate: str | None = None

    def objects(self, gang: GangRef) -> tuple[GangObject, ...]:
        spec: Object = {
            "minMember": gang.size,
            "minResources": minimal_resources(gang),
            "queue": gang.queue or QUEUE,
        }
        if gang.spec.priority_class_name:
            spec["priorityClassName"] = gang.spec.priority_class_name
        return (pod_group(API, gang, spec, "Volcano's PodGroup"),)

    def decorate(self, pod: Object, gang: GangRef) -> None:
        pod["metadata"]["annotations"][ANNOTATION] = gang.group
        pod["spec"]["schedulerName"] = "volcano"

    def refusal(self, pod: Object) -> str:
        return ""

    def status_path(self, gang: GangRef) -> str | None:
        return self.objects(gang)[0].place

    def waiting(self, pods: tuple[PodState, ...], group: Object | None) -> str:
        verdict = condition(group, "Unschedulable")
        return describe_scheduler_wait(
            "Volcano", pods, verdict.get("message", "") if verdict.get("status") == "True" else ""
        )

    def lost(self, group: Object | None) -> str:
        return ""

    def remains(self, gang: GangRef) -> tuple[str, ...]:
        return tuple(item.place for item in self.objects(gang))
