"""KAI (NVIDIA's scheduler, once Run:ai's): a PodGroup in one of its queues, and an annotation that names it.

KAI's own pod-grouper would make a group of one member of pods whose owner it does not know, so the group is ours, and
the pods name it from the start.
"""

from __future__ import annotations

from muster.kube.client import Object
from muster.operator.kubernetes.gangs.protocol import (
    GangObject,
    GangRef,
    MisnamedObject,
    condition,
    describe_scheduler_wait,
    pod_group,
)
from muster.operator.kubernetes.pods import PodState

API = "scheduling.run.ai/v2alpha2"
QUEUE_LABEL = "kai.scheduler/queue"
GROUP_ANNOTATION = "pod-group-name"
# What pod-grouper reads where it makes the group itself, so that even then the gang is one.
MIN_MEMBER = "kai.scheduler/batch-min-member"


class KaiScheduler:
    kind = "kai"
    places = False
    gate: str | None = None

    def objects(self, gang: GangRef) -> tuple[GangObject, ...]:
        if not gang.queue:
            raise MisnamedObject("KAI schedules nothing without a queue: name one in spec.gang.scheduler.queue")
        spec: Object = {"minMember": gang.size, "queue": gang.queue}
        if gang.spec.priority_class_name:
            spec["priorityClassName"] = gang.spec.priority_class_name
        item = pod_group(API, gang, spec, "KAI's PodGroup")
        item.body["metadata"]["labels"][QUEUE_LABEL] = gang.queue
        return (item,)

    def decorate(self, pod: Object, gang: GangRef) -> None:
        pod["metadata"]["annotations"] |= {GROUP_ANNOTATION: gang.group, MIN_MEMBER: str(gang.size)}
        pod["metadata"]["labels"][QUEUE_LABEL] = gang.queue
        pod["spec"]["schedulerName"] = "kai-scheduler"

    def refusal(self, pod: Object) -> str:
        return ""

    def status_path(self, gang: GangRef) -> str | None:
        return self.objects(gang)[0].place

    def waiting(self, pods: tuple[PodState, ...], group: Object | None) -> str:
        verdict = condition(group, "Unschedulable") or next(
            iter(((group or {}).get("status") or {}).get("schedulingConditions") or ()), {}
        )
        return describe_scheduler_wait(
            "KAI", pods, verdict.get("message", "") if verdict.get("status", "True") == "True" else ""
        )

    def lost(self, group: Object | None) -> str:
        return ""

    def remains(self, gang: GangRef) -> tuple[str, ...]:
        return tuple(item.place for item in self.objects(gang)) if gang.queue else ()
